"""Every block of code in the README and in docs: Python runs, the command line parses commands, YAML is read."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
import typer
from pages import ALL_BLOCKS, ROOT, Block, name_of

from mhckit.cli import app
from mhckit.train import load_config

# A block that is not run says in its title what it is instead.
NOT_RUN = "text"
LANGUAGES = ("python", "bash", "yaml", NOT_RUN)


def _of(language: str) -> list[Block]:
    return [block for block in ALL_BLOCKS if block.language == language]


def _by_page(blocks: list[Block]) -> list[Any]:
    found: dict[Path, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.page, []).append(block)
    return [pytest.param(on_page, id=name_of(page)) for page, on_page in found.items()]


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder to run in, and no process group left behind."""
    monkeypatch.chdir(tmp_path)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("blocks", _by_page(_of("python")))
def test_python_runs(blocks: list[Block]) -> None:
    """In order, in one namespace, warnings being errors."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile("\n" * block.line + block.code, name_of(block.page), "exec"), names)


@pytest.mark.parametrize("blocks", _by_page(_of("bash")))
def test_commands_are_understood(blocks: list[Block]) -> None:
    for block in blocks:
        for line in block.code.splitlines():
            if words := shlex.split(line, comments=True):
                try:
                    check_command(words)
                except Exception as error:
                    raise AssertionError(f"{block.place}: {line.strip()!r}: {error}") from error


def test_yaml_is_a_run(tmp_path: Path) -> None:
    for block in _of("yaml"):
        file = tmp_path / "run.yaml"
        file.write_text(block.code)
        load_config(file)


def test_languages() -> None:
    for block in ALL_BLOCKS:
        assert block.language in LANGUAGES, f"{block.place}: the language must be one of {LANGUAGES}"
        if block.language == NOT_RUN:
            assert block.title, f'{block.place}: a block that is not run needs a title="..." that says what it is'


def check_command(words: list[str]) -> None:
    """Raise for a command that would not work: mhckit's are parsed, and what others are given must exist."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *arguments = words
    if program in ("python", "torchrun") and "-m" in arguments:
        at = arguments.index("-m")
        program, arguments = arguments[at + 1], arguments[at + 2 :]
    if program not in _CHECKS:
        raise ValueError(f"unknown program {program!r}")
    _CHECKS[program](arguments)


def _check_mhckit(arguments: list[str]) -> None:
    """Parse as the command line would, without running anything."""
    command: Any = typer.main.get_command(app)
    with contextlib.suppress(typer.Exit):  # --help and --version end there
        context = command.make_context("mhckit", list(arguments))
        while rest := [*getattr(context, "_protected_args", ()), *context.args]:
            command = command.commands[rest[0]]
            context = command.make_context(rest[0], rest[1:], parent=context)


def _check_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in arguments:
        if "=" not in target and target not in targets:
            raise ValueError(f"the Makefile has no target {target!r}")


def _check_pip(arguments: list[str]) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    known = re.findall(r"^(\w+) = \[", text.partition("[project.optional-dependencies]")[2], re.MULTILINE)
    extras = [name for word in arguments for found in re.findall(r"\[(.*)\]", word) for name in found.split(",")]
    if arguments[0] != "install" or not set(extras) <= set(known):
        raise ValueError(f"pip must install one of the extras {', '.join(known)}")


def _check_script(arguments: list[str]) -> None:
    if not (ROOT / arguments[0]).is_file():
        raise ValueError(f"there is no {arguments[0]}")


_CHECKS = {"mhckit": _check_mhckit, "make": _check_make, "pip": _check_pip, "python": _check_script}


@pytest.mark.parametrize(
    "command",
    [
        "mhckit trian",
        "mhckit train --residul plain",
        "mhckit train --batch-size many",
        "mhckit bench plot a b",
        "torchrun --nproc-per-node 8 -m mhckit train --presets 1b",
        "make dcos",
        'pip install "mhckit[trian]"',
        "python examples/none.py",
        "rm -r runs",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 (whatever the parser raises)
        check_command(shlex.split(command))


def test_blocks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '<!-- run first\na = 1\n-->\n\n```python\nb\n```\n\n- item\n\n    ```text title="t"\n    c\n    ```\n'
    )
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    found = [(block.line, block.language, block.title, block.code) for block in pages.blocks_of(page)]
    assert found == [(1, "python", "", "a = 1\n"), (5, "python", "", "b\n"), (11, "text", "t", "c\n")]
