"""Megatron's fused functions on mhckit's operators, or on request the native ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mhckit.compat._recipes import recipe_of
from mhckit.ops import activate, post, pre, project, sinkhorn
from mhckit.ops._check import check_eps, check_optional, check_shape, check_tensor
from mhckit.recipe import Recipe, softmax_start

from ._native import (
    EPS,
    native_compute_h,
    native_h_aggregate,
    native_h_post_bda,
    native_proj_rms,
    native_sinkhorn,
    unflattened,
)

BACKENDS = ("auto", "native", "triton", "cutile")


def fused_sinkhorn(input_logits: Tensor, num_iterations: int, eps: float = EPS, *, backend: str = "auto") -> Tensor:
    """Doubly stochastic matrices from logits.

    Args:
        input_logits: [..., n, n].
        num_iterations: how often rows and columns are normalised; the softmax is the first row step.
        eps: added to the softmax and to every sum.
        backend: see the module.

    Returns:
        [..., n, n] in the dtype and orientation of input_logits.
    """
    logits = check_tensor("input_logits", input_logits, "[..., n, n]")
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2] or not logits.shape[-1]:
        raise ValueError(f"input_logits must be [..., n, n], got {tuple(logits.shape)}")
    if _is_native(backend):
        return native_sinkhorn(logits, num_iterations, eps)
    matrix = sinkhorn(logits, recipe=recipe_of_streams(logits.shape[-1], num_iterations, eps, stored="out_in"))
    assert matrix is not None
    return matrix.to(logits.dtype)


def fused_h_aggregate(x: Tensor, h_pre: Tensor, *, backend: str = "auto") -> Tensor:
    """What the sublayer reads: the streams, weighted by h_pre and added.

    Args:
        x: streams [s, b, n, C] or [s, b, n*C].
        h_pre: [s, b, n].
        backend: see the module.

    Returns:
        [s, b, C] in the dtype of x.
    """
    x = unflattened("x", x, check_tensor("h_pre", h_pre, "[s, b, n]"))
    check_shape("h_pre", h_pre, "[s, b, n]", x.shape[:-1], like=x)
    return native_h_aggregate(x, h_pre) if _is_native(backend) else pre(x, h_pre)


def fused_h_post_bda(
    h_res: Tensor,
    original_residual: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Write the sublayer's output back: h_res^T @ original_residual + h_post (x + bias).

    Args:
        h_res: [s, b, n, n], [in, out].
        original_residual: streams [s, b, n, C] or [s, b, n*C].
        h_post: [s, b, n].
        x: the sublayer's output [s, b, C].
        bias: [C], its last bias, or None.
        backend: see the module.

    Returns:
        streams in the shape and dtype of original_residual.
    """
    streams = unflattened("original_residual", original_residual, check_tensor("h_post", h_post, "[s, b, n]"))
    *lead, n, channels = streams.shape
    check_shape("h_res", h_res, "[s, b, n, n]", (*lead, n, n), like=streams)
    check_shape("h_post", h_post, "[s, b, n]", (*lead, n), like=streams)
    check_shape("x", x, "[s, b, C]", (*lead, channels), like=streams)
    check_optional("bias", bias, "[C]", (channels,), like=streams)
    if _is_native(backend):
        return native_h_post_bda(h_res, original_residual, h_post, x, bias)
    return post(streams, x, h_post, h_res.mT, f_bias=bias).reshape(original_residual.shape)


