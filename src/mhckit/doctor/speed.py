"""Two seconds on the GPU: how fast it copies, and how close to that a junction comes, beside the committed result.

Shares of the copy are compared, not times: a GPU of the same name may have slower memory, or other work to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from mhckit.bench.budgets import beside_floor, junction_bytes
from mhckit.bench.step import Step, mhckit_outputs

from .committed import CASE, committed_speed
from .findings import Finding
from .gpu import Gpu
from .triton_here import is_interpreted

SLOWER = 0.1
MILLISECONDS = 500


class Measured(NamedTuple):
    """The copy; a junction, forward and backward; and what its bytes take at the copy's speed, as a part of that."""

    terabytes_per_second: float
    microseconds: float
    of_ceiling: float


def speed_findings(gpu: Gpu | None, junction: Finding | None) -> Iterator[Finding]:
    """``junction`` is what the self-test found: nothing is timed that is not right."""
    reason = _why_not(gpu, junction)
    if gpu is None or reason:
        yield Finding("copy", "skipped", reason)
        yield Finding("speed", "skipped", reason)
        return
    measured, committed = measure(), committed_speed(gpu.name)
    yield copy_finding(measured, committed)
    yield junction_finding(gpu.name, measured, committed)


def _why_not(gpu: Gpu | None, junction: Finding | None) -> str:
    if gpu is None:
        return "there is no GPU"
    if not gpu.has_room:
        return "too little memory is free"
    if is_interpreted():
        return "kernels are interpreted"
    if junction is None or junction.status != "ok":
        return "the self-test of junction did not pass"
    return ""


def measure() -> Measured:
    from mhckit.bench.timing import copy_ceiling, graph_microseconds  # needs Triton

    ceiling = copy_ceiling()
    call = CASE.call("junction")
    microseconds = graph_microseconds(lambda: Step(mhckit_outputs, call).directions()["both"], MILLISECONDS)
    of_ceiling = beside_floor(microseconds, junction_bytes("both", CASE), ceiling)["of_ceiling"]
    return Measured(ceiling * 1e-12, microseconds, of_ceiling)


def copy_finding(measured: Measured, committed: dict[str, Any] | None) -> Finding:
    seen = f"{measured.terabytes_per_second:.2f} TB/s"
    values = {"terabytes_per_second": measured.terabytes_per_second}
    if committed is None:
        return Finding("copy", "ok", seen, values=values)
    before = committed["copy_terabytes_per_second"]
    seen = f"{seen}, committed {before:.2f}"
    if before / measured.terabytes_per_second > 1 + SLOWER:
        advice = "see in nvidia-smi who else uses the GPU, and its clocks, power limit and MIG"
        return Finding("copy", "warning", seen, advice, values)
    return Finding("copy", "ok", seen, values=values)


def junction_finding(gpu: str, measured: Measured, committed: dict[str, Any] | None) -> Finding:
    """Failed if it takes more than a tenth longer, beside the copy, than the committed result."""
    values = {"microseconds": measured.microseconds, "of_ceiling": measured.of_ceiling, "committed": committed}
    seen = f"junction {CASE}: {measured.microseconds:.0f} us, {measured.of_ceiling:.1%} of the copy"
    if committed is None:
        advice = "`mhckit bench --output FILE` measures more: its lines are welcome in benchmarks/results"
        return Finding("speed", "skipped", f"{seen}; no committed result for {gpu}", advice, values)
    seen = f"{seen}; committed {committed['of_ceiling']:.1%} at {committed['commit']}"
    if committed["of_ceiling"] / measured.of_ceiling > 1 + SLOWER:
        advice = "see that nothing else uses the GPU, and try again; MHCKIT_AUTOTUNE=1 searches for launch parameters"
        return Finding("speed", "failed", seen, advice, values)
    return Finding("speed", "ok", seen, values=values)
