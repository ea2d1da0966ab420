r"""The functional mHC of TileKernels 1.x (tile_kernels.modeling.mhc.functional) on mhckit's operators.

    r        = rsqrt(mean(residual^2) + norm_eps)      l = scale (residual (fn norm_weight)^T) r + base
    pre_mix  = sigmoid(l_pre) + pre_eps                post_mix = post_mult_value sigmoid(l_post)
    comb_mix = softmax(l_comb, rows) + e, then columns, and sinkhorn_repeat - 1 times rows, columns, each divided by
               (their sum + e)

    layer_input[c] = sum_i pre_mix[i] residual[i,c]
    out[o,c]       = sum_i comb_mix[i,o] residual[i,c] + post_mix[o] x[c]

N streams (mhc_mult; o out, i in); C channels (hidden_size, c); e = sinkhorn_eps; residual is [..., N, C]; fn is
[P, N*C] with P = N*N + 2*N rows: N of pre, N of post, then comb_mix row by row as **[in, out]**; post_mix is
[..., N, 1]. Both mixes are float32; layer_input and out have the dtype of residual.

Names, order, defaults and orientation were read from the source of TileKernels, and its formulas are written out again
in the tests; its kernels were not run beside these. The defaults are its own and kept, though they are not those of
DeepSeek-V4: 10 iterations (there 20), and a post_mult_value of 1 (there 2).

What differs on purpose:

- Any N of 1 to 8 on a GPU, any N on a CPU, and all float dtypes; TileKernels wants bfloat16 and promises N = 4 alone.
- fn keeps its float32 precision; TileKernels rounds it to TF32. ``n_splits`` is accepted and has no effect.
- Gradients are ordinary. None travels through an attribute of a tensor's storage, so ``mhc_pre`` and ``mhc_head`` can
  be differentiated without a ``mhc_post`` on the same residual, and no parameter's ``main_grad`` is written: its
  gradient comes from autograd.
- ``norm_weight`` counts with and without gradients.
- comb_mix is a transposed view: TileKernels' shape and values, other strides. ``mhc_post`` takes any strides.
- Bad arguments raise ValueError or TypeError, not AssertionError; norm_eps must be positive.
"""

from __future__ import annotations

from torch import Tensor

from mhckit.ops import enter, expand, head, post
from mhckit.ops._check import check_optional, check_shape, check_tensor
from mhckit.recipe import Recipe, softmax_start

from ._recipes import recipe_of

__all__ = ["expand_from_embedding", "mhc_head", "mhc_post", "mhc_pre"]

_RESIDUAL = "[..., mhc_mult, hidden_size]"
_WIDTH = "mhc_mult * hidden_size"
_ROWS = "mhc_mult * (mhc_mult + 2)"


