r"""Sinkhorn: from residual logits L to the matrix H that mixes the streams; every residual map goes through here.

    sinkhorn      R = exp(L), softmax(L) + eps or |L| + eps, then rows and columns divided by their sums, in turn
    projection    what that tends to from exp(L), see _projection.py
    permutation   R = sum_k softmax(L)[k] P_k over the N! permutation matrices P_k
    free          R = L
    H = R if the recipe stores R as [out, in], R^T if as [in, out]

The backward of sinkhorn is the derivative of the finite iteration, not of its limit. With A = R dL/dR, the gradient of
log R, one normalisation R' = R / s has

    A[i,j] = A'[i,j] - R'[i,j] sum_k A'[i,k]                (rows; the sum term only where s, not eps, divided)

which needs no division and cannot overflow. Starts that eps keeps away from zero (softmax + eps, |L| + eps) run in
linear space; exp runs in log space, where logits of any size are exact (up to 1e37 in float32, where their differences
overflow): exp overflows above 88, and a column that underflows to zero could never be brought back.

T tokens; N x N matrices with rows first, as stored (S, S) and as returned (O out, I in); F = N! permutations. The
iteration holds its matrices as [S, S, T], so that its many small sums run over contiguous tokens.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhckit.recipe import Recipe

from ._backend import choose
from ._check import check_recipe, check_shape, check_tensor
from ._projection import COLS, ROWS, projection, projection_backward
from ._register import Operator, accumulator, call_backward, empty, needed, register


def sinkhorn_reference(logits: Tensor, recipe: Recipe) -> Tensor:
    """H [T, O, I] from logits [T, S, S], or [T, F] for permutation."""
    logits = logits.to(accumulator(logits))
    if recipe.residual == "permutation":
        matrix = (logits.softmax(-1) @ permutation_matrices(logits, recipe.streams).flatten(1)).unflatten(
            -1, (recipe.streams, recipe.streams)
        )
    elif recipe.residual == "projection":
        matrix = _tokens_first(projection(_tokens_last(logits)))
    elif recipe.residual == "free":
        matrix = logits.clone()
    else:
        matrix = _tokens_first(_iterate(_tokens_last(logits), recipe)[-1].matrix)
    return _orient(matrix, recipe)


def sinkhorn_backward(dh_TOI: Tensor, logits: Tensor, recipe: Recipe) -> Tensor:
    """Gradient of the logits, unrounded."""
    dmatrix = _orient(dh_TOI, recipe)
    logits = logits.to(dmatrix.dtype)
    if recipe.residual == "free":
        return dmatrix.clone()
    if recipe.residual == "permutation":
        dweights_TF = dmatrix.flatten(-2) @ permutation_matrices(logits, recipe.streams).flatten(1).mT
        return _softmax_backward(dweights_TF, logits.softmax(-1), -1)
    if recipe.residual == "projection":
        return _tokens_first(projection_backward(_tokens_last(dmatrix), projection(_tokens_last(logits))))
    return _tokens_first(_iterate_backward(_tokens_last(dmatrix), _tokens_last(logits), recipe))


def _tokens_last(matrix: Tensor) -> Tensor:
    return matrix.movedim((-2, -1), (0, 1)).contiguous()


def _tokens_first(matrix: Tensor) -> Tensor:
    return matrix.movedim((0, 1), (-2, -1))


class _Step(NamedTuple):
    """One normalisation: the matrix after it, the axis it summed over, and where the sum divided (None: always)."""

    matrix: Tensor
    axis: int
    divided_by_sum: Tensor | None


def _iterate(logits: Tensor, recipe: Recipe) -> list[_Step]:
    """Every normalisation, first to last."""
    axes = ([ROWS, COLS] if recipe.order == "rows" else [COLS, ROWS]) * recipe.iterations
    if recipe.init in ("exp", "exp_minus_max"):
        return _iterate_in_log_space(logits, axes, recipe)
    matrix, steps = _start(logits, recipe), []
    for axis in axes[1:] if recipe.init == "softmax" else axes:
        matrix = matrix / (matrix.sum(axis, keepdim=True) + recipe.eps)
        steps.append(_Step(matrix, axis, None))
    return steps


def _iterate_backward(dmatrix: Tensor, logits: Tensor, recipe: Recipe) -> Tensor:
    steps = _iterate(logits, recipe)
    dlog = dmatrix * steps[-1].matrix
    for step in reversed(steps):
        through_sum = step.matrix * dlog.sum(step.axis, keepdim=True)
        dlog = dlog - (through_sum if step.divided_by_sum is None else step.divided_by_sum * through_sum)
    if recipe.init == "softmax":
        return _softmax_backward(dlog / _start(logits, recipe), logits.softmax(ROWS), ROWS)
    return logits.sign() * dlog / _start(logits, recipe) if recipe.init == "abs" else dlog


def _start(logits: Tensor, recipe: Recipe) -> Tensor:
    return (logits.softmax(ROWS) if recipe.init == "softmax" else logits.abs()) + recipe.eps


def _iterate_in_log_space(logits: Tensor, axes: list[int], recipe: Recipe) -> list[_Step]:
    log, steps = logits, []
    if recipe.init == "exp_minus_max":
        log = log - log.amax(ROWS, keepdim=True)
    for axis in axes:
        log_divisor, divided_by_sum = _log_divisor(log.logsumexp(axis, keepdim=True), axis, recipe)
        log = log - log_divisor
        steps.append(_Step(log.exp(), axis, divided_by_sum))
    return steps


def _log_divisor(log_sum: Tensor, axis: int, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    if recipe.eps_mode == "none":
        return log_sum, None
    log_eps = math.log(recipe.eps)
    if recipe.eps_mode == "add":
        return torch.logaddexp(log_sum, torch.full_like(log_sum, log_eps)), None
    if recipe.eps_mode == "clamp":
        return log_sum.clamp(min=log_eps), log_sum >= log_eps
    above = log_sum > log_eps
    return torch.where(above, log_sum, 0 if axis == ROWS else math.inf), above


def permutation_matrices(like: Tensor, streams: int) -> Tensor:
    """[N!, N, N] in lexicographic order; matrix k has a one at (row, k-th permutation[row])."""
    permutations = torch.tensor(list(itertools.permutations(range(streams))), device=like.device)
    return torch.nn.functional.one_hot(permutations, streams).to(like.dtype)


def _softmax_backward(dy: Tensor, y: Tensor, axis: int) -> Tensor:
    return y * (dy - (dy * y).sum(axis, keepdim=True))


def _orient(matrix: Tensor, recipe: Recipe) -> Tensor:
    return matrix.mT if recipe.stored == "in_out" else matrix


def _fwd_fake(logits: Tensor, recipe: Recipe) -> Tensor:
    lead = logits.shape[: -1 if recipe.residual == "permutation" else -2]
    return empty(logits, *lead, recipe.streams, recipe.streams, dtype=accumulator(logits))


def _bwd_reference(dh: Tensor, logits: Tensor, recipe: Recipe) -> Tensor:
    return sinkhorn_backward(dh, logits, recipe).to(logits.dtype)


def _bwd_fake(dh: Tensor, logits: Tensor, recipe: Recipe) -> Tensor:
    return empty(logits, *logits.shape)


_fwd = register("sinkhorn_fwd", "(Tensor logits, str recipe) -> Tensor", reference=sinkhorn_reference, fake=_fwd_fake)
_bwd = register(
    "sinkhorn_bwd", "(Tensor dres, Tensor logits, str recipe) -> Tensor", reference=_bwd_reference, fake=_bwd_fake
)


class _Sinkhorn(Operator):
    @staticmethod
    def forward(logits: Tensor, recipe: Recipe, backend: str) -> Tensor:
        return _fwd(logits, recipe.key, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        logits, ctx.recipe, ctx.backend = inputs
        ctx.save_for_backward(logits)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        dlogits = call_backward(_bwd, dh, logits, ctx.recipe.key, ctx.backend)
        return needed((dlogits,), ctx.needs_input_grad)


def sinkhorn(logits: Tensor | None, *, recipe: Recipe) -> Tensor | None:
    """The residual matrix H [..., out, in] of any residual map, in float32 (float64 for float64 logits).

    Args:
        logits: [..., N, N] as the recipe stores them; [..., N!] for permutation; None for identity.
        recipe: the math.

    Returns:
        H [..., out, in] whatever the recipe stores; None for identity.
    """
    check_recipe(recipe)
    if recipe.residual == "identity":
        if logits is not None:
            raise ValueError("logits must be None: residual='identity' has no residual matrix")
        return None
    n = recipe.streams
    axes, sizes = (
        ("[..., N!]", (recipe.residual_logits,)) if recipe.residual == "permutation" else ("[..., N, N]", (n, n))
    )
    logits = check_tensor("logits", logits, axes)
    check_shape("logits", logits, axes, (*logits.shape[: -len(sizes)], *sizes))
    return _Sinkhorn.call(logits.contiguous(), recipe, choose("sinkhorn", logits, recipe.streams))
