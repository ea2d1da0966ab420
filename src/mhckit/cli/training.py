"""`mhckit train`, and what is done with its runs: `mhckit export`, `mhckit compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .root import app, examples


class _Train(TyperCommand):
    """`mhckit train` in the list of commands; its options, one for every field of the config, are made when it is run.

    The config needs torch, and a list of commands should not wait for that.
    """

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        from mhckit.train.flags import with_flags

        whole = typer.Typer(add_completion=False)
        whole.command(epilog=self.epilog)(with_flags(train))
        return typer.main.get_command(whole).make_context(info_name, args, parent, **extra)


@app.command(
    "train",
    cls=_Train,
    short_help="Train a language model on text, on one GPU or many.",
    epilog=examples(
        "mhckit train",
        "mhckit train --preset deep --residual mhc --data corpus/ --run-name first",
        "mhckit train --config run.yaml --lr 1e-3",
        "torchrun --nproc-per-node 8 -m mhckit train --preset 1b --data corpus/",
    ),
)
def _train_in_the_list() -> None:
    """Never called: _Train puts the whole command in its place."""


def _presets(incomplete: str) -> list[str]:
    from mhckit.train.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def train(
    config: Annotated[Path | None, typer.Option(help="YAML with any of the options; flags win over it.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="tiny, deep, 120m, 1b, 3b, 9b or 27b.", show_default="tiny", autocompletion=_presets),
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Width and depth of the preset, multiplied.")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the YAML of this run, and stop.")] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Train a language model on text. Without options: a tiny one, on Python's own sources.

    Every option can stand in a YAML file, too: --print-config writes one.
    Ctrl-C ends a run with a checkpoint; the same command, given again, goes on from there.
    """
    from mhckit.train import Trainer, load_config
    from mhckit.train.presets import to_yaml

    flags.update({name: value for name, value in (("preset", preset), ("scale", scale)) if value is not None})
    run = load_config(config, **flags)
    if print_config:
        print(to_yaml(run), end="")
        return
    Trainer(run).run()


@app.command(
    short_help="Write a run's weights as one safetensors file.",
    epilog=examples("mhckit export runs/tiny-mhc weights.safetensors"),
)
def export(
    source: Annotated[Path, typer.Argument(help="Folder of a run, whose latest checkpoint is taken, or a checkpoint.")],
    file: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
) -> None:
    """Write a checkpoint's weights as one safetensors file."""
    from mhckit.train.checkpoint import export_safetensors, latest

    print(export_safetensors(latest(source / "checkpoints") or source, file))


@app.command(
    short_help="Draw the losses and gains of some runs.",
    epilog=examples("mhckit compare runs/tiny-mhc runs/tiny-plain --output comparison.png"),
)
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or a file with the metrics of several.")],
    output: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")] = Path("comparison.png"),
) -> None:
    """Draw the losses, gradient norms and composite gains of some runs. Needs matplotlib."""
    from mhckit.train.compare import read_runs
    from mhckit.train.pictures import training_picture

    print(training_picture(read_runs(runs), None, output))
