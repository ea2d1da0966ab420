"""The read half of a junction, host side: F2 forward; B, and what J and P need of it, backward.

`enter` is this half alone, `junction` has a write-back before it, `coefficients` is without the collapse and a learned
`head` without post and the residual map.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mhckit.ops._register import empty
from mhckit.ops.coefficients import ParameterGradients, Parameters

from ._launch import FLOAT, read_bwd_launch, tokens_of
from ._math import Math
from ._parameters_bwd import phi_gradients, scale_and_bias
from ._read import read
from ._read_bwd import read_bwd
from ._streams_bwd import CollapseGradient, ProjectionGradient
from ._write_project import Projection


def read_weights_of_backward(y: Tensor, weights: Tensor | str, norm_weight: Tensor | None) -> Tensor:
    """Where B leaves the read weights, times u with a norm, for J and P: given weights without a norm serve as are."""
    if isinstance(weights, Tensor) and norm_weight is None:
        return weights
    return empty(y, *y.shape[:-1], dtype=FLOAT)


class ReadGradients(NamedTuple):
    """The parts of G (see `_streams_bwd`), and the gradients that are finished already."""

    collapse: CollapseGradient
    projection: ProjectionGradient
    weights: Tensor | None
    parameters: ParameterGradients
    out_norm_weight: Tensor | None


def read_half_fwd(
    y: Tensor,
    projection: Projection | None,
    parameters: Parameters,
    weights: Tensor | str,
    out_norm_weight: Tensor | None,
    out_norm_eps: float,
    results: tuple[Tensor, ...],
    math: Math,
) -> None:
    """Fill results: x_in, pre, post, res, z, mean_square, u."""
    T, _N, C = tokens_of(y)
    x_in, pre, post, res, z, mean_square, u = results
    read(
        y, projection, parameters.scale, parameters.bias, math,
        tokens=T, channels=C, weights=weights, norm_weight=out_norm_weight, norm_eps=out_norm_eps,
        x_in=x_in, pre=pre, post=post, res=res, z=z, mean_square=mean_square, u=u,
    )  # fmt: skip


def read_half_bwd(
    dx_in: Tensor | None,
    dmix: tuple[Tensor | None, Tensor | None, Tensor | None],
    y: Tensor,
    parameters: Parameters,
    weights: Tensor | str,
    out_norm_weight: Tensor | None,
    z: Tensor | None,
    mean_square: Tensor | None,
    u: Tensor | None,
    need_phi: bool,
    need_out_norm: bool,
    math: Math,
) -> ReadGradients:
    """weights: a tensor [T, N], "pre", "first" (stream 0), or "none" where nothing was collapsed."""
    (T, N, C), lead = tokens_of(y), y.shape[:-2]
    phi, scale, bias, norm_weight = parameters
    given = isinstance(weights, Tensor)
    collapses = dx_in is not None
    dz = None if phi is None else empty(y, *lead, math.rows, dtype=FLOAT)
    k = None if phi is None else empty(y, *lead, dtype=FLOAT)
    read_weights = read_weights_of_backward(y, weights, out_norm_weight) if collapses else None
    norm_share = empty(y, *lead, dtype=FLOAT) if collapses and out_norm_weight is not None else None
    dweights = empty(weights, *weights.shape) if given else None
    programs = -(-T // read_bwd_launch(N, C).block_t)
    sums = empty(y, programs, 2, math.rows, dtype=FLOAT)
    read_bwd(
        y, dx_in, *dmix, z, mean_square, scale, bias, math,
        tokens=T, channels=C, weights=weights, norm_weight=out_norm_weight, u=u,
        dz=dz, dmean_square=k, k_factor=2 / (N * C), read_weights=None if read_weights is weights else read_weights,
        norm_share=norm_share, dweights=dweights, sums=sums,
    )  # fmt: skip
    dphi = dnorm_weight = dout_norm_weight = None
    need_phi, need_out_norm = need_phi and phi is not None, need_out_norm and out_norm_weight is not None
    out_norm = (out_norm_weight, dx_in, read_weights) if need_out_norm and collapses else None
    if need_phi or out_norm is not None:
        dphi, dnorm_weight, dout_norm_weight = phi_gradients(
            y, dz if need_phi else None, phi, norm_weight, out_norm=out_norm
        )
    if need_out_norm and not collapses:
        dout_norm_weight = out_norm_weight.new_zeros(C)
    dscale, dbias = scale_and_bias(sums, scale, bias, math)
    return ReadGradients(
        CollapseGradient(dx_in, read_weights, out_norm_weight, norm_share) if collapses else CollapseGradient(),
        ProjectionGradient(dz, k, phi, norm_weight),
        dweights,
        ParameterGradients(dphi, dscale, dbias, dnorm_weight),
        dout_norm_weight,
    )
