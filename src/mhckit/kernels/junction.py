"""Kernels of `junction`: F1, F2; B, which also packs phi, P, J and the sums that end them.

A shifted recipe's read weights are known before the streams are written. Then F1 writes x_in as well, J sums the
gradient of the weights, and neither F2 nor B has anything to do with the streams: 20C and 38C bytes per token instead
of 28C and 48C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhckit.ops._read import empty_read
from mhckit.ops._register import pack
from mhckit.ops.coefficients import Parameters
from mhckit.recipe import Recipe

from ._gradients import Write
from ._math import math_of
from ._read_half import parameter_gradients, read_half_bwd, read_half_fwd, sums_over_tokens
from ._streams_bwd import hopper_phi_layout, write_streams_bwd
from ._write_project import NO_COLLAPSE, Collapse, write, write_project


def _in_one_pass(shifted_pre: Tensor | None, out_norm_weight: Tensor | None) -> bool:
    """Whether F1 collapses what it writes, and J sums the gradient of the weights: they are given, and no norm wants a
    whole row first.
    """
    return shifted_pre is not None and out_norm_weight is None


def junction_fwd(
    x: Tensor,
    f: Tensor,
    f_bias: Tensor | None,
    shifted_pre: Tensor | None,
    post: Tensor,
    res: Tensor | None,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    norm_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    out_norm_eps: float,
    out_dtype: torch.dtype,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    results = empty_read(x, out_norm_weight, out_dtype, recipe)
    weights, collapse = "pre" if shifted_pre is None else shifted_pre, NO_COLLAPSE
    if _in_one_pass(shifted_pre, out_norm_weight):
        weights, collapse = "none", Collapse(shifted_pre, results[0])
    if phi is None:
        y, projection = write(x, f, f_bias, post, res, collapse), None
    else:
        y, projection = write_project(x, f, f_bias, post, res, phi, norm_weight, collapse)
    parameters = Parameters(phi, scale, bias, norm_weight)
    read_half_fwd(y, projection, parameters, weights, out_norm_weight, out_norm_eps, results, math_of(recipe))
    return y, *results


def junction_bwd(
    g: Tensor | None,
    dx_in: Tensor | None,
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    x: Tensor,
    f: Tensor,
    f_bias: Tensor | None,
    shifted_pre: Tensor | None,
    post: Tensor,
    res: Tensor | None,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    norm_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    y: Tensor,
    z: Tensor | None,
    mean_square: Tensor | None,
    u: Tensor | None,
    need_phi: bool,
    need_out_norm: bool,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    math, parameters = math_of(recipe), Parameters(phi, scale, bias, norm_weight)
    write_back = Write(f, f_bias, post, res)
    weights = "pre" if shifted_pre is None else shifted_pre
    sums_weights = dx_in is not None and _in_one_pass(shifted_pre, out_norm_weight)
    read = read_half_bwd(
        dx_in, (dpre, dpost, dres), y, parameters, weights, out_norm_weight, z, mean_square, u, math,
        sums_weights=not sums_weights,
        layout=hopper_phi_layout(x, g, dx_in, write_back, 0 if phi is None else math.rows),
    )  # fmt: skip
    wanted_norm = out_norm_weight if need_out_norm else None
    sums = sums_over_tokens(read, y, parameters, wanted_norm, need_phi)
    written = write_streams_bwd(x, g, read.collapse, read.projection, write_back, sums_weights)
    done = parameter_gradients(
        read, sums, y, parameters, math, out_norm_weight=wanted_norm, written=written, f_bias=f_bias
    )
    dweights = written.dread_weights if sums_weights else read.weights
    write_half = (written.dx, written.df, done.f_bias, dweights, written.dpost, written.dres)
    return pack((*write_half, done.phi, done.scale, done.bias, done.norm_weight, done.out_norm_weight), otherwise=x)
