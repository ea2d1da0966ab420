"""Products of tensor cores, asynchronous ones and those of a warp."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from . import matrices
from .hazards import TENSOR_CORES
from .memory import BadAccess
from .program import LANES, Warp
from .ptx import Instruction
from .registers import Handlers, Registers, Run, one

_UNFINISHED = np.full(LANES, -1).astype(np.uint32)

HANDLERS = Handlers()
_OF_A_WARP = {
    "m16n8k8.row.col.f32.tf32.tf32.f32": matrices.multiply_small_tf32,
    "m16n8k8.row.col.f32.bf16.bf16.f32": matrices.multiply_small,
    "m16n8k16.row.col.f32.bf16.bf16.f32": matrices.multiply_small,
}


@HANDLERS.of("wgmma.fence")
def _wgmma_fence(registers: Registers, instruction: Instruction) -> Run:
    """Wanted before products whose registers others have written."""

    def run(warp: Warp) -> None:
        warp.may_multiply = True

    return run


@HANDLERS.of("wgmma.commit_group")
def _wgmma_commit_group(registers: Registers, instruction: Instruction) -> Run:
    def run(warp: Warp) -> None:
        number = len(warp.groups.get(TENSOR_CORES, ()))
        for known in (warp.products, warp.factors):
            for place, (group, value) in known.items():
                known[place] = (number if group is None else group, value)
        warp.program.commit(warp, TENSOR_CORES)

    return run


@HANDLERS.of("wgmma.wait_group")
def _wgmma_wait_group(registers: Registers, instruction: Instruction) -> Run:
    """Nobody may look at sums before this; those of all groups but the last ones can be seen from here on."""
    remaining = int(instruction.operands[0])

    def run(warp: Warp) -> None:
        warp.program.wait_group(warp, TENSOR_CORES, remaining)
        over = len(warp.groups.get(TENSOR_CORES, ())) - remaining
        for place, (group, value) in list(warp.products.items()):
            if group is not None and group < over:
                if warp.registers[place] is not _UNFINISHED:
                    raise BadAccess(f"a sum of tensor cores was overwritten before it was there, {warp.source}")
                warp.registers[place] = value
                del warp.products[place]
        for place, (group, value) in list(warp.factors.items()):
            if group is not None and group < over:
                _expect_unchanged(warp, place, value)
                del warp.factors[place]
        warp.may_multiply = False

    return run


def _expect_unchanged(warp: Warp, place: int, value: Any) -> None:
    if warp.registers[place] is not value:
        raise BadAccess(f"a register was overwritten while tensor cores read it, {warp.source}")


@HANDLERS.of("wgmma.mma_async")
def _wgmma_mma_async(registers: Registers, instruction: Instruction) -> Run:
    """What a warp has of a product by four of them: 16 of 64 rows."""
    shape = re.fullmatch(r"m64n(\d+)k16", instruction.name[4])
    if shape is None or instruction.name[5:] != ("f32", "bf16", "bf16"):
        raise NotImplementedError(str(instruction))
    result, left, right, adds, *signs = instruction.operands
    columns, places = int(shape[1]), [registers.slot(name) for name in result]
    assert signs[:2] == ["1", "1"]
    *left_turned, right_turned = (sign == "1" for sign in signs[2:])
    descriptor, accumulates = registers.source(right, "b64"), registers.source(adds, "pred")
    in_registers = isinstance(left, tuple)
    lefts = [registers.source(name, "b32") for name in left] if in_registers else [registers.source(left, "b64")]

    def run(warp: Warp) -> None:
        if not warp.may_multiply:
            raise BadAccess(f"no fence between registers and tensor cores, {warp.source}")
        warp.program.hazards.begin(warp.index, TENSOR_CORES)
        registers = warp.registers
        if in_registers:
            tile = matrices.fragment_of_left([registers[k] for k in lefts])
            for place in lefts:
                _expect_unchanged(warp, place, warp.factors.get(place, (None, registers[place]))[1])
                warp.factors[place] = (None, registers[place])
        else:
            rows = one(registers[lefts[0]])
            tile = matrices.shared_matrix(warp, rows, 16, warp.index % 4 * 16, left_turned[0])
        others = matrices.shared_matrix(warp, one(registers[descriptor]), columns, 0, right_turned)
        before = [warp.products.get(place, (None, registers[place]))[1] for place in places]
        values = matrices.multiply(tile, others, before if registers[accumulates][0] else None)
        for place, value in zip(places, values, strict=True):
            registers[place], warp.products[place] = _UNFINISHED, (None, value)

    return run


@HANDLERS.of("mma")
def _mma(registers: Registers, instruction: Instruction) -> Run:
    """A product of a warp."""
    how = ".".join(instruction.name[3:])
    if how not in _OF_A_WARP:
        raise NotImplementedError(str(instruction))
    result, *factors = instruction.operands
    places = [registers.slot(name) for name in result]
    sources = [[registers.source(name, "b32") for name in names] for names in factors]

    def run(warp: Warp) -> None:
        values = _OF_A_WARP[how](*([warp.registers[k] for k in places] for places in sources))
        for place, value in zip(places, values, strict=True):
            warp.registers[place] = value

    return run
