"""The junction written by others: plain PyTorch, and the libraries that happen to be installed.

An implementation takes a call of `junction` and returns y, x_in, post and res. Libraries are imported on first use; one
that cannot be imported is reported as absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mhckit import Recipe
from mhckit.testing import Call

from .cases import RECIPE
from .step import Implementation


def eager_junction(call: Call) -> tuple[Tensor, ...]:
    """PyTorch as people write it: a few lines of broadcasting, a loop for Sinkhorn, and autograd for the backward."""
    return _plain_junction(call.tensors, call.recipe)


def _plain_junction(tensors: dict[str, Tensor], recipe: Recipe) -> tuple[Tensor, ...]:
    y = plain_write(tensors["x"], tensors["f"], tensors["mix_post"], tensors["mix_res"])
    parameters = (tensors["phi"], tensors["scale"], tensors["bias"], tensors.get("out_norm_weight"))
    x_in, _pre, post, res = plain_read(y, *parameters, recipe)
    return y, x_in, post, res


def plain_write(x: Tensor, f: Tensor, post: Tensor, res: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (res @ x.to(wide) + post[..., None] * f.to(wide)[..., None, :]).to(x.dtype)


def plain_read(
    y: Tensor,
    phi: Tensor,
    scale: Tensor,
    bias: Tensor,
    out_norm_weight: Tensor | None,
    recipe: Recipe,
    out_norm_eps: float = 1e-6,
) -> tuple[Tensor, ...]:
    """x_in, pre, post, res."""
    n, wide = recipe.streams, torch.promote_types(y.dtype, torch.float32)
    flat = y.flatten(-2).to(wide)
    normed = torch.rsqrt(flat.square().mean(-1, keepdim=True) + recipe.norm_eps)
    pre, post, res = ((flat @ phi.T) * normed).split(recipe.groups, -1)
    biases = bias.split(recipe.groups)
    pre = torch.sigmoid(pre * scale[0] + biases[0]) + recipe.pre_eps
    post = recipe.post_scale * torch.sigmoid(post * scale[1] + biases[1])
    res = _sinkhorn((res * scale[2] + biases[2]).unflatten(-1, (n, n)), recipe)

    x_in = (pre[..., None] * y.to(wide)).sum(-2)
    if out_norm_weight is not None:
        x_in = x_in * torch.rsqrt(x_in.square().mean(-1, keepdim=True) + out_norm_eps) * out_norm_weight
    return x_in.to(y.dtype), pre, post, res


def _sinkhorn(logits: Tensor, recipe: Recipe) -> Tensor:
    """DeepSeek-V4's: a softmax, then columns and rows in turn, stored [in, out]; returned [out, in]."""
    matrix = logits.softmax(-1) + recipe.eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + recipe.eps)
    for _ in range(recipe.iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + recipe.eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + recipe.eps)
    return matrix.mT


def _load_eager() -> Implementation:
    return eager_junction


def _load_compiled() -> Implementation:
    """torch.compile of the same function, for the one shape it is then called with."""
    torch.compiler.reset()
    compiled = torch.compile(_plain_junction, dynamic=False, fullgraph=True)
    return lambda call: compiled(call.tensors, call.recipe)


def _load_liger() -> Implementation:
    """phi goes in as Liger stores it, [N*C, P]: the transposed view is what its gradient comes back through."""
    from liger_kernel.transformers.functional import (  # type: ignore[reportMissingImports]
        liger_mhc_coeffs,
        liger_mhc_post_res,
        liger_mhc_pre,
    )

    def junction(call: Call) -> tuple[Tensor, ...]:
        tensors, recipe = call.tensors, call.recipe
        y = liger_mhc_post_res(tensors["x"], tensors["f"], tensors["mix_post"], tensors["mix_res"])
        pre, post, res = liger_mhc_coeffs(
            y,
            tensors["phi"].T,
            tensors["bias"],
            *tensors["scale"].unbind(),
            tmax=recipe.iterations,
            rms_eps=recipe.norm_eps,
            pre_eps=recipe.pre_eps,
            sinkhorn_eps=recipe.eps,
            post_mult=recipe.post_scale,
        )
        return y, liger_mhc_pre(y, pre), post, res

    return junction


def _load_tile_kernels() -> Implementation:
    """TileKernels wants a batch dimension, and the residual matrix [in, out]."""
    from tile_kernels.modeling.mhc.functional import mhc_post, mhc_pre  # type: ignore[reportMissingImports]

    def junction(call: Call) -> tuple[Tensor, ...]:
        tensors, recipe = call.tensors, call.recipe
        post, res = tensors["mix_post"][None, ..., None], tensors["mix_res"].mT[None].contiguous()
        y = mhc_post(tensors["f"][None], tensors["x"][None], post, res)
        x_in, (next_post, next_res) = mhc_pre(
            y,
            tensors["phi"],
            tensors["scale"],
            tensors["bias"],
            norm_eps=recipe.norm_eps,
            mhc_mult=recipe.streams,
            post_mult_value=recipe.post_scale,
            pre_eps=recipe.pre_eps,
            sinkhorn_eps=recipe.eps,
            sinkhorn_repeat=recipe.iterations,
        )
        return y[0], x_in[0], next_post[0, ..., 0], next_res[0].mT

    return junction


@dataclass(frozen=True)
class Baseline:
    """Who to compare with; ``load`` raises ImportError where it is not installed."""

    name: str
    load: Callable[[], Implementation]
    recipe: str = RECIPE


EAGER = Baseline("eager", _load_eager)
COMPILED = Baseline("compiled", _load_compiled)
PEERS = (Baseline("liger", _load_liger, recipe="liger"), Baseline("tile_kernels", _load_tile_kernels))
