r"""The mHC functions of Transformer Engine (``transformer_engine.pytorch.triton.mhc``), on mhckit's operators.

    projection      H[m,p] = sum_k x[m,k] phi[p,k] w[k]         ms[m] = mean_k x[m,k]^2
    scale           l = H alpha[group] / sqrt(ms + 2^-23) + beta
                    h_pre = sigmoid(l)      h_post = 2 sigmoid(l)      h_res = l
    sinkhorn        H_res = exp(h_res), then `iters` times: rows, then columns, divided by their sums
    aggregate       out[c] = sum_i x[c,i] H_pre[i]
    expand_combine  out[c,o] = sum_i x[c,i] H_res[i,o] + (f[c] + bias[c]) H_post[o]

s, b tokens (any leading axes will do; M = s*b); C channels; n streams, i in and o out, on the *last* axis of x;
K = C*n with k = c*n + i; P = n*n + 2n rows of phi: n pre, n post, n*n res.

Memory. mhckit's kernels want each stream's channels side by side, (..., n, C). So x keeps its shape (..., C, n) and
changes its strides: a tensor whose ``x.mT`` is contiguous is used as it is, every x that a function here returns has
such strides, and so do its gradients. A chain of calls copies no streams. An x that is contiguous as (..., C, n) is
converted in each call that mixes streams (not in the projection): convert it once, where the streams are made,

    x = to_streams_first(h[..., None].expand(*h.shape, n))

What differs on purpose:
- x has other strides than in Transformer Engine: ``x.view(s * b, n * C)`` raises on it. Give ``mhc_fused_projection``
  x itself; it takes (..., C, n) besides (M, K).
- Any n from 1 to 8 on a GPU, any n on a CPU, not 4 alone; H is padded to a multiple of 32 columns.
- ``use_tf32``, ``use_split_k`` and ``recompute_hist`` are accepted and change nothing: sums are float32, deterministic
  whatever the flags, and the backward of Sinkhorn recomputes its history on chip.
- ``fused_grad_x_acc_buffer`` must be None. There it takes the gradient of x away from autograd, and callers read it
  from the buffer; here the gradient leaves through autograd alone. ``mhc_generate_mix_and_aggregate`` is one operator,
  which adds its parts of that gradient before it rounds.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from mhckit.ops import activate, enter, post, pre, project, sinkhorn
from mhckit.ops._check import check_optional, check_shape, check_tensor
from mhckit.recipe import Recipe

from ._check import check_count
from ._recipes import recipe_of

__all__ = [
    "mhc_fused_aggregate",
    "mhc_fused_expand_combine",
    "mhc_fused_projection",
    "mhc_fused_scale",
    "mhc_fused_sinkhorn",
    "mhc_generate_mix_and_aggregate",
    "to_streams_first",
]

PADDING = 32  # columns of H


def to_streams_first(x: Tensor) -> Tensor:
    """x (..., C, n) with the same shape and values, in memory that the functions here use without a copy.

    One pass over x, or none if its memory is in that order already. ``x.contiguous()`` is the way back.
    """
    _check_x(x, "(..., C, n)")
    return x.mT.contiguous().mT


def mhc_fused_projection(
    x: Tensor,
    phi: Tensor,
    use_tf32: bool = True,
    norm_weight: Tensor | None = None,
    fused_grad_x_acc_buffer: Tensor | None = None,
    use_split_k: bool = False,
) -> tuple[Tensor, Tensor]:
    """The projection of every token's streams, and their mean square. Never copies a contiguous x.

    Args:
        x: (M, K), or the streams themselves, (..., C, n).
        phi: (P, K), columns c*n + i.
        use_tf32, use_split_k: no effect.
        norm_weight: (K,), multiplies the columns of phi.
        fused_grad_x_acc_buffer: must be None.

    Returns:
        H (M, 32), zero beyond its first P columns, and ms (M,), in float32.
    """
    _refuse(fused_grad_x_acc_buffer)
    _check_x(x, "(M, K) or (..., C, n)")
    n = _streams_of(phi)
    width = x.shape[-1] if x.ndim == 2 else x.shape[-2] * x.shape[-1]
    if width % n or (x.ndim > 2 and x.shape[-1] != n):
        raise ValueError(
            f"x must be (M, n*C) or (..., C, n) with n = {n}, of the {phi.shape[0]} rows of phi, got {tuple(x.shape)}"
        )
    check_shape("phi", phi, "(n*n + 2n, n*C)", (phi.shape[0], width), like=x)
    check_optional("norm_weight", norm_weight, "(n*C,)", (width,), like=x)
    if x.ndim > 2 and not x.is_contiguous():
        x, phi, norm_weight = (
            x.mT,
            _stream_major(phi, n),
            None if norm_weight is None else _stream_major(norm_weight, n),
        )
    # Otherwise columns of x and of phi are in one order already, and any division into n groups gives the same sums.
    H, ms = project(x.reshape(-1, n, width // n), phi, norm_weight=norm_weight)
    return F.pad(H, (0, -H.shape[-1] % PADDING)), ms


def mhc_fused_scale(H: Tensor, alpha: Tensor, beta: Tensor, ms: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients from what ``mhc_fused_projection`` returned.

    Args:
        H: (M, 32); the first P columns count.
        alpha: (3,), for pre, post, res.
        beta: (1, P).
        ms: (M,).
        n: streams.

    Returns:
        h_pre (M, n), h_post (M, n) and h_res (M, n*n), the logits of ``mhc_fused_sinkhorn``, in the dtype of H.
    """
    recipe = _recipe(check_count("n", n))
    check_tensor("H", H, "(M, 32)")
    if H.ndim != 2 or H.shape[1] < recipe.rows:
        raise ValueError(f"H must be (M, 32) with n*n + 2n = {recipe.rows} columns or more, got {tuple(H.shape)}")
    check_shape("ms", ms, "(M,)", H.shape[:1], like=H)
    check_shape("alpha", alpha, "(3,)", (3,), like=H)
    beta = _check_beta(beta, recipe, like=H)
    h_pre, h_post, h_res = activate(H[:, : recipe.rows], ms, alpha, beta, recipe=recipe)
    assert h_res is not None
    return h_pre.to(H.dtype), h_post.to(H.dtype), h_res.flatten(-2).to(H.dtype)


