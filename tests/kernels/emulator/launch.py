"""A launch: what a kernel is given, and all programs of the grid, one after the other."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from mhckit.kernels._descriptors import Tiles

from .copies import MOST_ROW_BYTES, Description
from .decode import Decoded
from .hazards import Hazard, Torn
from .memory import BadAccess, DeviceMemory
from .program import LANES, Program

# How often programs run again, with NaN where something is torn, until that tears nothing else.
_TRIES = 5
_DESCRIPTIONS = 1 << 50  # where descriptions of tensors are said to be
_MOST_SHARED = 227 * 1024  # that a program can have


class Ready(NamedTuple):
    decoded: Decoded
    shared_bytes: int


class Parameter(NamedTuple):
    """A tensor or a number. tiles: how a tensor is described to the copy engine, if it is."""

    value: Any
    is_float: bool = False
    tiles: Tiles | None = None


def run(ready: Ready, grid: tuple[int, ...], parameters: list[Parameter], seed: int = 0) -> None:
    if ready.shared_bytes > _MOST_SHARED:
        raise BadAccess(f"{ready.shared_bytes} bytes of shared memory, more than {_MOST_SHARED}")
    known: list[Torn] = [{} for _ in range(math.prod(grid))]
    for _ in range(_TRIES):
        torn = _run(ready, grid, parameters, seed, known)
        if torn == known:
            return
        known = torn
    raise Hazard("where a kernel goes depends on what tensor cores read that nothing orders")


def _run(
    ready: Ready, grid: tuple[int, ...], parameters: list[Parameter], seed: int, known: list[Torn]
) -> list[Torn]:  # fmt: skip
    """What tensor cores read in each program that nothing orders. Unless all of it is known, nothing is stored."""
    device = DeviceMemory([parameter.value for parameter in parameters if isinstance(parameter.value, Tensor)])
    values, descriptions = _handed_over(parameters, device)
    kernel = ready.decoded.kernel
    values += [0] * (len(kernel.parameters) - len(values))  # memory for scratch and for profiling, which none has
    whole, torn = (*grid, 1, 1)[:3], []
    for number, (z, y, x) in enumerate(itertools.product(*map(range, reversed(whole)))):
        program = Program(kernel.threads // LANES, ready.shared_bytes, device, descriptions, number, known[number])
        program.warps += [ready.decoded.warp(program, k, (x, y, z), whole, values) for k in range(program.count)]
        with np.errstate(all="ignore"):  # infinities and NaN are a GPU's business as well
            program.run(ready.decoded.code, seed + number)
        torn.append(program.hazards.torn)
    if known == torn:
        device.take_back()
    return torn


def _handed_over(parameters: list[Parameter], device: DeviceMemory) -> tuple[list[Any], dict[int, Description]]:
    """Values as a kernel gets them, and descriptions of tensors by where they are said to be."""
    values: list[Any] = []
    descriptions: dict[int, Description] = {}
    for value, is_float, tiles in parameters:
        if tiles is not None:
            at, size = _DESCRIPTIONS + len(descriptions), value.element_size()
            tile = (tiles.tile[0], min(tiles.tile[1], MOST_ROW_BYTES // size))  # Triton cuts wider ones
            descriptions[at] = Description(device.address(value), tiles.shape, tile, size)
            values += [np.full(LANES, at, np.uint64), *tiles.shape, tiles.shape[1], 1]
        elif isinstance(value, Tensor):
            values.append(device.address(value))
        else:
            values.append(int(np.float32(value).view(np.uint32)) if is_float else value)
    return values, descriptions
