"""A kernel's instructions as functions of a warp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import accesses, arithmetic, exchanges, products
from .arithmetic import TYPES, unsigned
from .memory import BadAccess
from .program import LANES, Program, Warp
from .ptx import Instruction, Kernel
from .registers import LANE, Handlers, Registers, Run, one, seen_as

_SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid")

HANDLERS = Handlers(accesses.HANDLERS, exchanges.HANDLERS, products.HANDLERS)


class Decoded:
    """A kernel ready to run: a function for each instruction."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._registers = Registers()
        self._given = [self._registers.slot(name) for name in (*_SPECIAL, *kernel.parameters)]
        self.code: list[Run] = [_decode(self._registers, instruction) for instruction in kernel.code]

    def slot(self, name: str) -> int:
        """Where warps have a register."""
        return self._registers.slot(name)

    def warp(self, program: Program, index: int, place: Sequence[int], grid: Sequence[int], values: list[Any]) -> Warp:
        registers = list(self._registers.initial)
        special = [np.broadcast_to(np.asarray(number, np.uint32), LANES)
                   for number in (LANE + index * LANES, *place, *grid, LANE)]  # fmt: skip
        for at, value in zip(self._given, (*special, *values), strict=True):
            registers[at] = value
        return Warp(program, index, registers, self.kernel.registers)


def _decode(registers: Registers, instruction: Instruction) -> Run:
    name = instruction.name
    handler = HANDLERS.get(".".join(name[:2])) or HANDLERS.get(name[0])
    if handler is None:
        return _compute(registers, instruction)
    if instruction.guard is not None and handler not in HANDLERS.guarded:
        raise NotImplementedError(f"a guard: {instruction}")
    run = handler(registers, instruction)

    def traced(warp: Warp) -> None:
        warp.source = instruction.source
        run(warp)

    return traced


@HANDLERS.of("bar.warp", "griddepcontrol")
def _nothing(registers: Registers, instruction: Instruction) -> Run:
    """What only tells the compiler something, or concerns other launches."""
    return lambda warp: None


def _compute(registers: Registers, instruction: Instruction) -> Run:
    target, *operands = instruction.operands
    if instruction.name[0] == "mov" and (isinstance(target, tuple) or isinstance(operands[0], tuple)):
        return _repack(registers, instruction)
    function, result, kinds = arithmetic.function_of(instruction.name, len(operands))
    at, mask = registers.slot(target), registers.mask(instruction)
    sources = [registers.source(operand, kind) for operand, kind in zip(operands, kinds, strict=False)]
    views = [TYPES["b16" if kind == "bf16" else kind] for kind in kinds[: len(sources)]]
    kept, kind = unsigned(result), TYPES.get(result)

    def run(warp: Warp) -> None:
        registers = warp.registers
        value = function(*[seen_as(registers[k], view) for k, view in zip(sources, views, strict=True)])
        if kind is not None and value.dtype != kind:
            value = value.astype(kind)
        registers[at] = value.view(kept)

    if instruction.guard is None:
        return run

    def guarded(warp: Warp) -> None:
        before = warp.registers[at]
        run(warp)
        chosen = mask(warp)
        if not chosen.all():
            warp.registers[at] = np.where(chosen, warp.registers[at], before)

    return guarded


def _repack(registers: Registers, instruction: Instruction) -> Run:
    """Several registers into a wide one, or a wide one into several."""
    if instruction.guard is not None:
        raise NotImplementedError(f"a guard: {instruction}")
    target, source = instruction.operands
    kind = instruction.name[-1]
    if isinstance(target, tuple):
        part = np.dtype(f"u{int(kind[1:]) // 8 // len(target)}")
        at, places = registers.source(source, kind), [None if n == "_" else registers.slot(n) for n in target]

        def unpack(warp: Warp) -> None:
            parts = np.ascontiguousarray(warp.registers[at]).view(part).reshape(LANES, len(places))
            for k, place in enumerate(places):
                if place is not None:
                    warp.registers[place] = np.ascontiguousarray(parts[:, k])

        return unpack
    part_kind = f"b{int(kind[1:]) // len(source)}"
    at, places = registers.slot(target), [registers.source(n, part_kind) for n in source]

    def pack(warp: Warp) -> None:
        parts = np.stack([seen_as(warp.registers[place], unsigned(part_kind)) for place in places], 1)
        warp.registers[at] = parts.view(unsigned(kind)).reshape(LANES)

    return pack


@HANDLERS.of("bra", guarded=True)
def _bra(registers: Registers, instruction: Instruction) -> Run:
    (target,), mask = instruction.targets, registers.mask(instruction)

    def run(warp: Warp) -> None:
        taken = mask(warp)
        if taken.all():
            warp.at = target
        elif taken.any():
            raise NotImplementedError(f"lanes that part ways: {instruction}")

    return run


@HANDLERS.of("brx")
def _brx(registers: Registers, instruction: Instruction) -> Run:
    at, targets = registers.slot(instruction.operands[0]), instruction.targets

    def run(warp: Warp) -> None:
        warp.at = targets[one(warp.registers[at])]

    return run


@HANDLERS.of("ret")
def _ret(registers: Registers, instruction: Instruction) -> Run:
    def run(warp: Warp) -> None:
        if warp.products:
            raise BadAccess("a warp ends while tensor cores work for it")
        warp.done = True

    return run