def mhc_fused_sinkhorn(H_res: Tensor, n: int = 4, recompute_hist: bool = True, iters: int = 20) -> Tensor:
    """Doubly stochastic matrices from logits, exact for logits of any size.

    Args:
        H_res: (s, b, n, n).
        n: streams.
        recompute_hist: no effect.
        iters: how often rows and columns are normalised, at least once.

    Returns:
        (s, b, n, n) in the dtype and orientation of H_res.
    """
    recipe = _recipe(check_count("n", n), iters, "out_in")  # returned as it is stored
    check_tensor("H_res", H_res, "(s, b, n, n)")
    check_shape("H_res", H_res, "(s, b, n, n)", (*H_res.shape[:-2], n, n))
    matrix = sinkhorn(H_res, recipe=recipe)
    assert matrix is not None
    return matrix.to(H_res.dtype)


def mhc_fused_aggregate(
    x: Tensor, H_pre: Tensor, n: int, use_tf32: bool = True, fused_grad_x_acc_buffer: Tensor | None = None
) -> Tensor:
    """What the sublayer reads: out = x @ H_pre.

    Args:
        x: streams (s, b, C, n).
        H_pre: (s, b, n).
        n: streams.
        use_tf32: no effect.
        fused_grad_x_acc_buffer: must be None.

    Returns:
        (s, b, C) in the dtype of x.
    """
    _refuse(fused_grad_x_acc_buffer)
    _check_x(x, "(s, b, C, n)", n)
    check_shape("H_pre", H_pre, "(s, b, n)", (*x.shape[:-2], n), like=x)
    return pre(x.mT, H_pre)


def mhc_fused_expand_combine(
    f: Tensor,
    bias: Tensor | None,
    H_post: Tensor,
    x: Tensor,
    H_res: Tensor,
    n: int,
    use_tf32: bool = True,
    fused_grad_x_acc_buffer: Tensor | None = None,
) -> Tensor:
    """Write the sublayer's output back: out = (f + bias) @ H_post + x @ H_res.

    Args:
        f: the sublayer's output (s, b, C).
        bias: (C,), its last bias, or None.
        H_post: (s, b, n).
        x: streams (s, b, C, n).
        H_res: (s, b, n, n), [in, out].
        n: streams.
        use_tf32: no effect.
        fused_grad_x_acc_buffer: must be None.

    Returns:
        streams (s, b, C, n) in the dtype of x; ``out.mT`` is contiguous.
    """
    _refuse(fused_grad_x_acc_buffer)
    _check_x(x, "(s, b, C, n)", n)
    *lead, channels, _ = x.shape
    check_shape("f", f, "(s, b, C)", (*lead, channels), like=x)
    check_optional("bias", bias, "(C,)", (channels,), like=x)
    check_shape("H_post", H_post, "(s, b, n)", (*lead, n), like=x)
    check_shape("H_res", H_res, "(s, b, n, n)", (*lead, n, n), like=x)
    return post(x.mT, f, H_post, H_res.mT, f_bias=bias).mT


