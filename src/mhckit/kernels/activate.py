"""Kernels of `activate`: F2 and B without streams and without the residual map."""

from __future__ import annotations

import math

from torch import Tensor

from mhckit.ops._register import empty, pack
from mhckit.recipe import Recipe

from ._launch import FLOAT, read_bwd_launch
from ._math import math_of
from ._parameters_bwd import scale_and_bias
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
    dmean_square = None if mean_square is None else empty(mean_square, *mean_square.shape)
    programs = -(-tokens // read_bwd_launch(spec.streams, 1).block_t)
    sums = empty(bias, programs, 2, spec.rows, dtype=FLOAT)
    read_bwd(
        None, None, dpre, dpost, dres if spec.logits else None, z, mean_square, scale, bias, spec,
        tokens=tokens, dz=dz, dmean_square=dmean_square, sums=sums,
    )  # fmt: skip
    return pack((dz, dmean_square, *scale_and_bias(sums, scale, bias, spec)), otherwise=bias)
