"""mHC written out with loops and numpy in float64: slow, obvious, and sharing no code with the library.

One token at a time, straight from the formulas; Sinkhorn in the textbook form (mpmath where that would overflow).
"""

from __future__ import annotations

import itertools
from typing import Any

import mpmath
import numpy as np

from mhckit import Recipe

Array = Any
LIMIT = 2000  # iterations after which nothing changes, for logits of a few units


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def logits(x: Array, phi: Array, scale: Array, bias: Array, recipe: Recipe, norm_weight: Array | None = None) -> Array:
    """x [N, C] of one token -> [P]."""
    flat = x.reshape(-1)
    mean_square = float(np.mean(flat**2))
    if recipe.norm_eps_position == "inside":
        r = 1 / np.sqrt(mean_square + recipe.norm_eps)
    else:
        r = 1 / (np.sqrt(mean_square) + recipe.norm_eps)
    out = np.empty(recipe.rows)
    n = recipe.streams
    for p in range(recipe.rows):
        z = sum(flat[k] * phi[p, k] * (1 if norm_weight is None else norm_weight[k]) for k in range(len(flat)))
        group = 0 if p < n else 1 if p < 2 * n else 2
        value = np.tanh(z * r) if recipe.residual == "free" else z * r
        out[p] = value * scale[group] + bias[p]
    return out


def mix(logit: Array, recipe: Recipe) -> tuple[Array, Array, Array | None]:
    """[P] of one token -> pre [N], post [N], H [out, in]."""
    n = recipe.streams
    pre, post, rest = logit[:n], logit[n : 2 * n], logit[2 * n :]
    if recipe.residual != "free":
        pre = sigmoid(pre) + recipe.pre_eps
        if recipe.normalized_pre:
            pre = pre / (pre.sum() + recipe.normalized_pre_eps)
        post = recipe.post_scale * sigmoid(post) + recipe.post_eps
    return pre, post, residual(rest, recipe)


def residual(logit: Array, recipe: Recipe) -> Array | None:
    n = recipe.streams
    if recipe.residual == "identity":
        return None
    if recipe.residual == "permutation":
        weights = np.exp(logit - logit.max())
        weights /= weights.sum()
        matrix = np.zeros((n, n))
        for weight, permutation in zip(weights, itertools.permutations(range(n)), strict=True):
            for row, col in enumerate(permutation):
                matrix[row, col] += weight
    elif recipe.residual == "projection":
        matrix = np.exp(logit.reshape(n, n))
        for _ in range(LIMIT):
            matrix = matrix / matrix.sum(0, keepdims=True)
            matrix = matrix / matrix.sum(1, keepdims=True)
    elif recipe.residual == "free":
        matrix = logit.reshape(n, n)
    else:
        matrix = sinkhorn(logit.reshape(n, n), recipe)
    return matrix.T if recipe.stored == "in_out" else matrix


def sinkhorn(logit: Array, recipe: Recipe) -> Array:
    """The textbook iteration in 60-digit arithmetic with unbounded exponents, so that nothing over- or underflows."""
    with mpmath.workdps(60):
        matrix = [_start([mpmath.mpf(float(value)) for value in row], recipe) for row in logit]
        steps = ([_rows, _cols] if recipe.order == "rows" else [_cols, _rows]) * recipe.iterations
        for step in steps[1:] if recipe.init == "softmax" else steps:
            matrix = step(matrix, recipe)
        return np.array([[float(value) for value in row] for row in matrix])


def _start(row: list, recipe: Recipe) -> list:
    eps = mpmath.mpf(recipe.eps)
    if recipe.init == "abs":
        return [abs(value) + eps for value in row]
    if recipe.init == "exp_minus_max":
        return [mpmath.exp(value - max(row)) for value in row]
    exponentials = [mpmath.exp(value) for value in row]
    if recipe.init == "exp":
        return exponentials
    return [value / mpmath.fsum(exponentials) + eps for value in exponentials]


def _rows(matrix: list[list], recipe: Recipe) -> list[list]:
    return [_normalised(row, recipe, left_alone=1) for row in matrix]


def _cols(matrix: list[list], recipe: Recipe) -> list[list]:
    columns = [_normalised(list(column), recipe, left_alone=mpmath.inf) for column in zip(*matrix, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _normalised(line: list, recipe: Recipe, left_alone: Any) -> list:
    total, eps = mpmath.fsum(line), mpmath.mpf(recipe.eps)
    divisor = {
        "none": total,
        "add": total + eps,
        "clamp": max(total, eps),
        "guard": total if total > eps else left_alone,
    }[recipe.eps_mode]
    return [value / divisor for value in line]


def collapse(x: Array, weights: Array, norm_weight: Array | None = None, eps: float = 0.0) -> Array:
    a = sum(weights[i] * x[i] for i in range(len(weights)))
    return a if norm_weight is None else a / np.sqrt(np.mean(a**2) + eps) * norm_weight


def write_back(x: Array, f: Array, post: Array, matrix: Array | None) -> Array:
    out = np.zeros_like(x)
    for o in range(len(post)):
        out[o] = post[o] * f
        for i in range(len(post)):
            out[o] += (float(o == i) if matrix is None else matrix[o, i]) * x[i]
    return out
