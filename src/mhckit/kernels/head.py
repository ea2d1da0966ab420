"""Kernels of `head`: a mean is a collapse with constant weights, `last_pre` one with given weights, and a learned head
reads like `enter`, with no write weights and no residual map.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhckit.ops._register import empty, pack
from mhckit.ops.coefficients import Parameters
from mhckit.recipe import Recipe

from ._launch import FLOAT, tokens_of
from ._math import math_of_head, math_of_streams
from ._read import read
from ._read_half import parameter_gradients, read_half_bwd, sums_over_tokens
from ._streams_bwd import read_streams_bwd
from ._write_project import project_partials
from .expand import broadcast
from .pre import pre_bwd


def head_fwd(
    x: Tensor,
    fn: Tensor | None,
    scale: Tensor | None,
    base: Tensor | None,
    pre: Tensor | None,
    out_dtype: torch.dtype,
    recipe: Recipe,
) -> tuple[Tensor, Tensor, Tensor]:
    (T, N, C), lead = tokens_of(x), x.shape[:-2]
    h = empty(x, *lead, C, dtype=out_dtype)
    if fn is None:
        weights = "constant" if pre is None else pre
        read(
            x, None, None, None, math_of_streams(N),
            tokens=T, channels=C, weights=weights, constant=1 / N, x_in=h,
        )  # fmt: skip
        return h, empty(x, 0, dtype=FLOAT), empty(x, 0, dtype=FLOAT)
    z, mean_square = empty(x, *lead, N, dtype=FLOAT), empty(x, *lead, dtype=FLOAT)
    weights = empty(x, *lead, N, dtype=FLOAT)
    read(
        x, project_partials(x, fn, None), scale, base, math_of_head(recipe),
        tokens=T, channels=C, weights="pre", x_in=h, pre=weights, z=z, mean_square=mean_square,
    )  # fmt: skip
    return h, z, mean_square


def head_bwd(
    dh: Tensor,
    x: Tensor,
    fn: Tensor | None,
    scale: Tensor | None,
    base: Tensor | None,
    pre: Tensor | None,
    z: Tensor | None,
    mean_square: Tensor | None,
    need_fn: bool,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    if fn is None:
        if pre is None:
            gradients = (broadcast(dh, empty(x, *x.shape), 1 / x.shape[-2]), None, None, None, None)
        else:
            dx, dpre, _ = pre_bwd(dh, x, pre, None, None, False)
            gradients = (dx, None, None, None, dpre)
        return pack(gradients, otherwise=x)
    math, parameters = math_of_head(recipe), Parameters(fn, scale, base, None)
    read_gradients = read_half_bwd(dh, (None, None, None), x, parameters, "pre", None, z, mean_square, None, math)
    sums = sums_over_tokens(read_gradients, x, parameters, None, need_fn)
    dx = read_streams_bwd(x, None, read_gradients.collapse, read_gradients.projection)
    done = parameter_gradients(read_gradients, sums, x, parameters, math)
    return pack((dx, done.phi, done.scale, done.bias, None), otherwise=x)
