"""Kernels of `coefficients`: F1 without a write-back, F2 without a collapse; B, J and P likewise."""

from __future__ import annotations

import torch
from torch import Tensor

from mhckit.ops._register import pack
from mhckit.ops.coefficients import Parameters, empty_coefficients
from mhckit.recipe import Recipe

from ._launch import tokens_of
from ._math import math_of
from ._read import read
from ._read_half import parameter_gradients, read_half_bwd, sums_over_tokens
from ._streams_bwd import read_streams_bwd
from ._write_project import project_partials


def coefficients_fwd(
    x: Tensor, phi: Tensor | None, scale: Tensor | None, bias: Tensor, norm_weight: Tensor | None, recipe: Recipe
) -> tuple[Tensor, ...]:
    T, _N, C = tokens_of(x)
    projection = None if phi is None else project_partials(x, phi, norm_weight)
    pre, post, res, z, mean_square = results = empty_coefficients(x, recipe)
    read(
        x, projection, scale, bias, math_of(recipe),
        tokens=T, channels=C, pre=pre, post=post, res=res, z=z, mean_square=mean_square,
    )  # fmt: skip
    return results


def coefficients_bwd(
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    x: Tensor,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    norm_weight: Tensor | None,
    z: Tensor | None,
    mean_square: Tensor | None,
    need_phi: bool,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    math, parameters = math_of(recipe), Parameters(phi, scale, bias, norm_weight)
    read = read_half_bwd(None, (dpre, dpost, dres), x, parameters, "none", None, z, mean_square, None, math)
    sums = sums_over_tokens(read, x, parameters, None, need_phi)
    dx = torch.zeros_like(x) if phi is None else read_streams_bwd(x, None, read.collapse, read.projection)
    done = parameter_gradients(read, sums, x, parameters, math)
    return pack((dx, done.phi, done.scale, done.bias, done.norm_weight), otherwise=x)
