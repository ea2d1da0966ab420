"""Kernels of `expand`: a broadcast; its backward is a collapse with weights of 1 (F2)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mhckit.ops._register import empty

from ._device import channels_exist, load_float, store_as, tokens_of_program
from ._launch import broadcast_launch, cdiv, tokens_of
from ._launcher import run
from ._math import math_of_streams
from ._read import read


@triton.jit(do_not_specialize=["T"])
def broadcast_kernel(h, x, T, C: tl.constexpr, factor, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    t, live = tokens_of_program(T, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tile = live[:, None] & channels_exist(c, C, BLOCK_C)[None, :]
    value = load_float(h, t[:, None] * C + c[None, :], tile) * factor
    for n in tl.static_range(N):
        store_as(x, (t[:, None] * N + n) * C + c[None, :], value, tile)


def broadcast(h: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
    """Fill x [..., N, C] with h [..., C] times factor."""
    T, N, C = tokens_of(x)
    launch = broadcast_launch(C)
    grid = (cdiv(T, launch.block_t), cdiv(C, launch.block_c))
    run(
        broadcast_kernel,
        grid,
        h,
        x,
        T,
        C,
        factor,
        N=N,
        BLOCK_T=launch.block_t,
        BLOCK_C=launch.block_c,
        num_warps=launch.num_warps,
    )
    return x


def expand_fwd(h: Tensor, streams: int) -> Tensor:
    return broadcast(h, empty(h, *h.shape[:-1], streams, h.shape[-1]))


def expand_bwd(dx: Tensor) -> Tensor:
    T, N, C = tokens_of(dx)
    dh = empty(dx, *dx.shape[:-2], C)
    read(dx, None, None, None, math_of_streams(N), tokens=T, channels=C, weights="constant", constant=1.0, x_in=dh)
    return dh
