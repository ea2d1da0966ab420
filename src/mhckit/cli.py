"""The command line: parse, delegate, print.

mhckit bench                          measure everything; --quick, --only and --claims measure something else
mhckit bench model                    a whole model of transformers, with and without mhckit
mhckit bench training                 what mHC costs a training step
mhckit bench plot RESULTS             pictures from measurements
mhckit bench readme                   the README's table from measurements
mhckit bench committed                what `mhckit doctor` compares with, from measurements
mhckit doctor                         examine this machine: versions, paths, a self-test, speed; --json
mhckit train                          train a language model; alone, or started by torchrun
mhckit compare RUN ...                a picture of some runs
mhckit export RUN FILE                a run's weights as safetensors
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from mhckit.bench.sections import Section
from mhckit.train.flags import with_flags

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Manifold-Constrained Hyper-Connections.")
bench = typer.Typer(add_completion=False)
app.add_typer(bench, name="bench")

_RESULTS = Path("benchmarks/results/junction.jsonl")
_COMMITTED = Path("src/mhckit/doctor/committed.json")
_STEPS = Path("benchmarks/results/training.jsonl")
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
    hidden: Annotated[int, typer.Option(help="Width of the model, a multiple of 128.", min=128)] = 4096,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    batch: Annotated[int, typer.Option(min=1)] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens per sequence.", min=1)] = 4096,
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
def training(
    case: Annotated[str | None, typer.Option(help="Measure one case alone: 1b, or C 4096.")] = None,
    output: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
    commit: Annotated[str, typer.Option(help="The commit that is measured.")] = "unknown",
) -> None:
    """Time a training step with the plain residual, with mhckit and with plain PyTorch's mHC. Needs a CUDA GPU."""
    _need_a_gpu()
    from mhckit.bench.training import CASES, run_training

    cases = tuple(each for each in CASES if case in (None, each.name))
    if not cases:
        raise SystemExit(f"--case must be one of {', '.join(each.name for each in CASES)}, got {case!r}")
    lines = run_training(output, commit, Console(width=_WIDTH_OF_TABLES), cases)
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
    steps: Annotated[Path, typer.Option(help="JSON lines that `mhckit bench training` wrote.")] = _STEPS,
    costs: Annotated[Path, typer.Option(help="The file with the block of costs.")] = Path("docs/training.md"),
) -> None:
    """Write the results in the README and in docs/ anew from the committed measurements."""
    from mhckit.bench.readme import with_costs, with_results, with_trace

    path.write_text(with_results(path.read_text(), results))
    page.write_text(with_trace(page.read_text(), results))
    costs.write_text(with_costs(costs.read_text(), steps))


@bench.command()
def committed(
    results: Annotated[Path, typer.Option(help="JSON lines that `mhckit bench` wrote.")] = _RESULTS,
    path: Annotated[Path, typer.Option(help="The package's file of speeds.")] = _COMMITTED,
) -> None:
    """Write the speeds that `mhckit doctor` compares with anew from the committed measurements."""
    from mhckit.doctor.committed import speeds_of

    path.write_text(speeds_of(results))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Examine this machine: versions, GPU, which implementation runs and why, a self-test of every operator, speed.

    The exit code is 0 if all is well, warnings included, and 1 if something failed; what to do stands below each.
    """
    from mhckit.doctor import examine, exit_code
    from mhckit.doctor.report import as_data, as_table, summary

    with Console(stderr=True).status("examining") as status:
        findings = examine(status.update)
    if as_json:
        print(json.dumps(as_data(findings)))
    else:
        console = Console()
        console.print(as_table(findings))
        console.print(summary(findings), markup=False)
    raise SystemExit(exit_code(findings))


@app.command()
@with_flags
def train(
    config: Annotated[Path | None, typer.Option(help="YAML with any of the options; flags win over it.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="tiny, deep, 120m, 1b, 3b, 9b or 27b.", show_default="tiny")
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Width and depth of the preset, multiplied.")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the YAML of this run, and stop.")] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Train a language model on text. Without options: a tiny one, on Python's own sources.

    One process, or many with `torchrun --nproc-per-node 8 -m mhckit train ...`. A run that was interrupted goes on when
    the same command is given again.
    """
    from mhckit.train import Trainer, load_config
    from mhckit.train.presets import to_yaml

    flags.update({name: value for name, value in (("preset", preset), ("scale", scale)) if value is not None})
    with _errors_in_a_line():
        run = load_config(config, **flags)
        if print_config:
            print(to_yaml(run), end="")
            return
        Trainer(run).run()


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="Folder of a run, whose latest checkpoint is taken, or a checkpoint.")],
    file: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
) -> None:
    """Write a checkpoint's weights as one safetensors file."""
    from mhckit.train.checkpoint import export_safetensors, latest

    with _errors_in_a_line():
        print(export_safetensors(latest(source / "checkpoints") or source, file))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or a file with the metrics of several.")],
    output: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")] = Path("comparison.png"),
) -> None:
    """Draw the losses, gradient norms and composite gains of some runs. Needs matplotlib."""
    from mhckit.train.compare import read_runs
    from mhckit.train.pictures import training_picture

    with _errors_in_a_line():
        print(training_picture(read_runs(runs), None, output))


@contextlib.contextmanager
def _errors_in_a_line() -> Iterator[None]:
    """What a user can put right needs no traceback."""
    try:
        yield
    except (ValueError, TypeError, ImportError, FloatingPointError) as error:
        raise SystemExit(f"mhckit: {error}") from error


def main() -> None:
    app()
