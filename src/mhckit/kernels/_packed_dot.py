"""dz phi inside J: tensor cores on the parts that `_pack` and `_read_bwd` leave.

The high and the low parts of a token's dz are rows i and i + 8 of a tensor core's tile, against both parts of phi: four
exact products, whose sum is dz phi to the 16 bits of the parts. Packed rows are taken 64 at a time, then 32, then 16.
"""

import triton
import triton.language as tl

from ._device import part_column, sum_parts, unpack_columns
from ._pack import packed_row


@triton.jit
def load_dz(
    dz_parts, T, P: tl.constexpr, PACKED: tl.constexpr, DENSE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr
):
    """High and low parts of dz as rows, once for each part of phi: [2 tokens, PACKED], in the blocks of `dot_phi`."""
    blocks = ()
    for block in tl.static_range(PACKED // 64):
        blocks = blocks + (_load_dz_block(dz_parts, T, block * 64, 64, P, DENSE, WIDTH, BLOCK_T),)
    if PACKED % 64 >= 32:
        blocks = blocks + (_load_dz_block(dz_parts, T, PACKED // 64 * 64, 32, P, DENSE, WIDTH, BLOCK_T),)
    if PACKED % 32 >= 16:
        blocks = blocks + (_load_dz_block(dz_parts, T, PACKED // 32 * 32, 16, P, DENSE, WIDTH, BLOCK_T),)
    return blocks


@triton.jit
def _load_dz_block(
    dz_parts, T, first: tl.constexpr, COUNT: tl.constexpr, P: tl.constexpr, DENSE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, 2 * BLOCK_T)
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + r // 16 * 8 + r % 8
    low = (r // 8) % 2 == 1
    p, exists = packed_row(first + tl.arange(0, COUNT), P, DENSE)
    column = tl.where(low[:, None], part_column(p, 1)[None, :], part_column(p, 0)[None, :])
    return tl.load(dz_parts + t[:, None] * WIDTH + column, mask=(t < T)[:, None] & exists[None, :], other=0.0)


@triton.jit
def load_phi(phi_parts, o: tl.constexpr, start, C: tl.constexpr, PACKED: tl.constexpr, PIECE: tl.constexpr):
    """Tiles of a stream's packed phi for PIECE channels from start: 64 rows each, then 32, then 16."""
    BLOCKS: tl.constexpr = (C + PIECE - 1) // PIECE
    at = start // PIECE
    here = at < BLOCKS
    tile = phi_parts + (o * BLOCKS + at) * (PACKED * PIECE)
    tiles = ()
    for block in tl.static_range(PACKED // 64):
        tiles = tiles + (_load_rows(tile, block * 64, 64, PIECE, here),)
    if PACKED % 64 >= 32:
        tiles = tiles + (_load_rows(tile, PACKED // 64 * 64, 32, PIECE, here),)
    if PACKED % 32 >= 16:
        tiles = tiles + (_load_rows(tile, PACKED // 32 * 32, 16, PIECE, here),)
    return tiles


@triton.jit
def dot_phi(dz_blocks, phi_tiles, CHAINS: tl.constexpr, FOLD: tl.constexpr):
    """dz phi for the channels of these tiles, exact to the 16 bits of the parts."""
    DZ_ROWS: tl.constexpr = dz_blocks[0].shape[0]
    PIECE: tl.constexpr = phi_tiles[0].shape[1]
    total = tl.zeros((DZ_ROWS if CHAINS else DZ_ROWS // 2, PIECE), tl.float32)
    for block in tl.static_range(len(phi_tiles)):
        total = _add_dot(total, dz_blocks[block], phi_tiles[block], CHAINS)
    return unpack_columns(sum_parts(total) if CHAINS else total, FOLD)


@triton.jit
def _add_dot(total, dz, phi, CHAINS: tl.constexpr):
    """total + dz phi: with CHAINS inside the tensor cores; else the parts of dz are added up first.

    Beyond 4 warps the compiler lays out the last dot of a chain unlike the others, and rearranges the sum before it.
    With that, and no loads in flight, wrong sums were seen (see `packs_densely`). Elsewhere a chain spills less.
    """
    if CHAINS:
        return tl.dot(dz, phi, total)
    else:
        return total + sum_parts(tl.dot(dz, phi))


@triton.jit
def _load_rows(tile, first: tl.constexpr, COUNT: tl.constexpr, PIECE: tl.constexpr, here):
    k = first + tl.arange(0, COUNT)
    return tl.load(tile + k[:, None] * PIECE + tl.arange(0, PIECE)[None, :], mask=here, other=0.0)
