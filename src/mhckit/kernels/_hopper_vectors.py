"""Rows in shared memory as vectors of eight places, for J where rows begin anywhere.

A slot has GROUP rows of each stream, of WIDTH places, one below the other: first those of even tokens, of all slots,
then those of odd ones, which begin 64 bytes further on than they would have to. Eight threads load the same places of
two neighbouring tokens at once, 64 bytes of each, and find them in different banks. Every place is 2 bytes from the
next one, so that rows can be read from any of their vectors on. Behind the last row of either half of a slot is a
vector that nobody fills, and that is read with that row. Slots of tiles for the copy engine have another shape: what
takes both asks whether a slot's last dimension is a VECTOR.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._hopper_copies import GROUP, PANEL, PANELS

VECTOR = gl.constexpr(8)
# Places of a row in a slot, and vectors of it.
WIDTH = gl.constexpr(PANELS.value * PANEL.value)
VECTORS = gl.constexpr(WIDTH.value // VECTOR.value)
# Vectors between the rows of even tokens and those of odd ones: more than slots, of which each takes one.
SKEW = gl.constexpr(4)
LINES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))


@gluon.constexpr_function
def _apart(groups):
    """How the rows of so many groups lie."""
    count, width = groups * GROUP.value, WIDTH.value
    columns = [[0, 1 << k] for k in range(width.bit_length() - 1)]
    rows = [[2 << k, 0] for k in range(count.bit_length() - 2)]
    skewed = [[count // 2 * width, SKEW.value * VECTOR.value]]
    return gl.PaddedSharedLayout(skewed, [*columns, *rows, [1, 0]], [], [count, width])


@gluon.jit
def allocate_vectors(SLOTS: gl.constexpr, ROWS: gl.constexpr):
    """Of so many ROWS in a slot."""
    gl.static_assert(SLOTS < SKEW)
    return gl.allocate_shared_memory(gl.bfloat16, [SLOTS * (ROWS * VECTORS + 1) + SKEW, 1, VECTOR], LINES)


@gluon.jit
def rows_from(slots, slot, stream, vector, COUNT: gl.constexpr, ROWS: gl.constexpr):
    """COUNT of a slot's ROWS, from a stream on, and from one of their vectors on."""
    GROUPS: gl.constexpr = slots.shape[0] // (GROUP * VECTORS)
    gl.static_assert(GROUPS & (GROUPS - 1) == 0)  # or odd tokens' rows would not be where `half_from` has them
    layout: gl.constexpr = _apart(GROUPS)
    first = _vector_of_slot(slot, ROWS) + stream * (GROUP // 2 * VECTORS) + vector
    return slots.index(first)._reinterpret(gl.bfloat16, [GROUPS * GROUP, WIDTH], layout).slice(0, COUNT)


@gluon.jit
def half_from(slots, slot, odd, ROWS: gl.constexpr):
    """The memory of half of a slot's ROWS, those of even tokens or of odd ones, as one vector."""
    HALF: gl.constexpr = slots.shape[0] // (GROUP * VECTORS) * (GROUP * VECTORS) // 2
    return slots.index(_vector_of_slot(slot, ROWS) + odd * (HALF + SKEW))


@gluon.jit
def _vector_of_slot(slot, ROWS: gl.constexpr):
    return slot * (ROWS // 2 * VECTORS + 1)