def expand_from_embedding(x: Tensor, mhc_mult: int = 4) -> Tensor:
    """residual [..., N, C] whose streams are copies of the embedding x [..., C]."""
    check_tensor("x", x, "[..., hidden_size]")
    _check_mult(mhc_mult)
    return expand(x, mhc_mult)


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int = 16,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What a sublayer reads, and how its output will be written back.

    Args:
        residual: streams [..., N, C].
        fn: [N*(N+2), N*C].
        scale: [3], of pre, post and comb.
        base: [N*(N+2)].
        norm_weight: [N*C], multiplies the columns of fn.
        norm_eps: added to the mean square of the projection's norm.
        mhc_mult: N.
        post_mult_value: the largest write weight.
        pre_eps: added to the read weights.
        sinkhorn_eps: added to Sinkhorn's start and to each of its sums; 0 is exact for logits of any size.
        sinkhorn_repeat: Sinkhorn's iterations.
        n_splits: has no effect.

    Returns:
        layer_input [..., C], and (post_mix [..., N, 1], comb_mix [..., N_in, N_out]) for ``mhc_post``.
    """
    width = _check_residual(residual, mhc_mult)
    rows = mhc_mult * (mhc_mult + 2)
    check_shape("fn", fn, f"[{_ROWS}, {_WIDTH}]", (rows, width), like=residual)
    check_shape("scale", scale, "[3]", (3,), like=residual)
    check_shape("base", base, f"[{_ROWS}]", (rows,), like=residual)
    check_optional("norm_weight", norm_weight, f"[{_WIDTH}]", (width,), like=residual)
    recipe = _recipe(mhc_mult, norm_eps, pre_eps, post_mult_value, sinkhorn_eps, sinkhorn_repeat)
    _, layer_input, mix = enter(residual, fn, scale, base, recipe=recipe, norm_weight=norm_weight)
    assert mix.res is not None
    return layer_input, (mix.post.unsqueeze(-1), mix.res.mT)


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> Tensor:
    """The streams after a sublayer.

    Args:
        x: the sublayer's output [..., C].
        residual: the streams that ``mhc_pre`` read [..., N, C].
        post_layer_mix: [..., N, 1].
        comb_res_mix: [..., N_in, N_out].
        out: where to write the result, which costs a copy; of the shape and dtype of residual.

    Returns:
        the streams [..., N, C], in the dtype of residual; ``out``, if given.
    """
    _check_residual(residual)
    *lead, streams, channels = residual.shape
    check_shape("x", x, "[..., hidden_size]", (*lead, channels), like=residual)
    check_shape("post_layer_mix", post_layer_mix, "[..., mhc_mult, 1]", (*lead, streams, 1), like=residual)
    check_shape("comb_res_mix", comb_res_mix, "[..., mhc_mult, mhc_mult]", (*lead, streams, streams), like=residual)
    check_optional("out", out, _RESIDUAL, (*lead, streams, channels), like=residual)
    if out is not None and out.dtype != residual.dtype:
        raise TypeError(f"out {_RESIDUAL} must have the dtype of residual, {residual.dtype}, got {out.dtype}")
    written = post(residual, x, post_layer_mix.squeeze(-1), comb_res_mix.mT)
    return written if out is None else out.copy_(written)


def mhc_head(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    pre_eps: float = 1e-6,
    n_splits: int = 16,
) -> Tensor:
    """The streams as one vector, after the last sublayer: layer_input of ``mhc_pre``, with N rows of fn alone.

    Args:
        residual: streams [..., N, C].
        fn: [N, N*C]; of [N*(N+2), N*C], as TileKernels pads it, the first N rows count.
        scale: [1] or a scalar.
        base: [N].
        norm_weight: [N*C], multiplies the columns of fn.
        norm_eps: added to the mean square of the projection's norm.
        mhc_mult: N.
        pre_eps: added to the read weights.
        n_splits: has no effect.

    Returns:
        [..., C] in the dtype of residual.
    """
    width = _check_residual(residual, mhc_mult)
    padded = check_tensor("fn", fn, f"[mhc_mult, {_WIDTH}]", like=residual).shape == (mhc_mult * (mhc_mult + 2), width)
    fn = fn[:mhc_mult] if padded else check_shape("fn", fn, f"[mhc_mult, {_WIDTH}]", (mhc_mult, width))
    if check_tensor("scale", scale, "[1]", like=residual).numel() != 1:
        raise ValueError(f"scale must be [1] or a scalar, got {tuple(scale.shape)}")
    check_shape("base", base, "[mhc_mult]", (mhc_mult,), like=residual)
    check_optional("norm_weight", norm_weight, f"[{_WIDTH}]", (width,), like=residual)
    if norm_weight is not None:
        fn = fn * norm_weight
    recipe = _recipe(mhc_mult, norm_eps, pre_eps)
    return head(residual, recipe=recipe, fn=fn, scale=scale.reshape(1), base=base)


_NAMES = "sinkhorn_repeat is iterations, sinkhorn_eps is eps and post_mult_value is post_scale"


def _recipe(
    mhc_mult: int,
    norm_eps: float,
    pre_eps: float,
    post_mult_value: float = 1.0,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
) -> Recipe:
    return recipe_of(
        "deepseek_v4",
        _NAMES,
        streams=mhc_mult,
        iterations=sinkhorn_repeat,
        norm_eps=norm_eps,
        pre_eps=pre_eps,
        post_scale=post_mult_value,
        **softmax_start(sinkhorn_eps),
    )


def _check_mult(mhc_mult: int) -> None:
    if isinstance(mhc_mult, bool) or not isinstance(mhc_mult, int) or mhc_mult < 1:
        raise ValueError(f"mhc_mult must be a positive int, got {mhc_mult!r}")


def _check_residual(residual: Tensor, mhc_mult: int | None = None) -> int:
    """N*C of the residual, which must have mhc_mult streams, if that is given."""
    check_tensor("residual", residual, _RESIDUAL)
    if residual.ndim < 2 or 0 in residual.shape[-2:]:
        raise ValueError(f"residual must be {_RESIDUAL}, neither of them 0, got {tuple(residual.shape)}")
    if mhc_mult is not None:
        _check_mult(mhc_mult)
        if residual.shape[-2] != mhc_mult:
            raise ValueError(f"residual must be {_RESIDUAL} with mhc_mult = {mhc_mult}, got {tuple(residual.shape)}")
    return residual.shape[-2] * residual.shape[-1]
