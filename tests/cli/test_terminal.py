"""How a command ends and what it prints, where it is interrupted, piped, or on a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mhckit

# mhckit as a bare package: mhckit/__init__.py, which imports torch, is not run, and the rest is as it is.
# Interrupts are heard where the tests are not: who runs in the background of a shell's script inherits that.
BARE = f"""
import signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)
mhckit = sys.modules["mhckit"] = types.ModuleType("mhckit")
mhckit.__path__, mhckit.__version__ = [{str(Path(mhckit.__file__).parent)!r}], {mhckit.__version__!r}
from mhckit.cli import app, main
"""

# What would decide on colours, widths and buffers in place of the test.
UNSET = ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "NO_COLOR", "PYTHONUNBUFFERED", "PY_COLORS", "TTY_COMPATIBLE")
PATIENCE = 120  # seconds, on a machine that has other things to do
Start = Callable[..., "subprocess.Popen[str]"]
WAIT = """
import time
@app.command()
def wait():
    print("ready", flush=True)
    time.sleep(600)
main()
"""
TALK = """
@app.command()
def talk():
    for number in range(100_000):
        print(number)
main()
"""
# The exit code says whether torch came along.
HELP = "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
TABLE = """
from rich.table import Table
from mhckit.cli.screen import screen, watcher
table = Table()
table.add_row("a" * 150, "[red]" + "b" * 150)
screen().print(table)
with watcher().status("working"):
    pass
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python code that has ``app`` and ``main``, with these arguments; stdout and stderr are pipes.

    What still runs when the test is over is ended.
    """
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str, env: dict[str, str] | None = None, **files: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", f"{BARE}\n{code}", *arguments]
        kept = {name: value for name, value in os.environ.items() if name not in UNSET}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, env=kept | (env or {}), **{**pipes, **files})
        started.append(process)
        return process

    yield start
    for process in started:
        with process:  # closes its pipes
            process.kill()


@pytest.mark.parametrize("debug", [[], ["--debug"]], ids=["", "debug"])
def test_interrupted(start: Start, debug: list[str]) -> None:
    process = start(WAIT, *debug, "wait")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert said.endswith("mhckit: interrupted\n") and ("Traceback" in said) == bool(debug)
    assert debug or said == "mhckit: interrupted\n"


@pytest.mark.parametrize(
    ("code", "arguments"),
    [(TALK, ["talk"]), ("main()", ["--version"]), ("main()", ["bench", "--help"])],
    ids=["midway", "at the end", "help"],
)
def test_nobody_reads_on(start: Start, code: str, arguments: list[str]) -> None:
    process = start(code, *arguments)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(PATIENCE) == 1
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_no_room_for_what_is_printed(start: Start) -> None:
    with open("/dev/full", "w") as full:
        process = start("main()", "--version", stdout=full)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and said.startswith("mhckit: the disk is full") and said.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "--help"], ["doctor", "--help"], ["trian"]])
def test_torch_is_not_imported_to_explain_oneself(start: Start, arguments: list[str]) -> None:
    process = start(HELP, *arguments)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == (2 if arguments == ["trian"] else 0), said
    assert "AssertionError" not in said


def test_tables_in_a_pipe_are_whole_and_plain(start: Start) -> None:
    process = start(TABLE)
    printed, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and said == ""
    assert "a" * 150 in printed and "b" * 150 in printed and printed.replace("\n", "").isprintable()


@pytest.mark.parametrize("no_color", [{}, {"NO_COLOR": "1"}], ids=["", "no colour"])
@pytest.mark.parametrize(("code", "arguments"), [("main()", ["bench", "--help"]), (TABLE, [])], ids=["help", "table"])
def test_colour_on_a_terminal_unless_it_is_not_wanted(
    start: Start, code: str, arguments: list[str], no_color: dict[str, str]
) -> None:
    ours, theirs = pty.openpty()
    process = start(code, *arguments, stdout=theirs, stderr=theirs, env={"TERM": "xterm", **no_color})
    os.close(theirs)
    printed = b""
    while chunk := _read(ours):
        printed += chunk
    os.close(ours)
    assert process.wait(PATIENCE) == 0, printed
    assert (b"\x1b" in printed) != bool(no_color)


def _read(terminal: int) -> bytes:
    """What comes, or nothing when the other side is gone, which Linux reports as an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def test_completion(start: Start) -> None:
    """As a shell asks for it."""
    shell = {"_MHCKIT_COMPLETE": "complete_bash"}
    for words, want in (
        ("mhckit ", {"doctor", "bench", "train", "inspect"}),
        ("mhckit bench --only ", {"kernels", "junction", "cold"}),
    ):
        asked = {**shell, "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()))}
        process = start(HELP, env=asked)
        printed, said = process.communicate(timeout=PATIENCE)
        assert want <= set(printed.split()), said
        assert "AssertionError" not in said


def test_completion_is_shown_for_the_shell_at_hand() -> None:
    command = f"{sys.executable} -m mhckit --show-completion; true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE)
    assert "_MHCKIT_COMPLETE=complete_bash" in done.stdout, done.stderr
