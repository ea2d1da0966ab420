"""Where instructions find what they take: registers, and places for numbers beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import Lanes, unsigned
from .memory import SHARED_BASE
from .program import LANES, Warp
from .ptx import Address, Instruction, Operand

Run = Callable[[Warp], None]
LANE = np.arange(LANES, dtype=np.uint32)
_DECLARED = {"%p": "pred", "%rs": "b16", "%r": "b32", "%rd": "b64"}


class Registers:
    """A kernel's registers as one list, in which numbers have places, too; what a warp begins with is `initial`."""

    def __init__(self) -> None:
        self.initial: list[Any] = []
        self._slots: dict[Any, int] = {}

    def slot(self, key: Any, value: Any = None) -> int:
        if key not in self._slots:
            self._slots[key] = len(self.initial)
            self.initial.append(value)
        return self._slots[key]

    def source(self, operand: Operand, kind: str) -> int:
        """Where an operand is read: a register, or a place that holds a number, as it lies in a register."""
        assert isinstance(operand, str), operand
        if operand == "global_smem":
            return self.number(SHARED_BASE, kind)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return self.number(int(operand[2:], 16), "b32")
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return self.number(int(operand.rstrip("U"), 0), kind)
        return self.slot(operand)

    def number(self, value: int, kind: str) -> int:
        dtype = np.dtype(unsigned(kind))
        lanes = np.full(LANES, value % (1 << 8 * dtype.itemsize) if dtype != np.bool_ else bool(value), dtype)
        return self.slot((value, dtype), lanes)

    def mask(self, instruction: Instruction) -> Callable[[Warp], Any]:
        """Which lanes take part."""
        if instruction.guard is None:
            return lambda warp: np.ones(LANES, np.bool_)
        at, negated = self.slot(instruction.guard), instruction.negated
        return lambda warp: ~warp.registers[at] if negated else warp.registers[at]

    def addresses(self, address: Address) -> Callable[[Warp], Lanes]:
        at, offset = self.source(address.base, "b32"), address.offset
        return lambda warp: warp.registers[at].astype(np.int64) + offset


# What makes an instruction a function of a warp.
Handler = Callable[[Registers, Instruction], Run]


class Handlers(dict[str, Handler]):
    """Of instructions that are more than arithmetic, by the beginning of their names; `guarded` are those that mind a
    guard.
    """

    def __init__(self, *others: Handlers) -> None:
        super().__init__()
        self.guarded: set[Handler] = set()
        for other in others:
            self.update(other)
            self.guarded |= other.guarded

    def of(self, *names: str, guarded: bool = False) -> Callable[[Handler], Handler]:
        def remember(handler: Handler) -> Handler:
            self.update(dict.fromkeys(names, handler))
            self.guarded |= {handler} if guarded else set()
            return handler

        return remember


def seen_as(lanes: Lanes, kind: Any) -> Lanes:
    """A register as a type of its width, or, where instructions are careless, the lower part of it."""
    if lanes.dtype == kind:
        return lanes
    if lanes.dtype.itemsize != np.dtype(kind).itemsize:
        return lanes.astype(f"u{np.dtype(kind).itemsize}").view(kind)
    return lanes.view(kind)


def declared(name: str) -> str:
    prefix = re.match(r"%[a-z]+", name)
    return _DECLARED[prefix[0]] if prefix else "b32"


def one(lanes: Lanes) -> int:
    """What all lanes have."""
    if (lanes != lanes[0]).any():
        raise NotImplementedError("lanes that do not agree")
    return int(lanes[0])
