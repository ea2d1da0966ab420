"""Kernels of `pre`: F2 with given weights; B, J and P of a read that has no coefficients."""

from __future__ import annotations

import torch
from torch import Tensor

from mhckit.ops._register import empty, pack

from ._gradients import CollapseGradient, ProjectionGradient
from ._launch import FLOAT, tokens_of
from ._math import math_of_streams
from ._parameters_bwd import chunk_sums, finish
from ._read import read
from ._read_bwd import read_bwd
from ._read_half import read_weights_of_backward
from ._streams_bwd import read_streams_bwd


def pre_fwd(
    x: Tensor, pre: Tensor, norm_weight: Tensor | None, norm_eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    (T, N, C), lead = tokens_of(x), x.shape[:-2]
    x_in = empty(x, *lead, C, dtype=out_dtype)
    u = empty(x, *((0,) if norm_weight is None else lead), dtype=FLOAT)
    read(
        x, None, None, None, math_of_streams(N),
        tokens=T, channels=C, weights=pre, norm_weight=norm_weight, norm_eps=norm_eps, x_in=x_in, u=u,
    )  # fmt: skip
    return x_in, u


def pre_bwd(
    dx_in: Tensor, x: Tensor, pre: Tensor, norm_weight: Tensor | None, u: Tensor | None, need_norm_weight: bool
) -> tuple[Tensor, ...]:
    (T, N, C), lead = tokens_of(x), x.shape[:-2]
    read_weights = read_weights_of_backward(x, pre, norm_weight)
    norm_share = None if norm_weight is None else empty(x, *lead, dtype=FLOAT)
    dpre = empty(pre, *pre.shape)
    read_bwd(
        x, dx_in, (None, None, None), None, None, None, None, math_of_streams(N),
        like=x, tokens=T, channels=C, weights=pre, norm_weight=norm_weight, u=u, norm_share=norm_share, dweights=dpre,
        read_weights=None if read_weights is pre else read_weights,
    )  # fmt: skip
    collapse = CollapseGradient(dx_in, read_weights, norm_weight, norm_share)
    dx = read_streams_bwd(x, None, collapse, ProjectionGradient())
    dnorm_weight = None
    if norm_weight is not None and need_norm_weight:
        sums = chunk_sums(x, norm=(dx_in, read_weights))
        dnorm_weight = finish(sums, None, None, streams=N, channels=C, out_norm_weight=norm_weight).out_norm_weight
    return pack((dx, dpre, dnorm_weight), otherwise=x)
