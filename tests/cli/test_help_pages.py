"""Help that a person can follow: all of it is there, first things first, with an example for every command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import mhckit
from mhckit.cli import app


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))


def test_the_first_page() -> None:
    page = CliRunner().invoke(app, ["--help"])
    assert page.exit_code == 0
    group: Any = typer.main.get_command(app)
    wanted = ["doctor", "bench", "train", "inspect", "Examples:", "Exit codes:", "130"]
    wanted += ["More commands:", "export", "compare", "Options:", "--debug"]
    lines = [line.split(maxsplit=1)[0] if line.startswith("  ") else line for line in page.output.splitlines() if line]
    found = [lines.index(word) for word in wanted]
    assert found == sorted(found)
    assert all(len(line) <= 81 for line in page.output.splitlines())
    shown = {line.split(maxsplit=1)[0] for line in page.output.splitlines() if line.startswith("  ")}
    assert set(group.commands) <= shown


def test_without_arguments_it_is_the_first_page() -> None:
    nothing = CliRunner().invoke(app, [])
    assert nothing.exit_code == 2 and nothing.output == CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize("path", list(_commands(typer.main.get_command(app))), ids=" ".join)
def test_every_command_has_an_example(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    _, found, commands = result.output.rpartition("Example")
    assert found and f"mhckit {' '.join(path)}" in commands


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"mhckit {mhckit.__version__}\n")


def test_presets_are_completed() -> None:
    asked = {"_MHCKIT_COMPLETE": "complete_bash", "COMP_WORDS": "mhckit train --preset 1", "COMP_CWORD": "3"}
    result = CliRunner().invoke(app, [], prog_name="mhckit", env=asked)
    assert set(result.output.split()) == {"120m", "1b"}
