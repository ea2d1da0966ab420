"""Between lanes, and between warps: shuffles, barriers and fences."""

from __future__ import annotations

import numpy as np

from .matrices import turn_matrix
from .program import LANES, Warp
from .ptx import Address, Instruction
from .registers import LANE, Handlers, Registers, Run, one

HANDLERS = Handlers()


@HANDLERS.of("shfl")
def _shfl(registers: Registers, instruction: Instruction) -> Run:
    way = instruction.name[2]
    target, *operands = instruction.operands
    if len(operands) != 4:
        raise NotImplementedError(str(instruction))
    at, places = registers.slot(target), [registers.source(operand, "b32") for operand in operands]

    def run(warp: Warp) -> None:
        value, other, bounds, members = (warp.registers[place] for place in places)
        assert (members == 0xFFFFFFFF).all(), "some lanes are left out"
        segment, clamp = bounds >> 8 & 31, bounds & 31
        last = (LANE & segment) | (clamp & ~segment)
        from_lane = LANE ^ other if way == "bfly" else (LANE & segment) | (other & ~segment & 31)
        assert way in ("bfly", "idx")
        warp.registers[at] = value[np.where(from_lane <= last, from_lane, LANE)]

    return run


@HANDLERS.of("movmatrix")
def _movmatrix(registers: Registers, instruction: Instruction) -> Run:
    target, source = instruction.operands
    at, place = registers.slot(target), registers.source(source, "b32")

    def run(warp: Warp) -> None:
        warp.registers[at] = turn_matrix(warp.registers[place])

    return run


@HANDLERS.of("elect")
def _elect(registers: Registers, instruction: Instruction) -> Run:
    leader, chosen, _ = instruction.operands
    at, is_leader = registers.slot(leader), registers.slot(chosen)

    def run(warp: Warp) -> None:
        warp.registers[at], warp.registers[is_leader] = np.zeros(LANES, np.uint32), LANE == 0

    return run


@HANDLERS.of("bar", "barrier")
def _bar(registers: Registers, instruction: Instruction) -> Run:
    if instruction.name[1] != "sync":
        raise NotImplementedError(str(instruction))
    number, *threads = (registers.source(operand, "b32") for operand in instruction.operands)

    def run(warp: Warp) -> None:
        count = one(warp.registers[threads[0]]) // LANES if threads else None
        warp.program.meet(warp, one(warp.registers[number]), count)

    return run


@HANDLERS.of("setmaxnreg")
def _setmaxnreg(registers: Registers, instruction: Instruction) -> Run:
    count = registers.source(instruction.operands[0], "b32")
    return lambda warp: warp.program.set_registers(warp, one(warp.registers[count]))


@HANDLERS.of("fence.proxy")
def _fence_proxy(registers: Registers, instruction: Instruction) -> Run:
    if instruction.name[2:] not in (("async",), ("async", "shared::cta")):
        raise NotImplementedError(str(instruction))
    return lambda warp: warp.program.hazards.fence(warp.index)


@HANDLERS.of("mbarrier", guarded=True)
def _mbarrier(registers: Registers, instruction: Instruction) -> Run:
    what, operands = instruction.name[1], instruction.operands
    where = next(operand for operand in operands if isinstance(operand, Address))
    addresses, mask = registers.addresses(where), registers.mask(instruction)
    last = None if operands[-1] is where else registers.source(operands[-1], "b32")
    result = registers.slot(operands[0]) if what == "try_wait" else None

    def run(warp: Warp) -> None:
        chosen = mask(warp)
        if not chosen.any():
            return
        program, at = warp.program, one(addresses(warp)[chosen])
        value = None if last is None else one(warp.registers[last])
        if what == "init":
            program.begin_barrier(warp, at, value)
        elif what == "inval":
            program.end_barrier(warp, at)
        elif what == "try_wait":
            warp.registers[result] = np.ones(LANES, np.bool_)
            program.wait(warp, at, value)
        elif what == "arrive":
            each = 1
            if "expect_tx" in instruction.name:
                program.announce(warp, at, value)
            elif value is not None:
                each = value
            program.arrive(warp, at, warp.index, count=each * int(chosen.sum()))
        else:
            raise NotImplementedError(str(instruction))

    return run
