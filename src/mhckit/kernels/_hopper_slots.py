"""Slots of J for Hopper, of either kind: tiles for the copy engine (`_hopper_copies`), or vectors (`_hopper_vectors`),
where rows begin anywhere and arrive late (`_hopper_late`). What is asked for is the same of both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._hopper_copies import GROUP, PANEL, PANELS, SHARED
from ._hopper_late import load_late
from ._hopper_vectors import VECTOR, allocate_vectors, half_from, rows_from


@gluon.jit
def allocate_slots(SLOTS: gl.constexpr, ROWS: gl.constexpr, TILED: gl.constexpr):
    """So many slots of so many ROWS: of tiles, or of vectors."""
    if TILED:
        return gl.allocate_shared_memory(gl.bfloat16, [SLOTS * PANELS, ROWS, PANEL], SHARED)
    else:
        return allocate_vectors(SLOTS, ROWS)


@gluon.jit
def panel_of(slots, slot, panel, ROWS: gl.constexpr):
    """A panel's channels of a slot's ROWS."""
    if slots.shape[2] == VECTOR:
        return rows_from(slots, slot, 0, panel * (PANEL // VECTOR), ROWS, ROWS).slice(0, PANEL, 1)
    else:
        return slots.index(slot * PANELS + panel)


@gluon.jit
def load_stream(
    slots, slot, panel, own, t, C: gl.constexpr, N: gl.constexpr, STREAM: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """A panel's channels of a stream as float32."""
    if slots.shape[2] == VECTOR:
        return load_late(slots, slot, panel, own, t, C, N, STREAM, layout)
    else:
        return slots.index(slot * PANELS + panel).slice(STREAM * GROUP, GROUP).load(layout).to(gl.float32)


@gluon.jit
def halves_of(slots, slot):
    """Both halves of the memory of a slot of GROUP rows, for something else."""
    if slots.shape[2] == VECTOR:
        return half_from(slots, slot, 0, GROUP), half_from(slots, slot, 1, GROUP)
    else:
        return slots.index(slot * PANELS), slots.index(slot * PANELS + 1)
