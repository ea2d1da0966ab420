"""The command line: parse, delegate, print.

mhckit bench                          measure everything; --quick, --only and --claims measure something else
mhckit bench model                    a whole model of transformers, with and without mhckit
mhckit bench plot RESULTS             pictures from measurements
mhckit bench readme                   the README's table from measurements
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from mhckit.bench.sections import Section

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Manifold-Constrained Hyper-Connections.")
bench = typer.Typer(add_completion=False)
app.add_typer(bench, name="bench")

_RESULTS = Path("benchmarks/results/junction.jsonl")
_WIDTH_OF_TABLES = 140


@app.callback()
def _commands() -> None:
    """Keeps `bench` a command of its own, however many there are."""


def _need_a_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("mhckit bench needs a CUDA GPU, and torch.cuda.is_available() is False")


@bench.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    output: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
    commit: Annotated[str, typer.Option(help="The commit that is measured.")] = "unknown",
    quick: Annotated[bool, typer.Option("--quick", help="One shape, fewer repetitions, fewer parts.")] = False,
    only: Annotated[Section | None, typer.Option(help="Measure one part.")] = None,
    claims: Annotated[bool, typer.Option("--claims", help="Measure what other projects claim instead.")] = False,
) -> None:
    """Time kernels, the sublayer, and others beside the copy ceiling of the same run. Needs a CUDA GPU."""
    if context.invoked_subcommand is not None:
        return
    _need_a_gpu()
    if claims:
        from mhckit.bench.claims import run_claims

        run_claims(output, commit)
        return
    from mhckit.bench.run import run_benchmark

    console = Console(width=_WIDTH_OF_TABLES)
    lines = run_benchmark(only=only, quick=quick, output=output, commit=commit, console=console)
    if any(line["kind"] == "refused" for line in lines):
        raise SystemExit(1)


@bench.command()
def model(
    hidden: Annotated[int, typer.Option(help="Width of the model, a multiple of 128.", min=128)] = 2048,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    batch: Annotated[int, typer.Option(min=1)] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens per sequence.", min=1)] = 2048,
    output: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
    commit: Annotated[str, typer.Option(help="The commit that is measured.")] = "unknown",
) -> None:
    """Time a random DeepSeek-V4 of transformers, with its own connections and with mhckit's. Needs a CUDA GPU."""
    _need_a_gpu()
    from mhckit.bench.whole_model import run_whole_model

    console = Console(width=_WIDTH_OF_TABLES)
    lines = run_whole_model(hidden, layers, batch, tokens, output, commit, console)
    if any(line["kind"] == "refused" for line in lines):
        raise SystemExit(1)


@bench.command()
def plot(
    results: Annotated[Path, typer.Argument(help="JSON lines that `mhckit bench` wrote.")] = _RESULTS,
    folder: Annotated[Path, typer.Option(help="Where the pictures go.")] = _RESULTS.parent,
) -> None:
    """Bars of the percentage of the ceiling, and of the speedup over others. Needs matplotlib."""
    from mhckit.bench.plots import write_plots
    from mhckit.bench.results import read_lines

    for path in write_plots(read_lines(results), folder):
        print(path)


@bench.command()
def readme(
    results: Annotated[Path, typer.Option(help="JSON lines that `mhckit bench` wrote.")] = _RESULTS,
    path: Annotated[Path, typer.Option(help="The file with the block of results.")] = Path("README.md"),
    page: Annotated[Path, typer.Option(help="The file with the block of a trace.")] = Path("docs/performance.md"),
) -> None:
    """Write the results in the README and in docs/performance.md anew from the committed measurements."""
    from mhckit.bench.readme import with_results, with_trace

    path.write_text(with_results(path.read_text(), results))
    page.write_text(with_trace(page.read_text(), results))


def main() -> None:
    app()
