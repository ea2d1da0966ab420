"""Initial values: at step 0 the mean of the streams is the plain pre-norm residual network.

    pre = 1/N                        a sublayer reads the mean stream
    H doubly stochastic, near I      mixing keeps the mean
    post of mean 1                   the mean stream receives the sublayer's output once

up to the size of scale (0.01), which multiplies everything a token's streams have to say. Streams start equal; a small
spread of post, rotated with the layer's index, tells them apart. So a plain checkpoint can be upcycled.
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


def initial_bias(recipe: Recipe, layer_index: int) -> Tensor:
    """bias [P] of a HyperConnection."""
    if recipe.residual == "free":
        return _free_bias(recipe, layer_index)
    return torch.cat([pre_bias(recipe), _post_bias(recipe, layer_index), _res_bias(recipe)])


def pre_bias(recipe: Recipe) -> Tensor:
    """[N], such that sigmoid + pre_eps = 1/N."""
    if recipe.streams == 1:
        return torch.full((1,), SINGLE_STREAM_BIAS)
    return torch.full((recipe.streams,), _logit(1 / recipe.streams - recipe.pre_eps))


def _post_bias(recipe: Recipe, layer_index: int) -> Tensor:
    targets = [1 + POST_SPREAD * place for place in _rotated_ramp(recipe.streams, layer_index)]
    return torch.tensor([_logit((t - recipe.post_eps) / recipe.post_scale) for t in targets])


def _res_bias(recipe: Recipe) -> Tensor:
    """Logits of a matrix with RES_DIAGONAL on the diagonal and equal entries elsewhere."""
    n = recipe.streams
    if recipe.residual == "identity" or n == 1:
        return torch.ones(recipe.residual_logits) if recipe.init == "abs" else torch.zeros(recipe.residual_logits)
    odds = RES_DIAGONAL / (1 - RES_DIAGONAL)
    if recipe.residual == "permutation":
        bias = torch.zeros(recipe.residual_logits)
        bias[0] = math.log(odds * (recipe.residual_logits - 1))
        return bias
    if recipe.init == "abs":
        off_diagonal = (1 - RES_DIAGONAL) / (n - 1)
        return (off_diagonal + (RES_DIAGONAL - off_diagonal) * torch.eye(n)).flatten()
    return (math.log(odds * (n - 1)) * torch.eye(n)).flatten()


def _free_bias(recipe: Recipe, layer_index: int) -> Tensor:
    """The original HC: read one stream, write to all alike, do not mix."""
    n = recipe.streams
    eye = torch.eye(n)
    return torch.cat([eye[layer_index % n], torch.ones(n), eye.flatten()])


def _rotated_ramp(n: int, layer_index: int) -> list[float]:
    """n distinct numbers from -1 to 1 with sum 0, rotated by layer_index; a single 0 for n = 1."""
    return [2 * ((i + layer_index) % n) / (n - 1) - 1 for i in range(n)] if n > 1 else [0.0]


def _logit(p: float) -> float:
    p = min(max(p, 1 - LARGEST_SIGMOID), LARGEST_SIGMOID)
    return math.log(p / (1 - p))
