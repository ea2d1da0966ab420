"""mHC written out with loops and numpy in float64: slow, obvious, and sharing no code with the library.

One token at a time, straight from the formulas; Sinkhorn in the textbook form (mpmath where that would overflow).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np

from mhckit import Recipe

Array = Any


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
    elif recipe.residual == "free":
        matrix = logit.reshape(n, n)
    else:
        matrix = sinkhorn(logit.reshape(n, n), recipe)
    return matrix.T if recipe.stored == "in_out" else matrix


def sinkhorn(logit: Array, recipe: Recipe) -> Array:
    """The textbook iteration in 60-digit arithmetic with unbounded exponents, so that nothing over- or underflows."""
    n, eps = recipe.streams, mpmath.mpf(recipe.eps)
    with mpmath.workdps(60):
        rows = [[mpmath.mpf(float(value)) for value in row] for row in logit]
        steps: list[Callable[[], None]] = []

        def divide(line: list[tuple[int, int]], is_row: bool) -> None:
            total = mpmath.fsum(rows[i][j] for i, j in line)
            if recipe.eps_mode == "guard":
                divisor = total if total > eps else 1 if is_row else mpmath.inf
            else:
                divisor = {"none": total, "add": total + eps, "clamp": max(total, eps)}[recipe.eps_mode]
            for i, j in line:
                rows[i][j] = rows[i][j] / divisor

        def all_rows() -> None:
            for i in range(n):
                divide([(i, j) for j in range(n)], True)

        def all_cols() -> None:
            for j in range(n):
                divide([(i, j) for i in range(n)], False)

        steps = ([all_rows, all_cols] if recipe.order == "rows" else [all_cols, all_rows]) * recipe.iterations
        for i in range(n):
            top = max(rows[i])
            if recipe.init == "softmax":
                total = mpmath.fsum(mpmath.exp(value) for value in rows[i])
                rows[i] = [mpmath.exp(value) / total + eps for value in rows[i]]
            elif recipe.init == "exp_minus_max":
                rows[i] = [mpmath.exp(value - top) for value in rows[i]]
            elif recipe.init == "abs":
                rows[i] = [abs(value) + eps for value in rows[i]]
            else:
                rows[i] = [mpmath.exp(value) for value in rows[i]]
        for step in steps[1:] if recipe.init == "softmax" else steps:
            step()
        return np.array([[float(value) for value in row] for row in rows])


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
