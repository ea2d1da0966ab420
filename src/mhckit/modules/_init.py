"""Initial values: at step 0 the mean of the streams is the plain pre-norm residual network.

    pre = 1/N                        a sublayer reads the mean stream
    H doubly stochastic, near I      mixing keeps the mean
    post of mean 1                   the mean stream receives the sublayer's output once

up to the size of scale (0.01), which multiplies everything a token's streams have to say. Streams start equal; a small
spread of post, rotated with the layer's index, tells them apart. `upcycle` makes the start exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mhckit.recipe import Recipe

SCALE = 0.01
PHI_STD = 0.02
POST_SPREAD = 0.1
RES_DIAGONAL = 0.95
SINGLE_STREAM_BIAS = 8.0  # N = 1: sigmoid(8) = 0.9997, as near to 1 as still learns
LARGEST_SIGMOID = 0.95  # where a recipe cannot reach post = 1 (post_scale <= 1)
SMALLEST_SIGMOID = 1e-4


def initial_bias(recipe: Recipe, layer_index: int) -> Tensor:
    """bias [P] of a HyperConnection."""
    n = recipe.streams
    if recipe.residual == "free":  # the original HC: read one stream, write to all alike, do not mix
        bias = [*_one_hot(n, layer_index % n), *[1.0] * n, *_matrix(n, 1.0, 0.0)]
    else:
        bias = [*_pre_bias(recipe), *_post_bias(recipe, layer_index), *_res_bias(recipe)]
    return torch.tensor(bias, dtype=torch.float64)


def initial_head_base(recipe: Recipe) -> Tensor:
    """base [N] of a HyperHead."""
    return torch.tensor(_pre_bias(recipe), dtype=torch.float64)


def _pre_bias(recipe: Recipe) -> list[float]:
    """[N], such that sigmoid + pre_eps = 1/N."""
    n = recipe.streams
    return [SINGLE_STREAM_BIAS] if n == 1 else [_logit(1 / n - recipe.pre_eps)] * n


def _post_bias(recipe: Recipe, layer_index: int) -> list[float]:
    targets = [1 + POST_SPREAD * place for place in rotated_ramp(recipe.streams, layer_index)]
    return [_logit((target - recipe.post_eps) / recipe.post_scale) for target in targets]


def _res_bias(recipe: Recipe) -> list[float]:
    """Logits of a matrix with RES_DIAGONAL on the diagonal and equal entries elsewhere."""
    n, count = recipe.streams, recipe.residual_logits
    if count <= 1:
        return [1.0] * count
    odds = RES_DIAGONAL / (1 - RES_DIAGONAL)
    if recipe.residual == "permutation":  # the first permutation is the identity
        return [math.log(odds * (count - 1)) * entry for entry in _one_hot(count, 0)]
    if recipe.residual == "sinkhorn" and recipe.init == "abs":
        return _matrix(n, RES_DIAGONAL, (1 - RES_DIAGONAL) / (n - 1))
    return _matrix(n, math.log(odds * (n - 1)), 0.0)


def _matrix(n: int, diagonal: float, elsewhere: float) -> list[float]:
    return [diagonal if row == col else elsewhere for row in range(n) for col in range(n)]


def _one_hot(n: int, index: int) -> list[float]:
    return [float(i == index) for i in range(n)]


def rotated_ramp(n: int, layer_index: int) -> list[float]:
    """n distinct numbers from -1 to 1 with sum 0, rotated by layer_index; a single 0 for n = 1."""
    return [2 * ((i + layer_index) % n) / (n - 1) - 1 for i in range(n)] if n > 1 else [0.0]


def _logit(p: float) -> float:
    p = min(max(p, SMALLEST_SIGMOID), LARGEST_SIGMOID)
    return math.log(p / (1 - p))
