"""Who may have seen what: accesses to shared memory that nothing orders.

A program has agents: its warps, and for each warp what works for it beside it, its asynchronous copies, the copy engine
and the tensor cores. Every agent has a clock, and keeps how far it has heard of the others': a barrier takes what those
have heard who arrive, and gives it to those who wait. An access is ordered behind an earlier one if who makes it has
heard of the clock at which that was made. The copy engine and the tensor cores read by another way than warps do: what
a warp stored they see only behind a fence, by that warp or by one that has heard of it. (Of a warp's asynchronous
copies Triton asks for none.)

What the tensor cores read may be of rows whose product nobody uses. So it is no hazard by itself if nothing orders it,
or it lacks a fence: it is noted as torn, and the program is run again, with NaN there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

WARP, COPIES, ENGINE, TENSOR_CORES = range(4)  # a warp itself, and what works for it
_NAMES = ("warp {}", "an asynchronous copy of warp {}", "the copy engine, for warp {}", "the tensor cores, for warp {}")
GRAIN = 2  # bytes


class Hazard(Exception):
    """Two accesses that nothing orders, one of them a store."""


# By agent and its clock, pieces of shared memory that it read then.
Torn = dict[tuple[int, int], set[int]]


class Heard(NamedTuple):
    """What a barrier passes on: how far each agent was, and how far what it stored was fenced."""

    clocks: Any
    fenced: Any


class Hazards:
    def __init__(self, warps: int, shared_bytes: int, known: Torn) -> None:
        """known: what was torn when the program ran before."""
        agents, grains = 4 * warps, -(-shared_bytes // GRAIN)
        self.warps = warps
        self.torn: Torn = {}
        self._known = known
        self.clocks = np.zeros((agents, agents), np.int32)
        self.fenced = np.zeros((agents, agents), np.int32)
        np.fill_diagonal(self.clocks, 1)
        self._writer = np.zeros(grains, np.int16)
        self._written = np.zeros(grains, np.int32)
        self._wrote_at = np.zeros(grains, np.int32)
        self._read = np.zeros((agents, grains), np.int32)
        self._barriers = np.zeros(grains, np.bool_)
        self._sources: list[str] = [""]
        # What tensor cores have read, by agent: when, and which pieces.
        self._reads: dict[int, list[tuple[int, Any]]] = {}

    def nothing(self) -> Heard:
        return Heard(np.zeros_like(self.clocks[0]), np.zeros_like(self.clocks[0]))

    def agent(self, warp: int, kind: int) -> int:
        return kind * self.warps + warp

    def begin(self, warp: int, kind: int) -> int:
        """An agent that works for a warp begins something."""
        agent = self.agent(warp, kind)
        np.maximum(self.clocks[agent], self.clocks[warp], out=self.clocks[agent])
        np.maximum(self.fenced[agent], self.fenced[warp], out=self.fenced[agent])
        self.clocks[agent, agent] += 1
        return agent

    def tell(self, agent: int) -> Heard:
        """What an agent passes on; what it does from now on is later."""
        heard = Heard(self.clocks[agent].copy(), self.fenced[agent].copy())
        self.clocks[agent, agent] += 1
        return heard

    def hear(self, agent: int, heard: Heard) -> None:
        np.maximum(self.clocks[agent], heard.clocks, out=self.clocks[agent])
        np.maximum(self.fenced[agent], heard.fenced, out=self.fenced[agent])

    def fence(self, warp: int) -> None:
        """All that a warp has heard of, what it stored itself among it, can be read by any way from now on."""
        np.maximum(self.fenced[warp], self.clocks[warp], out=self.fenced[warp])
        self.clocks[warp, warp] += 1

    def set_barrier(self, at: int, exists: bool) -> None:
        self._barriers[at // GRAIN : at // GRAIN + 4] = exists

    def access(self, agent: int, grains: Any, stores: bool, source: str, *, barrier: bool = False) -> None:
        """Of these pieces of shared memory, of GRAIN bytes each; of stores those that change what is there: warps that
        have the same value may all store it.
        """
        clocks = self.clocks[agent]
        if not barrier and self._barriers[grains].any():
            raise Hazard(f"{self._name(agent)} at {source} where a barrier lies")
        writer, written = self._writer[grains], self._written[grains]
        late = written > clocks[writer]
        if agent >= 2 * self.warps:
            late |= (writer < self.warps) & (written > self.fenced[agent, writer])
        if late.any():
            if agent < 3 * self.warps:
                self._fail(agent, stores, source, grains[late][0])
            self._note(agent, clocks[agent], grains[late])
        if stores:
            for reader in np.flatnonzero((self._read[:, grains] > clocks[:, None]).any(1)):
                if reader < 3 * self.warps:
                    raise Hazard(
                        f"{self._name(agent)} stores at {source} over what {self._name(reader)} may still have to read"
                    )
                self._tear(int(reader), int(clocks[reader]), grains)
            self._writer[grains] = agent
            self._written[grains] = clocks[agent]
            self._wrote_at[grains] = self._number(source)
        else:
            self._read[agent, grains] = clocks[agent]
            if agent >= 3 * self.warps:
                self._reads.setdefault(agent, []).append((int(clocks[agent]), grains))

    def _tear(self, reader: int, heard: int, grains: Any) -> None:
        """What tensor cores read of these, later than who stores there has heard of them."""
        for clock, read in reversed(self._reads[reader]):
            if clock <= heard:
                return
            self._note(reader, clock, np.intersect1d(read, grains))

    def torn_before(self, agent: int, grains: Any) -> Any:
        """Which of these, that an agent reads now, were torn when the program ran before."""
        known = self._known.get((agent, int(self.clocks[agent, agent])))
        return np.isin(grains, list(known)) if known else np.zeros(len(grains), np.bool_)

    def _note(self, agent: int, clock: int, grains: Any) -> None:
        if len(grains):
            self.torn.setdefault((agent, int(clock)), set()).update(int(grain) for grain in grains)

    def _fail(self, agent: int, stores: bool, source: str, grain: int) -> None:
        writer = int(self._writer[grain])
        unfenced = self._written[grain] <= self.clocks[agent, writer]
        what = "stores over" if stores else "reads"
        how = "without a fence" if unfenced else "and nothing orders the two"
        raise Hazard(
            f"{self._name(agent)} at {source} {what} what {self._name(writer)} stored at "
            f"{self._sources[self._wrote_at[grain]]}, {how}"
        )

    def _name(self, agent: int) -> str:
        kind, warp = divmod(agent, self.warps)
        return _NAMES[kind].format(warp)

    def _number(self, source: str) -> int:
        if self._sources[-1] != source:
            self._sources.append(source)
        return len(self._sources) - 1
