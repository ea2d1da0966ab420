"""The read half of a junction, host side: F2 forward; B, and what J and P need of it, backward.

`enter` is this half alone, `junction` has a write-back before it, `coefficients` is without the collapse and a learned
`head` without post and the residual map.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mhckit.ops._register import empty
from mhckit.ops.coefficients import Parameters

from ._gradients import CollapseGradient, ProjectionGradient, WriteGradients
from ._launch import FLOAT, PhiLayout, phi_layout, tokens_of
from ._math import Math
from ._pack import empty_dz_parts, empty_phi_parts
from ._parameters_bwd import Finished, PhiSums, chunk_sums, finish
from ._read import read
from ._read_bwd import LogitSums, Packing, read_bwd
from ._write_project import Projection


def read_weights_of_backward(y: Tensor, weights: Tensor | str, norm_weight: Tensor | None) -> Tensor:
    """Where B leaves the read weights, times u with a norm, for J and P: given weights without a norm serve as are."""
    if isinstance(weights, Tensor) and norm_weight is None:
        return weights
    return empty(y, *y.shape[:-1], dtype=FLOAT)


class ReadGradients(NamedTuple):
    """The parts of G (see `_streams_bwd`), the gradient of given weights, and what `parameter_gradients` adds up."""

    collapse: CollapseGradient
    projection: ProjectionGradient
    weights: Tensor | None
    sums: LogitSums


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
    math: Math,
    *,
    sums_weights: bool = True,
    layout: PhiLayout | None = None,
) -> ReadGradients:
    """Up to where the streams come in. weights: a tensor [T, N], "pre", "first" (stream 0), or "none": no collapse.

    sums_weights: False where J sums the gradient of given weights, and the streams are not needed here. layout: how J
    wants phi, unless it is J in plain Triton.
    """
    (T, N, C), lead = tokens_of(y), y.shape[:-2]
    phi, scale, bias, norm_weight = parameters
    collapses = dx_in is not None
    read_weights = read_weights_of_backward(y, weights, out_norm_weight) if collapses else None
    norm_share = empty(y, *lead, dtype=FLOAT) if collapses and out_norm_weight is not None else None
    dweights = empty(weights, *weights.shape) if isinstance(weights, Tensor) and sums_weights else None
    packing = dz_parts = None
    if phi is not None:
        dz_parts = empty_dz_parts(y, T, math.rows)
        layout = phi_layout(N, C, math.rows) if layout is None else layout
        packing = Packing(phi, norm_weight, empty_phi_parts(phi, N, layout), layout)
    gradients = read_bwd(
        y, dx_in if sums_weights else None, dmix, z, mean_square, scale, bias, math,
        like=y, tokens=T, channels=C, weights=weights if sums_weights else "none", norm_weight=out_norm_weight, u=u,
        dz=dz_parts, k_factor=2 / (N * C),
        read_weights=None if read_weights is weights else read_weights, norm_share=norm_share, dweights=dweights,
        packing=packing,
    )  # fmt: skip
    return ReadGradients(
        CollapseGradient(dx_in, read_weights, out_norm_weight, norm_share) if collapses else CollapseGradient(),
        ProjectionGradient()
        if packing is None
        else ProjectionGradient(dz_parts, gradients.k, gradients.k_more, packing.parts, math.rows),
        dweights,
        gradients.sums,
    )


def sums_over_tokens(
    read: ReadGradients, y: Tensor, parameters: Parameters, out_norm_weight: Tensor | None, need_phi: bool
) -> PhiSums:
    """P, which best follows B: what B read last is in the L2 cache still. out_norm_weight: None if not asked for."""
    dx_in, read_weights, _norm_weight, _share = read.collapse
    norm = None if out_norm_weight is None or dx_in is None or read_weights is None else (dx_in, read_weights)
    dz_parts = read.projection.dz_parts if need_phi else None
    if dz_parts is None and norm is None:
        return PhiSums()
    return chunk_sums(y, dz_parts=dz_parts, phi=parameters.phi, norm_weight=parameters.norm_weight, norm=norm)


def parameter_gradients(
    read: ReadGradients,
    sums: PhiSums,
    y: Tensor,
    parameters: Parameters,
    math: Math,
    *,
    out_norm_weight: Tensor | None = None,
    written: WriteGradients | None = None,
    f_bias: Tensor | None = None,
) -> Finished:
    """The small kernel that ends what P and, in `written`, J left in parts."""
    _T, N, C = tokens_of(y)
    done = finish(
        sums, read.sums, written,
        streams=N, channels=C, math=math, out_norm_weight=out_norm_weight, f_bias=f_bias, **parameters._asdict(),
    )  # fmt: skip
    if out_norm_weight is not None and sums.norm is None:
        done = done._replace(out_norm_weight=out_norm_weight.new_zeros(C))
    return done
