"""dz in J for Hopper: both parts of it, as the left operands of dots with the packed parts of phi: four exact products.

Rows of phi's parts are taken 16 at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._device import part_column

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
