"""One program of a launch: its warps, whose turn it is, and the barriers they wait at."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .hazards import Hazards, Heard, Torn
from .memory import SHARED_BASE, BadAccess, DeviceMemory, SharedMemory

LANES = 32
# Instructions of a turn, at most.
_TURN = 300
# Of a multiprocessor, for all threads.
_REGISTERS = 64 << 10


class Hangs(Exception):
    """No warp can go on."""


@dataclass
class _Barrier:
    """In shared memory: a phase ends when all who are awaited have arrived, and all bytes that were announced."""

    count: int
    heard: Heard  # of those who have arrived
    ended: Heard  # of phases that are over
    missing: int = 0
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.missing = self.count


@dataclass
class _Meeting:
    """A barrier of warps, which they pass together."""

    heard: Heard
    here: set[int] = field(default_factory=set)
    times: int = 0


class Warp:
    def __init__(self, program: Program, index: int, registers: Sequence[Any], setting: int) -> None:
        self.program = program
        self.index = index
        self.registers: list[Any] = list(registers)
        self.at = 0
        self.done = False
        self.waits: Callable[[], bool] | None = None  # until this is so
        self.source = ""
        self.setting = setting  # registers for each thread
        # What the copy engine, the tensor cores and copies have been given together, and how far those were.
        self.groups: dict[int, list[Heard]] = {}
        self.products: dict[int, tuple[int | None, Any]] = {}  # sums that tensor cores work on, by register
        self.factors: dict[int, tuple[int | None, Any]] = {}  # what they read in registers
        self.may_multiply = False


class Program:
    def __init__(
        self, warps: int, shared_bytes: int, device: DeviceMemory, descriptions: dict[int, Any], number: int,
        known: Torn,
    ) -> None:  # fmt: skip
        """number: which one of the grid's it is. known: what was torn when it ran before (`hazards`)."""
        self.hazards = Hazards(warps, SHARED_BASE + shared_bytes, known)
        self.shared = SharedMemory(shared_bytes, self.hazards)
        self.device = device
        self.descriptions = descriptions
        self.count = warps
        self.warps: list[Warp] = []
        self._number = number
        self._barriers: dict[int, _Barrier] = {}
        self._meetings: dict[int, _Meeting] = {}

    def run(self, code: Sequence[Callable[[Warp], None]], seed: int) -> None:
        """Until all warps are done; whose turn it is, and for how long, is drawn by lot."""
        lot, waiting = random.Random(seed), list(self.warps)
        while waiting:
            able = [warp for warp in waiting if warp.waits is None or warp.waits()]
            if not able:
                where = ", ".join(f"warp {warp.index} at {warp.source}" for warp in waiting)
                raise Hangs(f"nobody can go on: {where}")
            warp = lot.choice(able)
            warp.waits = None
            for _ in range(lot.randint(1, _TURN)):
                at = warp.at
                warp.at = at + 1
                code[at](warp)
                if warp.done or warp.waits is not None:
                    break
            if warp.done:
                waiting.remove(warp)

    def author(self, warp: Warp) -> int:
        """Who stores to the device's memory."""
        return 1 + self._number * self.count + warp.index

    def meet(self, warp: Warp, number: int, count: int | None) -> None:
        """Waits until so many warps are at a barrier, or all of them."""
        meeting = self._meetings.setdefault(number, _Meeting(self.hazards.nothing()))
        if warp.index in meeting.here:
            raise BadAccess("a warp is at a barrier twice")
        times = meeting.times
        meeting.here.add(warp.index)
        _join(meeting.heard, self.hazards.tell(warp.index))
        if len(meeting.here) == (count or self.count):
            for index in meeting.here:
                self.hazards.hear(index, meeting.heard)
            self._meetings[number] = _Meeting(self.hazards.nothing(), times=times + 1)
        else:
            warp.waits = lambda: self._meetings[number].times > times

    def set_registers(self, warp: Warp, count: int) -> None:
        """For each thread of a warp from now on, of those that the multiprocessor has left."""

        def fits() -> bool:
            others = sum(other.setting for other in self.warps if other is not warp)
            if (others + count) * LANES > _REGISTERS:
                return False
            warp.setting = count
            return True

        if not fits():
            warp.waits = fits

    def begin_barrier(self, warp: Warp, at: int, count: int) -> None:
        if at % 8:
            raise BadAccess("a barrier that is not aligned")
        self.hazards.access(warp.index, self._grains(at), True, warp.source, barrier=True)
        self.hazards.set_barrier(at, True)
        self._barriers[at] = _Barrier(count, self.hazards.nothing(), self.hazards.nothing())

    def end_barrier(self, warp: Warp, at: int) -> None:
        self._barrier(warp, at)
        self.hazards.access(warp.index, self._grains(at), True, warp.source, barrier=True)
        del self._barriers[at]
        self.hazards.set_barrier(at, False)

    def announce(self, warp: Warp, at: int, count: int) -> None:
        self._barrier(warp, at).bytes += count

    def arrive(self, warp: Warp, at: int, agent: int, *, count: int = 1, arrived_bytes: int = 0) -> None:
        """Of threads or of bytes; passes on what the agent has heard."""
        barrier = self._barrier(warp, at, agent)
        barrier.missing -= count
        barrier.bytes -= arrived_bytes
        if barrier.missing < 0:
            raise BadAccess(f"more have arrived at a barrier than it waits for, at {warp.source}")
        _join(barrier.heard, self.hazards.tell(agent))
        if not barrier.missing and not barrier.bytes:
            barrier.phase += 1
            barrier.missing = barrier.count
            _join(barrier.ended, barrier.heard)

    def wait(self, warp: Warp, at: int, parity: int) -> None:
        """Until the phase of this parity has ended."""
        barrier = self._barrier(warp, at)

        def ended() -> bool:
            if barrier.phase % 2 == parity:
                return False
            self.hazards.hear(warp.index, barrier.ended)
            return True

        if not ended():
            warp.waits = ended

    def commit(self, warp: Warp, kind: int) -> None:
        agent = self.hazards.agent(warp.index, kind)
        warp.groups.setdefault(kind, []).append(self.hazards.tell(agent))

    def wait_group(self, warp: Warp, kind: int, remaining: int) -> None:
        """Everything but the last groups is over."""
        groups = warp.groups.setdefault(kind, [])
        for heard in groups[: max(0, len(groups) - remaining)]:
            self.hazards.hear(warp.index, heard)

    def _barrier(self, warp: Warp, at: int, agent: int | None = None) -> _Barrier:
        """For a warp, or what works for it."""
        if at not in self._barriers:
            raise BadAccess(f"no barrier at {at}, {warp.source}")
        self.hazards.access(warp.index if agent is None else agent, self._grains(at), False, warp.source, barrier=True)
        return self._barriers[at]

    def _grains(self, at: int) -> Any:
        return np.arange(at // 2, at // 2 + 4)


def _join(heard: Heard, more: Heard) -> None:
    np.maximum(heard.clocks, more.clocks, out=heard.clocks)
    np.maximum(heard.fenced, more.fenced, out=heard.fenced)
