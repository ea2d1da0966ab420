"""What the kernels of a backward hand to each other: parts of the streams' gradient, and what came of a write-back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CollapseGradient(NamedTuple):
    """The part of G that comes through x_in: e, the read weights, and with a norm its weight and b."""

    dx_in: Tensor | None = None
    read_weights: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_share: Tensor | None = None


class ProjectionGradient(NamedTuple):
    """The part of G that comes through the coefficients: dz, k (the sum of up to two shares) and phi, packed."""

    dz_parts: Tensor | None = None
    k: Tensor | None = None
    k_more: Tensor | None = None
    phi_parts: Tensor | None = None
    rows: int = 0


class Write(NamedTuple):
    """A write-back to differentiate."""

    f: Tensor
    f_bias: Tensor | None
    post: Tensor
    res: Tensor | None


class WriteGradients(NamedTuple):
    """dpost, dres and dread_weights are still to be filled where their sums over slices of channels [slices, T, numbers
    per token] are given.

    df_sums: df summed over the tokens of each program, if there is a bias.
    """

    dx: Tensor
    df: Tensor
    df_sums: Tensor | None
    dpost: Tensor
    dres: Tensor | None
    dread_weights: Tensor | None
    sums: Tensor | None
