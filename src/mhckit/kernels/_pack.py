"""Float32 operands of the backward's dots, packed once per call as bfloat16 high and low parts.

    phi_parts[o, c // BLOCK, k, c % BLOCK]      c by `pack_columns`; k: high parts of the rows of phi w, then low parts,
                                                of all rows (DENSE) or of 32 at a time. Blocks of STEP channels may
                                                have room for more
    phi_parts[c // SHARE, k, o SHARE + c % SHARE]  where STREAMS have a block together, each a SHARE of its columns
    dz_parts[t, part_column(p)]                 where dz does not come from `_read_bwd`, which packs it

Two parts keep 16 bits of mantissa, and tensor cores multiply bfloat16 exactly. Channels beyond C and rows beyond P are
0. Packing anew in every backward can never be stale; beside a read, programs of `_read_bwd` do it on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mhckit.ops._register import empty

from ._device import bfloat16_parts, load_float, pack_columns, part_column
from ._launch import BFLOAT, PhiLayout, cdiv, packed_dz_width, power_of_2, tokens_of
from ._launcher import run


@triton.jit
def packed_row(k, P: tl.constexpr, DENSE: tl.constexpr):
    """Which row of phi is row k of phi_parts, of either part, and whether there is one."""
    if DENSE:
        return k % P, k < 2 * P
    else:
        p = k // 64 * 32 + k % 32
        return p, p < P


@triton.jit
def pack_phi_block(
    phi, norm_weight, phi_parts, block, C: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PACKED: tl.constexpr,
    DENSE: tl.constexpr, PADDED: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    STREAMS: tl.constexpr,
):  # fmt: skip
    """Block number `block` of phi_parts: BLOCK channels of one stream, or what is left of a step."""
    p = tl.arange(0, PADDED)
    column = tl.arange(0, BLOCK)
    if STREAMS > 1:
        SHARE: tl.constexpr = BLOCK // STREAMS
        stream, c = column // SHARE, block * SHARE + column % SHARE
        exists = c < C
    else:
        TOGETHER: tl.constexpr = (STEP + BLOCK - 1) // BLOCK
        BLOCKS: tl.constexpr = (C + STEP - 1) // STEP * TOGETHER
        stream, within = block // BLOCKS, block % BLOCKS % TOGETHER * BLOCK + column
        c = block % BLOCKS // TOGETHER * STEP + within
        exists = (c < C) & (within < STEP)
    k = stream * C + c
    value = load_float(phi, p[:, None] * (N * C) + k[None, :], (p < P)[:, None] & exists[None, :])
    if norm_weight is not None:
        value *= load_float(norm_weight, k, exists)[None, :]
    high, low = bfloat16_parts(pack_columns(value, CHANNELS))
    row = p if DENSE else p // 32 * 64 + p % 32
    BELOW: tl.constexpr = P if DENSE else 32
    offsets = (block * PACKED + row[:, None]) * BLOCK + column[None, :]
    tl.store(phi_parts + offsets, high, mask=((p < P) if DENSE else (row < PACKED))[:, None])
    tl.store(phi_parts + offsets + BELOW * BLOCK, low, mask=(row + BELOW < PACKED)[:, None])


@triton.jit
def pack_phi_kernel(
    phi, norm_weight, phi_parts, C: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PACKED: tl.constexpr,
    DENSE: tl.constexpr, PADDED: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    STREAMS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    pack_phi_block(phi, norm_weight, phi_parts, block, C, P, N, PACKED, DENSE, PADDED, CHANNELS, BLOCK, STEP, STREAMS)


@triton.jit(do_not_specialize=["T"])
def pack_dz_kernel(dz, dz_parts, T, P: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    p = tl.arange(0, PADDED)
    here = (t < T)[:, None] & (p < P)[None, :]
    high, low = bfloat16_parts(load_float(dz, t[:, None] * P + p[None, :], here))
    tl.store(dz_parts + t[:, None] * WIDTH + part_column(p, 0)[None, :], high, mask=here)
    tl.store(dz_parts + t[:, None] * WIDTH + part_column(p, 1)[None, :], low, mask=here)


def empty_phi_parts(phi: Tensor, streams: int, layout: PhiLayout) -> Tensor:
    """[blocks, rows of parts, channels]: a block for each stream and some channels of it."""
    blocks = streams * layout.blocks(phi.shape[1] // streams)
    return empty(phi, blocks, layout.rows, layout.block, dtype=BFLOAT)


def pack_phi(phi: Tensor, norm_weight: Tensor | None, streams: int, layout: PhiLayout) -> Tensor:
    P, C, phi_parts = phi.shape[0], phi.shape[1] // streams, empty_phi_parts(phi, streams, layout)
    run(
        pack_phi_kernel, (phi_parts.shape[0],), phi, norm_weight, phi_parts, C, P,
        N=streams, PACKED=layout.rows, DENSE=layout.dense, PADDED=layout.padded(P), CHANNELS=layout.channels_per_thread,
        BLOCK=layout.block, STEP=layout.step, STREAMS=layout.together, num_warps=4,
    )  # fmt: skip
    return phi_parts


def empty_dz_parts(like: Tensor, tokens: int, rows: int) -> Tensor:
    return empty(like, tokens, packed_dz_width(rows), dtype=BFLOAT)


def pack_dz(dz: Tensor, x: Tensor) -> Tensor:
    T, P = tokens_of(x)[0], dz.shape[-1]
    dz_parts = empty_dz_parts(x, T, P)
    width = dz_parts.shape[1]
    run(
        pack_dz_kernel,
        (cdiv(T, 32),),
        dz,
        dz_parts,
        T,
        P,
        PADDED=power_of_2(P),
        WIDTH=width,
        BLOCK_T=32,
    )
    return dz_parts
