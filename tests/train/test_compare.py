"""Runs side by side, from folders and from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mhckit.cli import app
from mhckit.train.compare import read_runs


def _write(file: Path, *lines: dict[str, object]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_folders_and_files(tmp_path: Path) -> None:
    _write(tmp_path / "first" / "metrics.jsonl", {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5})
    both = _write(
        tmp_path / "both.jsonl", {"step": 1, "loss": 3.0, "residual": "hc"}, {"step": 1, "loss": 4.0, "residual": "mhc"}
    )
    runs = read_runs([tmp_path / "first", both])
    assert {name: [line["loss"] for line in lines] for name, lines in runs.items()} == {
        "first": [2.0, 1.5],
        "hc": [3.0],
        "mhc": [4.0],
    }


def test_two_of_one_name(tmp_path: Path) -> None:
    for folder, loss in (("a", 1.0), ("b", 2.0)):
        _write(tmp_path / folder / "run" / "metrics.jsonl", {"step": 1, "loss": loss})
    first, second = read_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"]).values()
    assert (first[0]["loss"], second[0]["loss"], len(first), len(second)) == (1.0, 2.0, 1, 1)


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither the folder of a run"):
        read_runs([tmp_path])
    with pytest.raises(ValueError, match=r"line 2 of .* has no step and loss"):
        read_runs([_write(tmp_path / "a.jsonl", {"step": 1, "loss": 1.0}, {"kind": "junction"})])
    broken = tmp_path / "b.jsonl"
    broken.write_text("{")
    with pytest.raises(ValueError, match=r"line 1 of .* is no JSON"):
        read_runs([broken])


def test_command(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1 / step, "grad_norm": 1.0} for step in range(1, 9)]
    run = _write(tmp_path / "run" / "metrics.jsonl", *lines).parent
    done = CliRunner().invoke(app, ["compare", str(run), "--output", str(tmp_path / "picture.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    failed = CliRunner().invoke(app, ["compare", str(tmp_path / "none")])
    assert failed.exit_code == 1 and "neither the folder of a run" in failed.output
