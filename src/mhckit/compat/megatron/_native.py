"""Megatron's functions in plain torch, in the dtype they are given: what the fused ones are compared with."""

from __future__ import annotations

import math

from torch import Tensor

from mhckit.ops._check import check_tensor

EPS = 1e-6  # of the norm, of Sinkhorn and of h_pre


def native_sinkhorn(input_logits: Tensor, num_iterations: int, eps: float = EPS) -> Tensor:
    """``fused_sinkhorn`` in plain torch."""
    matrix = input_logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(num_iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def native_h_aggregate(x: Tensor, h_pre: Tensor) -> Tensor:
    """``fused_h_aggregate`` in plain torch."""
    return (unflattened("x", x, h_pre) * h_pre[..., None]).sum(-2)


def native_h_post_bda(
    h_res: Tensor, original_residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    """``fused_h_post_bda`` in plain torch."""
    mixed = h_res.mT @ unflattened("original_residual", original_residual, h_post)
    written = h_post[..., None] * (x if bias is None else x + bias)[..., None, :]
    return (mixed + written).reshape(original_residual.shape)


def native_proj_rms(x: Tensor, weight: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """``fused_proj_rms`` in plain torch."""
    rms = x.norm(dim=-1, keepdim=True) / math.sqrt(x.shape[-1])
    return x @ weight.t(), 1 / (rms + eps)


def native_compute_h(
    proj: Tensor, r: Tensor, alpha: Tensor, bias: Tensor, n: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (n, n, n * n)
    logits = zip((proj * r).split(sizes, -1), alpha, bias.split(sizes), strict=True)
    h_pre, h_post, h_res = (part * scale + shift for part, scale, shift in logits)
    return h_pre.sigmoid() + eps, 2 * h_post.sigmoid(), h_res


def unflattened(name: str, x: Tensor, weights: Tensor) -> Tensor:
    """Streams [s, b, n, C] from that or from [s, b, n*C]; weights [s, b, n] tell which."""
    check_tensor(name, x, "[s, b, n, C]")
    n = weights.shape[-1] if weights.ndim else 0
    if n and x.ndim == weights.ndim and x.shape[-1] and x.shape[-1] % n == 0:
        return x.unflatten(-1, (n, -1))
    if not n or x.ndim != weights.ndim + 1 or x.shape[-2] != n:
        raise ValueError(f"{name} must be [s, b, n, C] or [s, b, n*C] with n = {n}, got {tuple(x.shape)}")
    return x
