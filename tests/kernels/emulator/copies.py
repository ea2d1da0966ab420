"""The copy engine: tiles of a described matrix into shared memory and out of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .hazards import ENGINE
from .memory import BadAccess, swizzled
from .program import Warp

MOST_ROW_BYTES = 128  # of a tile
MOST_ROWS = 256


class Description(NamedTuple):
    """A matrix in memory, row by row, and the tile of it that a copy moves, whose rows are swizzled."""

    address: int
    shape: tuple[int, int]
    tile: tuple[int, int]
    element_size: int

    def check(self) -> None:
        if self.address % 16 or self.shape[1] * self.element_size % 16:
            raise BadAccess("the copy engine takes rows that begin at 16 bytes")
        if self.tile[1] * self.element_size not in (32, 64, MOST_ROW_BYTES):
            raise BadAccess("a tile's rows have 32, 64 or 128 bytes here")
        if self.tile[0] > MOST_ROWS:
            raise BadAccess("a tile has 256 rows at most")


def load_tile(warp: Warp, description: Description, target: int, at: tuple[int, int], barrier: int) -> None:
    """What lies outside of the matrix is 0."""
    program = warp.program
    agent = program.hazards.begin(warp.index, ENGINE)
    places, sources, inside = _tile(description, target, at)
    values = np.zeros((len(places), 16), np.uint8)
    for vector, is_inside in enumerate(inside):  # rows are wholes of 16 bytes
        if is_inside:
            values[vector] = program.device.load(sources[vector : vector + 1], 16, program.author(warp))[0]
    program.shared.store(agent, places, values, warp.source)
    program.arrive(warp, barrier, agent, count=0, arrived_bytes=values.size)


def store_tile(warp: Warp, description: Description, source: int, at: tuple[int, int]) -> None:
    program = warp.program
    agent = program.hazards.begin(warp.index, ENGINE)
    places, targets, inside = _tile(description, source, at)
    values = program.shared.load(agent, places, 16, warp.source)
    program.device.store(targets[inside], values[inside], program.author(warp))


def _tile(description: Description, shared: int, at: tuple[int, int]) -> tuple[Any, Any, Any]:
    """Of every 16 bytes of a tile, where they lie in shared memory and in the matrix, and whether they do."""
    description.check()
    (rows, columns), size = description.tile, description.element_size
    if shared % 128 or at[0] * size % 16:
        raise BadAccess(f"a tile that is not aligned, at {at} and {shared}")
    row, byte = np.arange(rows)[:, None], np.arange(0, columns * size, 16)[None, :]
    places = swizzled(shared + row * (columns * size) + byte, columns * size)
    matrix_row, matrix_byte = at[1] + row, at[0] * size + byte
    row_bytes = description.shape[1] * size
    inside = (matrix_row >= 0) & (matrix_row < description.shape[0]) & (matrix_byte >= 0) & (matrix_byte < row_bytes)
    return places.ravel(), (description.address + matrix_row * row_bytes + matrix_byte).ravel(), inside.ravel()
