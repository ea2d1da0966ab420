"""Measure every claim on the GPU at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from mhckit.bench.correctness import WrongResult
from mhckit.bench.results import append_lines
from mhckit.bench.timing import environment

from .cases import CASES
from .correctness import refuse_wrong
from .data import CLAIMS, Claim, Shape
from .measure import MEASURES, Machine, Trial, machine_at_hand
from .report import Result, table
from .warmup import compile_all, widths

WIDTH = 180


def run_claims(output: Path | None, commit: str) -> None:
    """Print each claim beside what is measured here, and append a JSON line per claim and shape to ``output``."""
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        compiling = progress.add_task("compiling", total=len(widths()))
        compile_all(lambda: progress.advance(compiling))
        measuring = progress.add_task("measuring", total=sum(len(claim.shapes) for claim in CLAIMS))
        machine = machine_at_hand()
        facts = environment(commit) | {"copy_terabytes_per_second": round(machine.ceiling * 1e-12, 3)}
        results = []
        for result in _measured(machine):
            results.append(result)
            if output is not None:
                append_lines(output, [facts | result.line()])
            progress.advance(measuring)
    Console(width=WIDTH).print(facts, table(results))


def _measured(machine: Machine) -> Iterator[Result]:
    for claim in CLAIMS:
        for shape in claim.shapes:
            yield measure(claim, shape, machine)


def measure(claim: Claim, shape: Shape, machine: Machine) -> Result:
    """A wrong result is refused; whatever else goes wrong is reported in its place and does not stop the others."""
    try:
        refuse_wrong(CASES[claim.case], shape.channels)
        return Result(claim, shape, MEASURES[claim.quantity](Trial.of(claim, shape, machine)))
    except WrongResult as error:
        return Result(claim, shape, None, f"wrong result: {error}")
    except Exception as error:
        return Result(claim, shape, None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
