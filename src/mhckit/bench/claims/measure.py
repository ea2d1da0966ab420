"""How each quantity of a claim is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mhckit.bench.timing import copy_ceiling, peak_extra_bytes

from .cases import CASES, Case, Compute
from .data import Claim, Passes, Quantity, Shape
from .passes import Run, gpu_microseconds, launched_microseconds


class Machine(NamedTuple):
    """Bandwidths in bytes per second; the nominal one is None where torch does not know it."""

    ceiling: float
    nominal: float | None


@dataclass(frozen=True)
class Measured:
    """A figure, and what it needs to be understood.

    Attributes:
        value: in the unit of the claim.
        beside: the same figure on another basis; ``BESIDE`` says which.
        possible: what the bytes that must move allow at the copy ceiling: nobody can do better on this machine.
        facts: what it was computed from.
    """

    value: float
    beside: float | None = None
    possible: float | None = None
    facts: dict[str, float] = field(default_factory=dict)


# Name and wording of the second basis.
BESIDE: dict[Quantity, tuple[str, str]] = {
    "speedup": ("by_gpu_time", "x by GPU time (CUDA graph)"),
    "of the bound": ("of_nominal_bandwidth", "% of nominal bandwidth"),
}


@dataclass(frozen=True)
class Trial:
    """One claim at one shape."""

    case: Case
    passes: Passes
    shape: Shape
    machine: Machine

    @classmethod
    def of(cls, claim: Claim, shape: Shape, machine: Machine) -> Trial:
        return cls(CASES[claim.case], claim.passes, shape, machine)

    def run(self, compute: Compute) -> Run:
        return Run(compute, self.case.tensors(self.shape, "cuda"), self.passes)

    def gpu_microseconds(self, compute: Compute) -> float:
        return gpu_microseconds(compute, self.case.tensors(self.shape, "cuda"), self.passes)


def machine_at_hand() -> Machine:
    properties = torch.cuda.get_device_properties(0)
    kilohertz, bits = (getattr(properties, name, None) for name in ("memory_clock_rate", "memory_bus_width"))
    nominal = 2e3 * kilohertz * bits / 8 if kilohertz and bits else None  # two transfers per clock
    return Machine(copy_ceiling(), nominal)


def speedup(trial: Trial) -> Measured:
    ours, naive = trial.case.ours, trial.case.naive
    run = trial.run(ours)
    least = run.minimum_bytes / trial.machine.ceiling * 1e6
    ours_us, naive_us = launched_microseconds(run), launched_microseconds(trial.run(naive))
    del run
    ours_gpu, naive_gpu = trial.gpu_microseconds(ours), trial.gpu_microseconds(naive)
    facts = {
        "ours_microseconds": ours_us,
        "naive_microseconds": naive_us,
        "ours_gpu_microseconds": ours_gpu,
        "naive_gpu_microseconds": naive_gpu,
        "bound_microseconds": least,
    }
    return Measured(naive_us / ours_us, beside=naive_gpu / ours_gpu, possible=naive_us / least, facts=facts)


def memory_saved(trial: Trial) -> Measured:
    """Percent of the peak, inputs and incoming gradients included."""
    ours, naive = (sum(_memory(trial.run(compute))) for compute in (trial.case.ours, trial.case.naive))
    return Measured(100 * (1 - ours / naive), facts={"ours_bytes": ours, "naive_bytes": naive})


def memory_ratio(trial: Trial) -> Measured:
    """How often our memory beyond inputs and incoming gradients fits into that of the naive computation."""
    ours, naive = (_memory(trial.run(compute)).extra for compute in (trial.case.ours, trial.case.naive))
    return Measured(naive / ours, facts={"ours_extra_bytes": ours, "naive_extra_bytes": naive})


class _Memory(NamedTuple):
    """Bytes before a call, and at its peak beyond them."""

    held: int
    extra: int


def _memory(run: Run) -> _Memory:
    run()
    return _Memory(run.held_bytes, peak_extra_bytes(run))


def of_the_bound(trial: Trial) -> Measured:
    """Percent of the time that the bytes take at the copy ceiling, by GPU time."""
    moved = trial.run(trial.case.ours).minimum_bytes
    gpu_us = trial.gpu_microseconds(trial.case.ours)

    def percent(bandwidth: float) -> float:
        return 100 * moved / bandwidth / (gpu_us * 1e-6)

    nominal = trial.machine.nominal
    facts = {"ours_gpu_microseconds": gpu_us, "bytes": moved}
    return Measured(percent(trial.machine.ceiling), beside=percent(nominal) if nominal else None, facts=facts)


def microseconds(trial: Trial) -> Measured:
    return Measured(trial.gpu_microseconds(trial.case.ours))


MEASURES: dict[Quantity, Callable[[Trial], Measured]] = {
    "speedup": speedup,
    "memory saved": memory_saved,
    "memory ratio": memory_ratio,
    "of the bound": of_the_bound,
    "microseconds": microseconds,
}