def mhc_generate_mix_and_aggregate(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    beta: Tensor,
    norm_weight: Tensor | None = None,
    use_tf32: bool = True,
    fused_grad_x_acc_buffer: Tensor | None = None,
    use_split_k: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Projection, scale, sinkhorn (20 iterations) and aggregate as one operator.

    Args:
        x: streams (s, b, C, n).
        phi: (P, K), columns c*n + i.
        alpha: (3,), for pre, post, res.
        beta: (1, P).
        norm_weight: (K,), multiplies the columns of phi.
        use_tf32, use_split_k: no effect.
        fused_grad_x_acc_buffer: must be None.

    Returns:
        out (s, b, C) in the dtype of x; H_post (s, b, n) and H_res (s, b, n, n), [in, out], in float32.
    """
    _refuse(fused_grad_x_acc_buffer)
    _check_x(x, "(s, b, C, n)")
    *_, channels, n = x.shape
    recipe = _recipe(n)
    check_shape("phi", phi, "(n*n + 2n, n*C)", (recipe.rows, n * channels), like=x)
    check_shape("alpha", alpha, "(3,)", (3,), like=x)
    beta = _check_beta(beta, recipe, like=x)
    check_optional("norm_weight", norm_weight, "(n*C,)", (n * channels,), like=x)
    norm_weight = None if norm_weight is None else _stream_major(norm_weight, n)
    _, out, mix = enter(x.mT, _stream_major(phi, n), alpha, beta, recipe=recipe, norm_weight=norm_weight)
    assert mix.res is not None
    return out, mix.post, mix.res.mT


def _recipe(n: int, iters: int = 20, stored: str = "in_out") -> Recipe:
    return recipe_of("transformer_engine", streams=n, iterations=iters, stored=stored)


# The usual ones are there from the start, so that the first call may be a compiled one.
for _n in range(1, 9):
    for _stored in ("in_out", "out_in"):
        _recipe(_n, stored=_stored)


def _stream_major(weight: Tensor, n: int) -> Tensor:
    """Columns c*n + i as i*C + c."""
    return weight.unflatten(-1, (-1, n)).mT.flatten(-2)


def _streams_of(phi: Tensor) -> int:
    check_tensor("phi", phi, "(n*n + 2n, n*C)")
    rows = phi.shape[0] if phi.ndim == 2 else 0
    n = math.isqrt(rows + 1) - 1
    if n < 1 or n * n + 2 * n != rows:
        raise ValueError(f"phi must be (n*n + 2n, n*C), 24 rows for n = 4, got {tuple(phi.shape)}")
    return n


def _check_x(x: Tensor, axes: str, n: int | None = None) -> None:
    check_tensor("x", x, axes)
    if x.ndim < 2 or 0 in x.shape[-2:]:
        raise ValueError(f"x must be {axes} with C >= 1 and n >= 1, got {tuple(x.shape)}")
    if n is not None and x.shape[-1] != check_count("n", n):
        raise ValueError(f"x must be {axes} with n = {n}, got n = {x.shape[-1]} in {tuple(x.shape)}")


def _check_beta(beta: Tensor, recipe: Recipe, *, like: Tensor) -> Tensor:
    """beta as (P,)."""
    check_tensor("beta", beta, "(1, n*n + 2n)", like=like)
    if beta.ndim != 1:
        check_shape("beta", beta, "(1, n*n + 2n)", (1, recipe.rows))
    return check_shape("beta", beta.flatten(), "(1, n*n + 2n)", (recipe.rows,))


def _refuse(fused_grad_x_acc_buffer: Tensor | None) -> None:
    if fused_grad_x_acc_buffer is not None:
        raise ValueError(
            "fused_grad_x_acc_buffer must be None: mhckit returns the gradient of x through autograd and would leave "
            "the buffer untouched; without the argument the gradient of x is the same"
        )
