"""Kernels of `activate`: F2 and B without streams and without the residual map."""

from __future__ import annotations

import math

from torch import Tensor

from mhckit.ops._register import empty, pack
from mhckit.recipe import Recipe

from ._launch import FLOAT
from ._math import math_of
from ._parameters_bwd import PhiSums, finish
from ._read import read
from ._read_bwd import read_bwd
from ._write_project import Projection


def activate_fwd(
    z: Tensor | None, mean_square: Tensor | None, scale: Tensor | None, bias: Tensor, recipe: Recipe
) -> tuple[Tensor, ...]:
    lead = () if z is None else z.shape[:-1]
    sizes = (recipe.streams, recipe.streams, recipe.residual_logits)
    pre, post, logits = results = tuple(empty(bias, *lead, size, dtype=FLOAT) for size in sizes)
    given = None if z is None or mean_square is None else Projection(z[None], mean_square[None])
    read(
        None, given, scale, bias, math_of(recipe, residual="logits"),
        tokens=math.prod(lead), width=1.0, pre=pre, post=post, res=logits,
    )  # fmt: skip
    return results


def activate_bwd(
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    z: Tensor | None,
    mean_square: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    spec = math_of(recipe, residual="logits")
    tokens = 1 if z is None else math.prod(z.shape[:-1])
    dz = None if z is None else empty(z, *z.shape)
    gradients = read_bwd(
        None, None, (dpre, dpost, dres if spec.logits else None), z, mean_square, scale, bias, spec,
        like=bias, tokens=tokens, dz=dz,
    )  # fmt: skip
    dmean_square = None if gradients.k is None else gradients.k.view(mean_square.shape)
    done = finish(PhiSums(), gradients.sums, None, streams=spec.streams, channels=1, math=spec, scale=scale, bias=bias)
    return pack((dz, dmean_square, done.scale, done.bias), otherwise=bias)
