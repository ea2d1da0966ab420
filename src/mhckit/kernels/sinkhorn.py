"""Kernels of `sinkhorn`: any residual map on its own."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mhckit.ops._register import empty
from mhckit.recipe import Recipe

from ._coefficients import beside_residual, load_matrices, matrix_index, residual_index
from ._device import load_float, store_as, tokens_of_program
from ._launch import FLOAT, cdiv, residual_launch
from ._launcher import run
from ._math import math_of
from ._residual import residual_map, residual_map_backward


@triton.jit(do_not_specialize=["T"])
def sinkhorn_kernel(logits, res, dres, dlogits, T, MATH: tl.constexpr, BLOCK_T: tl.constexpr):
    """res from logits, or dlogits from dres and logits."""
    t, live = tokens_of_program(T, BLOCK_T)
    index, is_logit = residual_index(MATH)
    at = beside_residual(t, MATH) * MATH.logits + index
    here = beside_residual(live, MATH) & is_logit
    value = load_float(logits, at, here) if MATH.flat else load_matrices(logits, t * MATH.logits, live, MATH, False)
    entry, is_entry = matrix_index(MATH)
    matrix_at = t[:, None, None] * (MATH.streams * MATH.streams) + entry
    matrix_here = live[:, None, None] & is_entry
    if res is not None:
        store_as(res, matrix_at, residual_map(value, is_logit, MATH), matrix_here)
    else:
        dmatrix = load_matrices(dres, t * (MATH.streams * MATH.streams), live, MATH, MATH.transposed)
        store_as(dlogits, at, residual_map_backward(dmatrix, value, is_logit, MATH), here)


def sinkhorn_fwd(logits: Tensor, recipe: Recipe) -> Tensor:
    lead = logits.shape[: -1 if recipe.residual == "permutation" else -2]
    res = empty(logits, *lead, recipe.streams, recipe.streams, dtype=FLOAT)
    _launch(logits, res, None, None, recipe)
    return res


def sinkhorn_bwd(dres: Tensor, logits: Tensor, recipe: Recipe) -> Tensor:
    dlogits = empty(logits, *logits.shape)
    _launch(logits, None, dres, dlogits, recipe)
    return dlogits


def _launch(logits: Tensor, res: Tensor | None, dres: Tensor | None, dlogits: Tensor | None, recipe: Recipe) -> None:
    math, launch = math_of(recipe), residual_launch(recipe.streams)
    tokens = logits.numel() // recipe.residual_logits
    run(
        sinkhorn_kernel,
        (cdiv(tokens, launch.block_t),),
        logits,
        res,
        dres,
        dlogits,
        tokens,
        MATH=math,
        BLOCK_T=launch.block_t,
        num_warps=launch.num_warps,
    )
