"""Matrices: what tensor cores multiply, and how a warp loads and stores small ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arithmetic import Lanes, widen_bfloat16
from .hazards import GRAIN, TENSOR_CORES
from .memory import swizzled
from .program import LANES, Warp

_LANE = np.arange(LANES)
_ROW_BYTES = {1: 128, 2: 64, 3: 32}  # by a descriptor's way to swizzle
_DEPTH = 16  # of a product


def shared_matrix(warp: Warp, descriptor: int, rows: int, first_row: int, transposed: bool) -> Any:
    """[rows, 16] as float64, as tensor cores read it: row by row, or if transposed column by column.

    Eight rows, or columns, make a block of so many bytes each as are swizzled; blocks are a stride apart.
    """
    start = (descriptor & 0x3FFF) << 4
    leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (16, 32))
    row_bytes = _ROW_BYTES[descriptor >> 62]
    r, k = np.arange(first_row, first_row + rows)[:, None], np.arange(_DEPTH)[None, :]
    if transposed:
        width = row_bytes // 2
        at = r % width * 2 + r // width * leading + k % 8 * row_bytes + k // 8 * stride
    else:
        at = r % 8 * row_bytes + r // 8 * stride + k * 2
    agent = warp.program.hazards.agent(warp.index, TENSOR_CORES)
    addresses = swizzled(start + at, row_bytes).ravel()
    found = warp.program.shared.load(agent, addresses, 2, warp.source).view(np.uint16).ravel()
    torn = warp.program.hazards.torn_before(agent, addresses // GRAIN)
    return _as_numbers(np.where(torn, np.uint16(0xFFFF), found)).reshape(rows, _DEPTH)


def fragment_of_left(registers: list[Lanes]) -> Any:
    """A warp's [16, 16] of a left operand from four registers: rows of a lane and eight below, columns and eight on."""
    tile = np.empty((16, _DEPTH))
    for k, register in enumerate(registers):
        pairs = _pairs(register)
        for half in range(2):
            tile[_LANE // 4 + k % 2 * 8, _LANE % 4 * 2 + k // 2 * 8 + half] = pairs[:, half]
    return tile


def multiply_small(left: list[Lanes], right: list[Lanes], accumulator: list[Lanes]) -> list[Lanes]:
    """A warp's [16, 8] by itself, of eight products each of bfloat16, or sixteen; all from registers."""
    row, column = _LANE // 4, _LANE % 4 * 2
    a, b = np.empty((16, 8 * len(right))), np.empty((8, 8 * len(right)))
    for half in range(2):
        for k, register in enumerate(left):
            a[row + k % 2 * 8, column + k // 2 * 8 + half] = _pairs(register)[:, half]
        for k, register in enumerate(right):
            b[row, column + k * 8 + half] = _pairs(register)[:, half]
    return multiply(a, b, accumulator)


def multiply_small_tf32(left: list[Lanes], right: list[Lanes], accumulator: list[Lanes]) -> list[Lanes]:
    """The same of factors that keep ten bits."""
    row, column = _LANE // 4, _LANE % 4
    a, b = np.empty((16, 8)), np.empty((8, 8))
    for k, register in enumerate(left):
        a[row + k % 2 * 8, column + k // 2 * 4] = _ten_bits(register)
    for k, register in enumerate(right):
        b[row, column + 4 * k] = _ten_bits(register)
    return multiply(a, b, accumulator)


def _ten_bits(register: Lanes) -> Any:
    return (register & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def multiply(left: Any, right: Any, accumulator: list[Lanes] | None) -> list[Lanes]:
    """A warp's 16 rows of left @ right.T and what was there, by registers: pairs of columns, then eight rows below."""
    product = left @ right.T
    results = []
    for k in range(product.shape[1] // 2):
        block, row, half = k // 4, k // 2 % 2, k % 2
        value = product[_LANE // 4 + 8 * row, 8 * block + _LANE % 4 * 2 + half]
        if accumulator is not None:
            value = value + accumulator[k].view(np.float32)
        results.append(value.astype(np.float32).view(np.uint32))
    return results


def load_matrices(warp: Warp, addresses: Lanes, count: int, transposed: bool) -> list[Lanes]:
    """[8, 8] each, of 2 bytes: eight lanes say where rows begin, and every lane gets two neighbours of a row."""
    rows = warp.program.shared.load(warp.index, addresses[: 8 * count], 16, warp.source)
    tiles = rows.view(np.uint16).reshape(count, 8, 8)
    if transposed:
        tiles = tiles.swapaxes(1, 2)
    return [np.ascontiguousarray(tile).view(np.uint32).reshape(LANES) for tile in tiles]


def store_matrices(warp: Warp, addresses: Lanes, registers: list[Lanes], transposed: bool) -> None:
    tiles = np.stack([register.view(np.uint16).reshape(8, 8) for register in registers])
    if transposed:
        tiles = tiles.swapaxes(1, 2)
    rows = np.ascontiguousarray(tiles).reshape(-1, 8).view(np.uint8)
    warp.program.shared.store(warp.index, addresses[: 8 * len(registers)], rows, warp.source)


def turn_matrix(register: Lanes) -> Lanes:
    """[8, 8] of 2 bytes, of which every lane has two neighbours of a row, transposed."""
    tile = np.ascontiguousarray(register).view(np.uint16).reshape(8, 8)
    return np.ascontiguousarray(tile.T).view(np.uint32).reshape(LANES)


def _pairs(register: Lanes) -> Any:
    """[lanes, 2]"""
    return _as_numbers(np.ascontiguousarray(register).view(np.uint16)).reshape(LANES, 2)


def _as_numbers(bits: Any) -> Any:
    return widen_bfloat16(bits).astype(np.float64)
