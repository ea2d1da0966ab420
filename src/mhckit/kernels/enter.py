"""Kernels of `enter`: F1 without a write-back, F2; B, J without a write-back, P."""

from __future__ import annotations

import torch
from torch import Tensor

from mhckit.ops._read import empty_read
from mhckit.ops._register import pack
from mhckit.ops.coefficients import Parameters
from mhckit.recipe import Recipe

from ._math import math_of
from ._read_half import parameter_gradients, read_half_bwd, read_half_fwd, sums_over_tokens
from ._streams_bwd import read_streams_bwd
from ._write_project import project_partials


def enter_fwd(
    x: Tensor,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    norm_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    out_norm_eps: float,
    out_dtype: torch.dtype,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    projection = None if phi is None else project_partials(x, phi, norm_weight)
    results = empty_read(x, out_norm_weight, out_dtype, recipe)
    parameters = Parameters(phi, scale, bias, norm_weight)
    weights = "first" if recipe.shifted else "pre"
    read_half_fwd(x, projection, parameters, weights, out_norm_weight, out_norm_eps, results, math_of(recipe))
    return results


def enter_bwd(
    g: Tensor | None,
    dx_in: Tensor | None,
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    x: Tensor,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    norm_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    z: Tensor | None,
    mean_square: Tensor | None,
    u: Tensor | None,
    need_phi: bool,
    need_out_norm: bool,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    math, parameters = math_of(recipe), Parameters(phi, scale, bias, norm_weight)
    weights = "first" if recipe.shifted else "pre"
    read = read_half_bwd(dx_in, (dpre, dpost, dres), x, parameters, weights, out_norm_weight, z, mean_square, u, math)
    wanted_norm = out_norm_weight if need_out_norm else None
    sums = sums_over_tokens(read, x, parameters, wanted_norm, need_phi)
    dx = read_streams_bwd(x, g, read.collapse, read.projection)
    done = parameter_gradients(read, sums, x, parameters, math, out_norm_weight=wanted_norm)
    return pack((dx, done.phi, done.scale, done.bias, done.norm_weight, done.out_norm_weight), otherwise=x)
