"""dz in J for Hopper: both parts of it, as the left operands of dots with the packed parts of phi: four exact products.

Rows of phi's parts are taken 16 at a time. With four streams and rows that the copy engine moves, dz of both groups of
tokens is in shared memory, or in registers; where rows begin anywhere `_hopper_staged` has it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._device import part_column
from ._hopper_copies import GROUP

PART_ROWS = gl.constexpr(16)


@gluon.jit
def load_dz(dz_parts, t, is_low, T, P: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """[rows, PART_ROWS] for each 16 rows of parts; t: which token's each row is; is_low: which part of it, of all rows
    or of each.
    """
    dz = ()
    for part in gl.static_range(PARTS):
        if part * PART_ROWS >= P and P % PART_ROWS == 0:
            dz = dz + (dz[part - P // PART_ROWS],)  # of the same rows of phi
        else:
            k = part * PART_ROWS + gl.arange(0, PART_ROWS, gl.SliceLayout(0, layout))
            p = k % P
            column = gl.where(is_low, part_column(p, 1)[None, :], part_column(p, 0)[None, :])
            exists = (t < T)[:, None] & (k < 2 * P)[None, :]
            dz = dz + (gl.load(dz_parts + t[:, None] * WIDTH + column, mask=exists, other=0.0),)
    return dz


@gluon.jit
def token_of_row(r):
    """Which of a group's tokens row r of dz belongs to: of eight, 0 4 1 5 2 6 3 7."""
    return r // 16 * 8 + r % 2 * 4 + r % 8 // 2


@gluon.jit
def load_dz_of_group(
    dz_parts, first, T, P: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Of a group's tokens, whose first is given."""
    r = gl.arange(0, 2 * GROUP, gl.SliceLayout(1, layout))
    is_low = (r // 8 % 2 == 1)[:, None]
    return load_dz(dz_parts, first.to(gl.int64) + token_of_row(r), is_low, T, P, PARTS, WIDTH, layout)


@gluon.jit
def stage_dz(dz_parts, dz, first, T, P: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr):
    """Of both groups, into shared memory: a tile for each 16 rows of parts."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0])
    for group in gl.static_range(2):
        tiles = load_dz_of_group(dz_parts, first + group * GROUP, T, P, PARTS, WIDTH, layout)
        for part in gl.static_range(PARTS):
            dz.index(group * PARTS + part).store(tiles[part])


@gluon.jit
def staged_dz_of_group(dz, group, PARTS: gl.constexpr):
    tiles = ()
    for part in gl.static_range(PARTS):
        tiles = tiles + (dz.index(group * PARTS + part),)
    return tiles