def fused_proj_rms(x: Tensor, weight: Tensor, eps: float = EPS, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The projection of every token's streams, and the reciprocal of their root mean square.

    Args:
        x: [M, K], or [..., K].
        weight: [N, K].
        eps: added to the root mean square.
        backend: see the module.

    Returns:
        proj [M, N] = x @ weight^T and r [M, 1], in the dtype of x.
    """
    eps = check_eps("eps", eps)
    _check_projection(x, weight)
    if _is_native(backend):
        return native_proj_rms(x, weight, eps)
    proj, mean_square = project(x.unflatten(-1, (_streams_of(weight), -1)), weight)
    return proj.to(x.dtype), _reciprocal_rms(mean_square, eps).to(x.dtype)


def fused_proj_rms_compute_h(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    n: int,
    eps: float = EPS,
    compute_h_eps: float = EPS,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``fused_proj_rms`` and the activations after it.

    Args:
        x: [M, n*C].
        weight: [n*n + 2n, n*C].
        alpha_pre, alpha_post, alpha_res: [1] each.
        bias: [n*n + 2n].
        n: streams.
        eps: added to the root mean square.
        compute_h_eps: added to h_pre.
        backend: see the module; "native" computes in float32 too.

    Returns:
        h_pre [M, n], h_post [M, n], h_res [M, n*n] (the logits of ``fused_sinkhorn``) and r [M, 1], in float32.
    """
    recipe = recipe_of_streams(n, norm_eps=eps, pre_eps=compute_h_eps)
    _check_projection(x, weight)
    check_shape("weight", weight, "[n*n + 2n, n*C]", (recipe.rows, x.shape[-1]))
    check_shape("bias", bias, "[n*n + 2n]", (recipe.rows,), like=x)
    if _is_native(backend):
        proj, r = native_proj_rms(x.float(), weight.float(), eps)
        return *native_compute_h(proj, r, one_scale(alpha_pre, alpha_post, alpha_res), bias, n, compute_h_eps), r
    proj, mean_square = project(x.unflatten(-1, (n, -1)), weight)
    alpha = one_scale(alpha_pre, alpha_post, alpha_res)
    h_pre, h_post, h_res = activate(proj, mean_square, alpha, bias, recipe=recipe)
    assert h_res is not None
    return h_pre, h_post, h_res.flatten(-2), _reciprocal_rms(mean_square, eps)


def recipe_of_streams(
    n: int,
    iterations: int = 20,
    eps: float = EPS,
    stored: str = "in_out",
    norm_eps: float = EPS,
    pre_eps: float = EPS,
) -> Recipe:
    fields = dict(streams=n, iterations=iterations, stored=stored, norm_eps=norm_eps, pre_eps=pre_eps)
    return recipe_of("megatron", **fields, **softmax_start(check_eps("eps", eps)))


def one_scale(*alphas: Tensor) -> Tensor:
    """[3] from pre, post, res of one element each."""
    for name, alpha in zip(("alpha_pre", "alpha_post", "alpha_res"), alphas, strict=True):
        if check_tensor(name, alpha, "[1]").numel() != 1:
            raise ValueError(f"{name} must be [1], got {tuple(alpha.shape)}")
    return torch.cat([alpha.reshape(1) for alpha in alphas])


def _reciprocal_rms(mean_square: Tensor, eps: float) -> Tensor:
    """[..., 1]; the root has no gradient at zero."""
    positive = mean_square > 0
    rms = torch.where(positive, torch.where(positive, mean_square, 1.0).sqrt(), 0.0)
    return (1 / (rms + eps))[..., None]


def _streams_of(weight: Tensor) -> int:
    """How to divide the columns of weight for the projection; any division gives the same sums."""
    n = math.isqrt(weight.shape[0] + 1) - 1
    return n if n >= 1 and n * n + 2 * n == weight.shape[0] and weight.shape[1] % n == 0 else 1


def _check_projection(x: Tensor, weight: Tensor) -> None:
    check_tensor("x", x, "[M, K]")
    check_tensor("weight", weight, "[N, K]", like=x)
    if x.ndim < 1 or weight.ndim != 2 or not x.shape[-1] or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight must be [N, K] for x [M, K], got {tuple(weight.shape)} for x {tuple(x.shape)}")


def _is_native(backend: str) -> bool:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    return backend == "native"
