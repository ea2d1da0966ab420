"""`mhckit bench`: measurements, and what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mhckit.bench.sections import Section

from .errors import need_a_gpu
from .root import app, examples
from .screen import screen

bench = typer.Typer()
app.add_typer(bench, name="bench", short_help="Time the kernels beside what this GPU can copy.")

_RESULTS = Path("benchmarks/results/junction.jsonl")
_COMMITTED = Path("src/mhckit/doctor/committed.json")
_STEPS = Path("benchmarks/results/training.jsonl")
_WIDTH_OF_TABLES = 140


@bench.callback(
    invoke_without_command=True,
    epilog=examples(
        "mhckit bench --quick",
        "mhckit bench --only junction --output results.jsonl",
        "mhckit bench --only decode",
        "mhckit bench --claims",
    ),
)
def run(
    context: typer.Context,
    output: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
    commit: Annotated[str, typer.Option(help="The commit that is measured.")] = "unknown",
    quick: Annotated[bool, typer.Option("--quick", help="One shape, fewer repetitions, fewer parts.")] = False,
    only: Annotated[Section | None, typer.Option(help="Measure one part.")] = None,
    claims: Annotated[bool, typer.Option("--claims", help="Measure what other projects claim instead.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write a page of what was measured here: an .html file.")] = None,
) -> None:
    """Time kernels, the sublayer with every kind of recipe, inference, and others. Needs a CUDA GPU."""
    if context.invoked_subcommand is not None:
        return
    if claims and report is not None:
        raise typer.BadParameter("--report shows what mhckit measures of itself: take it or --claims")
    need_a_gpu("mhckit bench")
    if claims:
        from mhckit.bench.claims import run_claims

        run_claims(output, commit)
        return
    from mhckit.bench.run import run_benchmark

    console = screen(_WIDTH_OF_TABLES)
    lines = run_benchmark(only=only, quick=quick, output=output, commit=commit, console=console)
    if report is not None:
        from mhckit.bench.report import write_report

        print(write_report(lines, report))
    if any(line["kind"] == "refused" for line in lines):
        raise SystemExit(1)


@bench.command(epilog=examples("mhckit bench model --hidden 4096 --layers 4"))
def model(
    hidden: Annotated[int, typer.Option(help="Width of the model, a multiple of 128.", min=128)] = 4096,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    batch: Annotated[int, typer.Option(min=1)] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens per sequence.", min=1)] = 4096,
    output: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
    commit: Annotated[str, typer.Option(help="The commit that is measured.")] = "unknown",
) -> None:
    """Time a random DeepSeek-V4 of transformers, with its own connections and with mhckit's. Needs a CUDA GPU."""
    need_a_gpu("mhckit bench")
    from mhckit.bench.whole_model import run_whole_model

    console = screen(_WIDTH_OF_TABLES)
    lines = run_whole_model(hidden, layers, batch, tokens, output, commit, console)
    if any(line["kind"] == "refused" for line in lines):
        raise SystemExit(1)


@bench.command(epilog=examples("mhckit bench training --case 1b --output training.jsonl"))
def training(
    case: Annotated[str | None, typer.Option(help="Measure one case alone: 1b, or C 4096.")] = None,
    output: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
    commit: Annotated[str, typer.Option(help="The commit that is measured.")] = "unknown",
) -> None:
    """Time a training step with the plain residual, with mhckit and with plain PyTorch's mHC. Needs a CUDA GPU."""
    need_a_gpu("mhckit bench")
    from mhckit.bench.training import CASES, run_training

    cases = tuple(each for each in CASES if case in (None, each.name))
    if not cases:
        raise SystemExit(f"--case must be one of {', '.join(each.name for each in CASES)}, got {case!r}")
    lines = run_training(output, commit, screen(_WIDTH_OF_TABLES), cases)
    if any(line["kind"] == "refused" for line in lines):
        raise SystemExit(1)


@bench.command(epilog=examples("mhckit bench plot results.jsonl --folder pictures"))
def plot(
    results: Annotated[Path, typer.Argument(help="JSON lines that `mhckit bench` wrote.")] = _RESULTS,
    folder: Annotated[Path, typer.Option(help="Where the pictures go.")] = _RESULTS.parent,
) -> None:
    """Bars of the percentage of the ceiling, the speedup over others, recipes and inference. Needs matplotlib."""
    from mhckit.bench.plots import write_plots
    from mhckit.bench.results import read_lines

    for path in write_plots(read_lines(results), folder):
        print(path)


@bench.command(epilog=examples("mhckit bench report results.jsonl --output report.html"))
def report(
    results: Annotated[Path, typer.Argument(help="JSON lines that `mhckit bench` wrote.")] = _RESULTS,
    output: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
) -> None:
    """Write a page of results that were measured before: speed beside the ceiling, speedup per shape. Needs no GPU."""
    from mhckit.bench.report import write_report
    from mhckit.bench.results import read_lines

    print(write_report(read_lines(results), output))


@bench.command(epilog=examples("mhckit bench readme --results benchmarks/results/junction.jsonl"))
def readme(
    results: Annotated[Path, typer.Option(help="JSON lines that `mhckit bench` wrote.")] = _RESULTS,
    path: Annotated[Path, typer.Option(help="The file with the block of results.")] = Path("README.md"),
    page: Annotated[Path, typer.Option(help="The file with the block of a trace.")] = Path("docs/performance.md"),
    steps: Annotated[Path, typer.Option(help="JSON lines that `mhckit bench training` wrote.")] = _STEPS,
    costs: Annotated[Path, typer.Option(help="The file with the block of costs.")] = Path("docs/training.md"),
) -> None:
    """Write the results in the README and in docs/ anew from the committed measurements."""
    from mhckit.bench.readme import with_costs, with_results, with_trace
    from mhckit.bench.results import read_lines

    for measured in (results, steps):
        read_lines(measured)  # raises before anything is written
    path.write_text(with_results(path.read_text(), results))
    page.write_text(with_trace(page.read_text(), results))
    costs.write_text(with_costs(costs.read_text(), steps))


@bench.command(epilog=examples("mhckit bench committed --results benchmarks/results/junction.jsonl"))
def committed(
    results: Annotated[Path, typer.Option(help="JSON lines that `mhckit bench` wrote.")] = _RESULTS,
    path: Annotated[Path, typer.Option(help="The package's file of speeds.")] = _COMMITTED,
) -> None:
    """Write the speeds that `mhckit doctor` compares with anew from the committed measurements."""
    from mhckit.doctor.committed import speeds_of

    path.write_text(speeds_of(results))
