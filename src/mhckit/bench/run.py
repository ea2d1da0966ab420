"""The benchmark: which measurements there are, made one after the other, their lines written as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from .cases import CASES, COLD_CASE, DTYPE, HOST_CASE, OPERATORS, QUICK_CASES, RECIPE, Case
from .comparison import baselines_of, measure_baseline
from .compilation import compile_in_parallel, measure_cold_start, measure_recompilation
from .host import measure_host
from .junction import measure_junction
from .kernels import measure_kernels
from .results import Line, append_lines
from .sections import Section, chosen_sections
from .tables import tables
from .timing import copy_ceiling, environment

MILLISECONDS = 50
QUICK_MILLISECONDS = 20


class Plan(NamedTuple):
    """What measurements depend on: the shapes, milliseconds of repetition, and the ceiling in bytes per second."""

    cases: tuple[Case, ...]
    rep: int
    ceiling: float


class Measurement(NamedTuple):
    """Something to measure, and the calls it needs compiled."""

    label: str
    measure: Callable[[], list[dict[str, Any]]]
    compiles: tuple[tuple[str, Case], ...] = ()


def run_benchmark(
    *, only: Section | None, quick: bool, output: Path | None, commit: str, console: Console
) -> list[Line]:
    """Measure, append to ``output`` and print; a measurement that fails leaves a line of kind "refused"."""
    ceiling = copy_ceiling()
    plan = Plan(QUICK_CASES, QUICK_MILLISECONDS, ceiling) if quick else Plan(CASES, MILLISECONDS, ceiling)
    measurements = [each for section in chosen_sections(only, quick) for each in MEASUREMENTS[section](plan)]
    facts: Line = environment(commit) | {
        "recipe": RECIPE,
        "dtype": str(DTYPE).removeprefix("torch."),
        "copy_terabytes_per_second": round(ceiling * 1e-12, 3),
    }
    lines: list[Line] = []

    def keep(measured: list[dict[str, Any]]) -> None:
        new = [facts | line for line in measured]
        lines.extend(new)
        if output is not None:
            append_lines(output, new)

    keep([{"kind": "ceiling"}])
    with Progress(console=console) as progress:
        task = progress.add_task("compiling", total=len(measurements))
        compile_in_parallel(dict.fromkeys(call for each in measurements for call in each.compiles))
        for measurement in measurements:
            progress.update(task, description=measurement.label)
            keep(_attempt(measurement))
            progress.advance(task)
    for part in tables(lines):
        console.print(part)
    return lines


def _attempt(measurement: Measurement) -> list[dict[str, Any]]:
    """Its lines, or one that says why there are none: the next one is worth its time all the same."""
    try:
        return measurement.measure()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return [{"kind": "refused", "measurement": measurement.label, "reason": reason}]


def _kernels(plan: Plan) -> Iterator[Measurement]:
    for case in plan.cases:
        for operator in case.operators:
            measure = partial(measure_kernels, operator, case, plan.ceiling, plan.rep)
            yield Measurement(f"kernels of {operator}, {case}", measure, ((operator, case),))


def _junction(plan: Plan) -> Iterator[Measurement]:
    for case in plan.cases:
        measure = partial(measure_junction, case, plan.ceiling, plan.rep)
        yield Measurement(f"junction, {case}", measure, (("junction", case),))


def _baselines(plan: Plan) -> Iterator[Measurement]:
    for case in plan.cases:
        for baseline in baselines_of(case):
            yield Measurement(f"{baseline.name}, {case}", partial(measure_baseline, baseline, case, plan.rep))


def _host(_plan: Plan) -> Iterator[Measurement]:
    for operator in OPERATORS:
        measure = partial(measure_host, operator, HOST_CASE)
        yield Measurement(f"host time of {operator}", measure, ((operator, HOST_CASE),))


def _cold(plan: Plan) -> Iterator[Measurement]:
    case = plan.cases[0]
    yield Measurement("cold start", partial(measure_cold_start, COLD_CASE))
    yield Measurement("recompilation", partial(measure_recompilation, case), (("junction", case),))


MEASUREMENTS: dict[Section, Callable[[Plan], Iterator[Measurement]]] = {
    Section.KERNELS: _kernels,
    Section.JUNCTION: _junction,
    Section.BASELINES: _baselines,
    Section.HOST: _host,
    Section.COLD: _cold,
}
