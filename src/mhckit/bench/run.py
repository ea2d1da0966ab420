"""The benchmark: which measurements there are, made one after the other, their lines written as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from .cases import (
    CASES,
    COLD_CASE,
    DECODE_CASES,
    DECODE_RECIPES,
    DTYPE,
    HOST_CASE,
    OPERATORS,
    QUICK_CASES,
    QUICK_DECODE_CASES,
    RECIPE,
    RECIPE_CASES,
    Case,
    compared_recipes,
)
from .comparison import baselines_of, measure_baseline
from .compilation import Preparation, compile_in_parallel, measure_cold_start, measure_recompilation, preparation
from .decode import compile_kernels, compile_reference, measure_decode
from .host import measure_host
from .junction import measure_junction
from .kernels import measure_kernels
from .recipes import measure_recipes
from .results import Line, append_lines, refusal
from .sections import Section, chosen_sections
from .tables import tables
from .timing import copy_ceiling, environment

MILLISECONDS = 50
QUICK_MILLISECONDS = 20


class Plan(NamedTuple):
    """What measurements depend on: the ceiling in bytes per second, milliseconds of repetition, and the shapes."""

    ceiling: float
    rep: int = MILLISECONDS
    cases: tuple[Case, ...] = CASES
    recipe_cases: tuple[Case, ...] = RECIPE_CASES
    decode_cases: tuple[Case, ...] = DECODE_CASES

    @classmethod
    def quick(cls, ceiling: float) -> Plan:
        return cls(ceiling, QUICK_MILLISECONDS, QUICK_CASES, RECIPE_CASES[:1], QUICK_DECODE_CASES)


class Measurement(NamedTuple):
    """Something to measure, and what is to be compiled before."""

    label: str
    measure: Callable[[], list[dict[str, Any]]]
    compiles: tuple[Preparation, ...] = ()


def run_benchmark(
    *, only: Section | None, quick: bool, output: Path | None, commit: str, console: Console
) -> list[Line]:
    """Measure, append to ``output`` and print; a measurement that fails leaves a line of kind "refused"."""
    ceiling = copy_ceiling()
    plan = Plan.quick(ceiling) if quick else Plan(ceiling)
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
        compile_in_parallel(each for measurement in measurements for each in measurement.compiles)
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
        return [refusal(measurement.label, error)]


def _kernels(plan: Plan) -> Iterator[Measurement]:
    for case in plan.cases:
        for operator in case.operators:
            measure = partial(measure_kernels, operator, case, plan.ceiling, plan.rep)
            yield Measurement(f"kernels of {operator}, {case}", measure, (preparation(operator, case),))


def _junction(plan: Plan) -> Iterator[Measurement]:
    for case in plan.cases:
        measure = partial(measure_junction, case, plan.ceiling, plan.rep)
        yield Measurement(f"junction, {case}", measure, (preparation("junction", case),))


def _recipes(plan: Plan) -> Iterator[Measurement]:
    for case in plan.recipe_cases:
        compiles = tuple(preparation("junction", case, recipe) for recipe in compared_recipes().values())
        yield Measurement(f"recipes, {case}", partial(measure_recipes, case, plan.ceiling, plan.rep), compiles)


def _decode(plan: Plan) -> Iterator[Measurement]:
    for recipe in DECODE_RECIPES:
        for case in plan.decode_cases:
            compiles = [Preparation(compile_kernels, (recipe, case.channels))]
            if case.compiled:
                compiles.append(Preparation(compile_reference, (recipe, case)))
            measure = partial(measure_decode, recipe, case, plan.rep)
            yield Measurement(f"decode, {recipe}, {case}", measure, tuple(compiles))


def _baselines(plan: Plan) -> Iterator[Measurement]:
    for case in plan.cases:
        for baseline in baselines_of(case):
            yield Measurement(f"{baseline.name}, {case}", partial(measure_baseline, baseline, case, plan.rep))


def _host(_plan: Plan) -> Iterator[Measurement]:
    for operator in OPERATORS:
        measure = partial(measure_host, operator, HOST_CASE)
        yield Measurement(f"host time of {operator}", measure, (preparation(operator, HOST_CASE),))


def _cold(plan: Plan) -> Iterator[Measurement]:
    case = plan.cases[0]
    yield Measurement("cold start", partial(measure_cold_start, COLD_CASE))
    yield Measurement("recompilation", partial(measure_recompilation, case), (preparation("junction", case),))


MEASUREMENTS: dict[Section, Callable[[Plan], Iterator[Measurement]]] = {
    Section.KERNELS: _kernels,
    Section.JUNCTION: _junction,
    Section.RECIPES: _recipes,
    Section.DECODE: _decode,
    Section.BASELINES: _baselines,
    Section.HOST: _host,
    Section.COLD: _cold,
}
