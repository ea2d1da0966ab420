"""Whatever goes wrong is one line on stderr, with what to do about it; --debug shows where it came from."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mhckit.bench.results import of_kind
from mhckit.cli import app
from mhckit.cli.errors import EXTRAS, in_a_line
from mhckit.recipe import Recipe
from mhckit.train import checkpoint

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXPORT = ["export", "run", "weights.safetensors"]
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB. If reserved"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "a.bin"), "no such file or folder: a.bin; is the path right"),
        (PermissionError(errno.EACCES, "Permission denied", "a.bin"), "permission denied: a.bin; look at its owner"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "a"), "a folder where a file should be: a; name a file"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), "a file where a folder should be: a/b; name"),
        (FileExistsError(errno.EEXIST, "File exists", "a"), "a file where a folder should be: a; name another path"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "one of the given files is not UTF-8 text"),
        (OSError(errno.ENOSPC, "No space left", "a.bin"), "the disk is full: a.bin; make room"),
        (OSError(errno.EIO, "Input/output error", "a.bin"), "Input/output error: a.bin"),
        (torch.OutOfMemoryError(OUT_OF_MEMORY), "out of memory (CUDA out of memory. Tried to allocate 20.00 MiB);"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory (DefaultCPUAllocator"),
        (ModuleNotFoundError("No module", name="yaml.nodes"), 'this needs yaml: pip install "mhckit[train]"'),
        (ModuleNotFoundError("No module", name="polars"), "this needs polars: pip install polars"),
        (ModuleNotFoundError("No module", name="mhckit.lost"), "a bug in mhckit or something about this machine"),
        (RuntimeError("first\n\nsecond"), "RuntimeError: first second (mhckit/cli/training.py, line "),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "Broken pipe"),  # of a worker, say: stdout is well
    ],
)
def test_every_kind_has_its_words(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def raising(_: Path) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "latest", raising)
    result = CliRunner().invoke(app, EXPORT)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("mhckit: ") and words in result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(_: Path) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(checkpoint, "latest", raising)
    short, long = CliRunner().invoke(app, EXPORT), CliRunner().invoke(app, ["--debug", *EXPORT])
    assert "KeyError: 'lost'" in short.stderr and "--debug" in short.stderr and "Traceback" not in short.stderr
    assert long.exit_code == 1 and long.stderr.startswith("Traceback") and long.stderr.endswith(short.stderr)
    assert "in raising" in long.stderr


def test_only_what_mhckit_says_itself_is_taken_for_an_explanation() -> None:
    """A ValueError of json's, or a TypeError out of a mistake in mhckit, is not made for users."""
    with pytest.raises(ValueError) as said:
        Recipe(streams=0)
    assert in_a_line(said.value) == f"mhckit: {said.value}"
    with pytest.raises(ValueError) as from_json:
        json.loads("{")
    assert "JSONDecodeError: Expecting" in in_a_line(from_json.value) and "--debug" in in_a_line(from_json.value)
    with pytest.raises(TypeError) as mistake:
        of_kind(None, "kind")
    assert "(mhckit/bench/results.py, line " in in_a_line(mistake.value) and "--debug" in in_a_line(mistake.value)


def test_the_folder_that_one_is_in_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    line = in_a_line(FileNotFoundError(errno.ENOENT, "No such file", "a.bin"))
    assert line == "mhckit: no such file or folder: a.bin; is the path right?"


def test_what_a_name_holds_is_shown_and_not_obeyed() -> None:
    line = in_a_line(FileNotFoundError(errno.ENOENT, "No such file", "a\x1b[31m\u202eb\x07"))
    assert r"a\x1b[31m\u202eb\x07" in line and line.isprintable()


def test_the_extras_are_those_of_the_package() -> None:
    text = PYPROJECT.read_text()
    for module, extra in EXTRAS.items():
        (line,) = re.findall(rf"^{extra} = .*", text, re.MULTILINE)
        assert f'"{ {"yaml": "pyyaml"}.get(module, module) }' in line


def test_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["trian"])
    assert result.exit_code == 2 and result.stdout == "" and "Did you mean 'train'?" in result.stderr
