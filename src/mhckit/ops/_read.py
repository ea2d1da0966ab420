r"""The read half of a junction: what happens to streams between a write-back and the next sublayer.

    mix = coefficients(y)        x_in = w . y  [then RMSNorm]        w = mix.pre, or the given pre of a shifted recipe

    With g, e the gradients of y and x_in, the gradient of y that the write-back sees is
    G = g + w d + (dz phi + k y)          d: gradient of the collapsed vector; (dz phi + k y): through the coefficients

`enter` is this half alone and `junction` is `post` followed by it, so both import it from here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhckit.recipe import Recipe

from ._register import accumulator, empty
from .activate import activate_reference
from .coefficients import (
    Coefficients,
    ParameterGradients,
    Parameters,
    coefficients_backward,
    coefficients_reference,
    empty_coefficients,
)
from .mix import Mix
from .pre import pre_backward, pre_reference


class OutNorm(NamedTuple):
    """The RMSNorm of what the sublayer reads; no weight, no norm."""

    weight: Tensor | None
    eps: float


class Read(NamedTuple):
    """x_in [T, C], the coefficients, and the u [T] of the norm (absent without one)."""

    x_in: Tensor
    coefficients: Coefficients
    u: Tensor


class ReadGradients(NamedTuple):
    """Unrounded; shifted_pre is None unless the recipe is shifted."""

    y: Tensor
    shifted_pre: Tensor | None
    parameters: ParameterGradients
    out_norm_weight: Tensor | None


def read_reference(
    y_TNC: Tensor,
    shifted_pre_TN: Tensor | None,
    parameters: Parameters,
    out_norm: OutNorm,
    out_dtype: torch.dtype,
    recipe: Recipe,
) -> Read:
    coefficients = coefficients_reference(y_TNC, parameters, recipe)
    weights_TN = coefficients.pre if shifted_pre_TN is None else shifted_pre_TN
    x_in_TC, u_T = pre_reference(y_TNC, weights_TN, out_norm.weight, out_norm.eps, out_dtype)
    return Read(x_in_TC, coefficients, u_T)


def read_backward(
    g_TNC: Tensor | None,
    dx_in_TC: Tensor | None,
    dmix: Mix,
    y_TNC: Tensor,
    shifted_pre_TN: Tensor | None,
    parameters: Parameters,
    out_norm_weight_C: Tensor | None,
    z_TP: Tensor | None,
    ms_T: Tensor | None,
    u_T: Tensor | None,
    recipe: Recipe,
    need_phi: bool,
    need_out_norm: bool,
) -> ReadGradients:
    acc = accumulator(y_TNC)
    dy_TNC = torch.zeros_like(y_TNC, dtype=acc) if g_TNC is None else g_TNC.to(acc)
    if dx_in_TC is None:
        dx_in_TC = y_TNC.new_zeros(*y_TNC.shape[:-2], y_TNC.shape[-1])
    weights_TN = shifted_pre_TN
    if weights_TN is None:
        pre = activate_reference(z_TP, ms_T, parameters.scale, parameters.bias.to(acc), recipe)[0]
        weights_TN = pre.expand(y_TNC.shape[:-1])
    dread_TNC, dpre_TN, dout_norm_weight_C = pre_backward(
        dx_in_TC, y_TNC, weights_TN, out_norm_weight_C, u_T, need_out_norm
    )
    dy_TNC = dy_TNC + dread_TNC
    if shifted_pre_TN is None:
        dmix = dmix._replace(pre=dmix.pre + dpre_TN)
    dcoefficients_TNC, dparameters = coefficients_backward(dmix, y_TNC, z_TP, ms_T, parameters, recipe, need_phi)
    if dcoefficients_TNC is not None:
        dy_TNC = dy_TNC + dcoefficients_TNC
    return ReadGradients(dy_TNC, None if shifted_pre_TN is None else dpre_TN, dparameters, dout_norm_weight_C)


def first_pre(x_TNC: Tensor) -> Tensor:
    """What the first sublayer of a shifted recipe reads with: stream 0."""
    one_hot = x_TNC.new_zeros(x_TNC.shape[:-1], dtype=accumulator(x_TNC))
    one_hot[..., 0] = 1
    return one_hot


def empty_read(x: Tensor, out_norm_weight: Tensor | None, out_dtype: torch.dtype, recipe: Recipe) -> tuple[Tensor, ...]:
    """Room for x_in, the coefficients and u; fakes and kernels allocate with it."""
    lead, channels = x.shape[:-2], x.shape[-1]
    return (
        empty(x, *lead, channels, dtype=out_dtype),
        *empty_coefficients(x, recipe),
        empty(x, *((0,) if out_norm_weight is None else lead), dtype=accumulator(x)),
    )
