"""Loads and stores, of lanes and of warps, and what copies for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import copies, matrices
from .arithmetic import Lanes, unsigned
from .hazards import COPIES, ENGINE
from .program import LANES, Warp
from .ptx import Address, Instruction
from .registers import Handlers, Registers, Run, declared, one

HANDLERS = Handlers()


@HANDLERS.of("ld.param")
def _ld_param(registers: Registers, instruction: Instruction) -> Run:
    target, source = instruction.operands
    at, parameter = registers.slot(target), registers.slot(source.base)
    kind = unsigned(declared(target))

    def run(warp: Warp) -> None:
        value = warp.registers[parameter]
        warp.registers[at] = np.full(LANES, value, np.int64).astype(kind)

    return run


@HANDLERS.of("ld.global", guarded=True)
def _ld_global(registers: Registers, instruction: Instruction) -> Run:
    def load(warp: Warp, addresses: Lanes, size: int) -> Any:
        return warp.program.device.load(addresses, size, warp.program.author(warp))

    return _load(registers, instruction, load)


@HANDLERS.of("ld.shared", guarded=True)
def _ld_shared(registers: Registers, instruction: Instruction) -> Run:
    def load(warp: Warp, addresses: Lanes, size: int) -> Any:
        return warp.program.shared.load(warp.index, addresses, size, warp.source)

    return _load(registers, instruction, load)


def _load(registers: Registers, instruction: Instruction, load: Callable[[Warp, Lanes, int], Any]) -> Run:
    target, source = instruction.operands[:2]
    if instruction.name[-1][0] == "s":
        raise NotImplementedError(f"a sign that is spread: {instruction}")
    names = target if isinstance(target, tuple) else (target,)
    places, kind = [registers.slot(name) for name in names], np.dtype(unsigned(instruction.name[-1]))
    kept = [np.dtype(unsigned(declared(name))) for name in names]
    addresses, mask = registers.addresses(source), registers.mask(instruction)

    def run(warp: Warp) -> None:
        chosen = mask(warp)
        found = load(warp, addresses(warp)[chosen], kind.itemsize * len(places)).view(kind)
        for k, place in enumerate(places):
            before = warp.registers[place]
            value = np.full(LANES, -1).astype(kept[k]) if before is None else before.astype(kept[k])  # a copy
            value[chosen] = found[:, k]
            warp.registers[place] = value

    return run


@HANDLERS.of("st.global", guarded=True)
def _st_global(registers: Registers, instruction: Instruction) -> Run:
    def store(warp: Warp, addresses: Lanes, values: Any) -> None:
        warp.program.device.store(addresses, values, warp.program.author(warp))

    return _store(registers, instruction, store)


@HANDLERS.of("st.shared", guarded=True)
def _st_shared(registers: Registers, instruction: Instruction) -> Run:
    def store(warp: Warp, addresses: Lanes, values: Any) -> None:
        warp.program.shared.store(warp.index, addresses, values, warp.source)

    return _store(registers, instruction, store)


def _store(registers: Registers, instruction: Instruction, store: Callable[[Warp, Lanes, Any], None]) -> Run:
    target, source = instruction.operands[:2]
    kind = instruction.name[-1]
    names = source if isinstance(source, tuple) else (source,)
    places, dtype = [registers.source(name, kind) for name in names], np.dtype(unsigned(kind))
    addresses, mask = registers.addresses(target), registers.mask(instruction)

    def run(warp: Warp) -> None:
        chosen = mask(warp)
        if chosen.any():
            values = np.stack([warp.registers[place].astype(dtype) for place in places], 1)[chosen]
            store(warp, addresses(warp)[chosen], values.view(np.uint8))

    return run


@HANDLERS.of("ldmatrix")
def _ldmatrix(registers: Registers, instruction: Instruction) -> Run:
    target, source = instruction.operands
    places, addresses = [registers.slot(name) for name in target], registers.addresses(source)
    transposed = "trans" in instruction.name

    def run(warp: Warp) -> None:
        found = matrices.load_matrices(warp, addresses(warp), len(places), transposed)
        for place, value in zip(places, found, strict=True):
            warp.registers[place] = value

    return run


@HANDLERS.of("stmatrix")
def _stmatrix(registers: Registers, instruction: Instruction) -> Run:
    target, source = instruction.operands
    places, addresses = [registers.slot(name) for name in source], registers.addresses(target)
    transposed = "trans" in instruction.name

    def run(warp: Warp) -> None:
        values = [warp.registers[place] for place in places]
        matrices.store_matrices(warp, addresses(warp), values, transposed)

    return run


@HANDLERS.of("cp.async", guarded=True)
def _cp_async(registers: Registers, instruction: Instruction) -> Run:
    name, operands = instruction.name, instruction.operands
    if instruction.guard is not None and {"commit_group", "wait_group"} & {*name} | {"mbarrier"} & {*name[2:3]}:
        raise NotImplementedError(f"a guard: {instruction}")
    kind = ENGINE if name[2] == "bulk" else COPIES
    if "commit_group" in name:
        return lambda warp: warp.program.commit(warp, kind)
    if "wait_group" in name:
        remaining = int(operands[0])
        return lambda warp: warp.program.wait_group(warp, kind, remaining)
    if name[2:4] == ("mbarrier", "arrive"):
        return _arrive_behind_copies(registers, instruction)
    return _copy_tile(registers, instruction) if kind == ENGINE else _copy(registers, instruction)


def _arrive_behind_copies(registers: Registers, instruction: Instruction) -> Run:
    if "noinc" not in instruction.name:
        raise NotImplementedError(str(instruction))
    addresses = registers.addresses(instruction.operands[0])

    def run(warp: Warp) -> None:
        agent = warp.program.hazards.begin(warp.index, COPIES)
        warp.program.arrive(warp, one(addresses(warp)), agent, count=LANES)

    return run


def _copy(registers: Registers, instruction: Instruction) -> Run:
    """Of a lane; what it does not take from memory is 0."""
    target, source, size, *taken = instruction.operands
    size, counts = int(size, 0), registers.source(taken[0] if taken else size, "b32")
    targets, sources, mask = registers.addresses(target), registers.addresses(source), registers.mask(instruction)

    def run(warp: Warp) -> None:
        chosen = mask(warp)
        if not chosen.any():
            return
        program, count = warp.program, warp.registers[counts][chosen]
        assert ((count == 0) | (count == size)).all()
        values = np.zeros((len(count), size), np.uint8)
        reader = program.author(warp)
        values[count > 0] = program.device.load(sources(warp)[chosen][count > 0], size, reader)
        agent = program.hazards.begin(warp.index, COPIES)
        program.shared.store(agent, targets(warp)[chosen], values, warp.source)

    return run


def _copy_tile(registers: Registers, instruction: Instruction) -> Run:
    loads = instruction.name[5].startswith("shared")
    first, second, *rest = instruction.operands
    tensor, shared = (second, first) if loads else (first, second)
    assert isinstance(tensor, Address) and isinstance(shared, Address)
    at, place = registers.slot(tensor.base), registers.addresses(shared)
    coordinates = [registers.source(name, "b32") for name in tensor.coordinates]
    barrier, mask = registers.addresses(rest[0]) if loads else None, registers.mask(instruction)

    def run(warp: Warp) -> None:
        chosen = mask(warp)
        if not chosen.any():
            return
        assert chosen.sum() == 1, "one lane asks for a tile"
        registers = warp.registers
        description = warp.program.descriptions[int(registers[at][chosen][0])]
        where = tuple(int(registers[k].view(np.int32)[chosen][0]) for k in coordinates)
        memory = int(place(warp)[chosen][0])
        if barrier is None:
            copies.store_tile(warp, description, memory, where)
        else:
            copies.load_tile(warp, description, memory, where, int(barrier(warp)[chosen][0]))

    return run
