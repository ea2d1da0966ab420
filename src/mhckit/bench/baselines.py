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
    x, f, n = tensors["x"], tensors["f"], recipe.streams
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (tensors["mix_res"] @ x.to(wide) + tensors["mix_post"][..., None] * f.to(wide)[..., None, :]).to(x.dtype)

    flat = y.flatten(-2).to(wide)
    normed = torch.rsqrt(flat.square().mean(-1, keepdim=True) + recipe.norm_eps)
    pre, post, res = ((flat @ tensors["phi"].T) * normed).split(recipe.groups, -1)
    scale, bias = tensors["scale"], tensors["bias"].split(recipe.groups)
    pre = torch.sigmoid(pre * scale[0] + bias[0]) + recipe.pre_eps
    post = recipe.post_scale * torch.sigmoid(post * scale[1] + bias[1])
    res = _sinkhorn((res * scale[2] + bias[2]).unflatten(-1, (n, n)), recipe)

    x_in = (pre[..., None] * y.to(wide)).sum(-2)
    if "out_norm_weight" in tensors:
        x_in = x_in * torch.rsqrt(x_in.square().mean(-1, keepdim=True) + 1e-6) * tensors["out_norm_weight"]
    return y, x_in.to(x.dtype), post, res


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
