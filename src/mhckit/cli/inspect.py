"""`mhckit inspect`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .root import app, examples
from .screen import screen, watcher


class Device(str, Enum):
    """Where the model runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@app.command(
    "inspect",
    short_help="See inside a trained model: a page with findings.",
    epilog=examples(
        "mhckit inspect runs/tiny-mhc",
        "mhckit inspect runs/tiny-mhc --with runs/tiny-hc --out comparison",
        "mhckit inspect model.safetensors --text prose.txt --json > report.json",
    ),
)
def inspect_model(
    source: Annotated[
        str,
        typer.Argument(
            help="A run, one of its checkpoints, a .safetensors file of mhckit export, or the folder or hub name of a "
            "model of transformers.",
            show_default=False,
        ),
    ],
    other: Annotated[
        str | None, typer.Option("--with", help="Compare with this one, or with the report.json of an earlier one.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 file to read.", show_default="a module of Python's standard library")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to read, at most.", min=2)] = 512,
    token: Annotated[
        int | None, typer.Option(help="The token that is shown alone, counted from 0.", show_default="the middle one")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html, report.png and report.json.")] = Path("inspection"),
    config: Annotated[Path | None, typer.Option(help="YAML of mhckit train, for a checkpoint without its run.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, where the model does not say its own.")
    ] = None,
    device: Annotated[
        Device, typer.Option(help="Where the model runs; auto is a GPU where there is one.")
    ] = Device.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, and write nothing.")] = False,
) -> None:
    """See inside a trained model: how its streams are mixed, read and written, and what is wrong with that.

    The model reads some text once. Nothing is trained, nothing is written into it, and no code of it is run. The exit
    code is 0 when the report was made, whatever it says, and 1 when it could not be.
    """
    from mhckit.inspect.command import as_json as to_text
    from mhckit.inspect.command import as_table, check_report, inspect_other, inspect_source, write_reports

    if not as_json:
        check_report(out, source, other)
    options: dict[str, Any] = {
        "text": text, "tokens": tokens, "token": token, "tokenizer": tokenizer, "device": device.value
    }  # fmt: skip
    with watcher().status("reading") as status:
        inspection = inspect_source(source, config=config, **options)
        status.update("reading the other one")
        second = None if other is None else inspect_other(other, **options)
        if as_json:
            print(to_text(inspection, second))
            return
        status.update("drawing")
        paths = write_reports(inspection, second, out)
    console = screen()
    console.print(as_table(inspection))
    for path in paths:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
