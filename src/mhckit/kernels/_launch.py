"""Launch parameters as data: one frozen value per kernel, from one heuristic per kernel.

They are functions of N, P and C alone, never of the number of tokens: a token's result must not depend on its batch,
and a new batch size must not compile anything. Their source so far is the compiler, not the clock: the widest tiles
that spill no registers for 4 streams of bfloat16 on sm_90 (`make sass`; CI holds them to it). What that costs is in
benchmarks/results/kernel_times.jsonl.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

FLOAT = torch.float32
# How float32 operands are multiplied: three tf32 products keep 21 bits or more; AMD has no such mode.
PRECISION = "ieee" if torch.version.hip else "tf32x3"
# Channels per partial sum of the projection: fixes the order of sums, and lets one token spread over C/512 programs.
PROJECTION_WIDTH = 512
# Tokens per partial sum of a parameter's gradient.
TOKEN_CHUNK = 2048


@dataclass(frozen=True)
class Launch:
    """Tile of one program (tokens x channels), its warps, and how many steps of its loop are in flight."""

    block_t: int
    block_c: int
    num_warps: int
    num_stages: int = 2

    def meta(self) -> dict[str, Any]:
        return dict(BLOCK_T=self.block_t, BLOCK_C=self.block_c, STAGES=self.num_stages, num_warps=self.num_warps)


def tokens_of(x: Tensor) -> tuple[int, int, int]:
    """T, N, C of streams [..., N, C]."""
    *lead, streams, channels = x.shape
    return math.prod(lead), streams, channels


def rows_per_block(rows: int) -> int:
    """Rows of phi that one dot takes: a power of two, at least what tensor cores want."""
    return min(max(triton.next_power_of_2(max(rows, 1)), 16), 256)


def write_launch(channels: int) -> Launch:
    """`post` forward: about a thousand channels of one token, or of a few tokens where C is small."""
    block_c = min(triton.next_power_of_2(channels), 1024)
    return Launch(block_t=max(1, 256 // block_c), block_c=block_c, num_warps=4)


def write_project_launch(streams: int, rows: int) -> Launch:
    """F1 and the projection alone: a warp group's tile of tokens. Wider steps spill: y is made where the dot has it."""
    fits_twice = streams * rows <= 256  # phi's tiles in shared memory
    return Launch(block_t=64, block_c=16, num_warps=4, num_stages=3 if fits_twice else 2)


def read_launch(streams: int, channels: int, iterating: bool) -> Launch:
    """F2: a row of channels in few steps; enough tokens per program to share out Sinkhorn."""
    block_c = _channel_step(channels, 2048 if streams <= 4 else 1024)
    return Launch(block_t=16 if iterating else 4, block_c=block_c, num_warps=8)


def read_bwd_launch(streams: int, channels: int) -> Launch:
    """B: sums over channels stay elementwise until the end."""
    return Launch(block_t=16, block_c=_channel_step(channels, 128 if streams <= 4 else 64), num_warps=8)


def streams_bwd_launch(streams: int, channels: int, *, dots: bool, sums_df: bool = False) -> Launch:
    """J: with dots 16 tokens at least, a tensor core's tile; without, the tile of `post`, unless df is to be summed
    over the tokens of each program: the more tokens, the fewer partial sums.

    A thread holds the N^2 + 2N coefficients of two tokens. Masked tiles and more streams leave fewer registers for the
    rest, and phi fewer bytes of shared memory for loads in flight.
    """
    if not dots and sums_df:
        return Launch(block_t=16, block_c=_channel_step(channels, 64), num_warps=4)
    if not dots:
        return Launch(block_t=1, block_c=_channel_step(channels, 1024 if streams <= 4 else 512), num_warps=4)
    if streams > 4:
        return Launch(block_t=16, block_c=_channel_step(channels, 32), num_warps=8, num_stages=1)
    return Launch(block_t=16, block_c=_channel_step(channels, 64 if channels % 64 == 0 else 32), num_warps=8)


def parameters_bwd_launch(streams: int, channels: int, rows: int) -> Launch:
    """P: all streams of a channel tile, so accumulators grow with both N and P."""
    step = max(16, min(64, 8192 // (triton.next_power_of_2(streams) * rows)))
    return Launch(block_t=32, block_c=_channel_step(channels, step), num_warps=4)


def _channel_step(channels: int, most: int) -> int:
    """A power of two, at least what tensor cores want."""
    return max(16, min(triton.next_power_of_2(channels), most))


def sinkhorn_launch(streams: int) -> Launch:
    """Two matrix entries per thread, whatever N."""
    return Launch(block_t=max(1, 256 // triton.next_power_of_2(streams) ** 2), block_c=1, num_warps=4)
