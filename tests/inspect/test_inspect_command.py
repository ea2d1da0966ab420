"""`mhckit inspect`: files, table, JSON, exit codes."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small_models import TOKENS, healthy, snapshot
from typer.testing import CliRunner

from mhckit.cli import app
from mhckit.inspect import Finding, Inspection, command, from_json, inspect_source
from mhckit.train.checkpoint import export_safetensors

REPORT = {"report.html", "report.png", "report.json"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_safetensors(healthy(), tmp_path_factory.mktemp("models") / "model.safetensors")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_safetensors(
        healthy(residual="hc", layers=1, streams=2), tmp_path_factory.mktemp("models") / "other.safetensors"
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the picture does not matter, which takes a second to draw."""
    monkeypatch.setattr("mhckit.inspect.figures.write_picture", lambda _inspection, path: path.write_bytes(b"drawn"))


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments), "--tokens", str(TOKENS), "--device", "cpu"])


def test_a_report_is_written_and_told(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "report"
    result = call(file, "--out", out)
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == REPORT, "and no draft is left"
    inspection = from_json((out / "report.json").read_text())
    assert inspection.name == str(file) and inspection.tokens == TOKENS
    shown = " ".join(result.stdout.split())
    for finding in inspection.findings:
        assert f"{finding.level} {finding.text}" in shown
    for name in REPORT:
        assert str(out / name) in shown.replace("\n", "")
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "report.html").read_text().lower().startswith("<!doctype html>")


@pytest.mark.usefixtures("quick")
def test_an_earlier_report_is_replaced_and_the_rest_of_the_folder_stays(file: Path, tmp_path: Path) -> None:
    for name in ("report.html", "report.json", "mine.txt"):
        (tmp_path / name).write_text("old")
    assert call(file, "--out", tmp_path).exit_code == 0
    assert (tmp_path / "mine.txt").read_text() == "old"
    assert "old" not in ((tmp_path / "report.html").read_text()[:3], (tmp_path / "report.json").read_text()[:3])


def test_a_report_that_cannot_be_drawn_leaves_the_earlier_one(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.html").write_text("old")

    def fail(*_: Any) -> None:
        raise ValueError("no picture today")

    monkeypatch.setattr("mhckit.inspect.figures.write_picture", fail)
    result = call(file, "--out", tmp_path)
    assert result.exit_code == 1 and "no picture today" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "old"


@pytest.mark.usefixtures("quick")
def test_a_report_that_is_cut_off_leaves_the_earlier_one(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.html").write_text("old")

    def run_out_of_space(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", run_out_of_space)
    result = call(file, "--out", tmp_path)
    assert result.exit_code == 1 and "the disk is full" in result.stderr
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.html", "old")]


def test_json_alone(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(file, "--json")
    assert result.exit_code == 0 and not list(tmp_path.iterdir())
    assert from_json(result.stdout).sublayers == inspect_source(str(file), tokens=TOKENS, device="cpu").sublayers


@pytest.mark.usefixtures("quick")
def test_two_are_compared_and_one_of_them_may_be_a_report(file: Path, other: Path, tmp_path: Path) -> None:
    result = call(file, "--with", other, "--out", tmp_path / "first")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "first").iterdir()} == {*REPORT, "comparison.html"}
    assert str(tmp_path / "first" / "comparison.html") in result.stdout.replace("\n", "")
    first, second = json.loads(call(other, "--with", tmp_path / "first" / "report.json", "--json").stdout)
    assert (first["name"], first["streams"]) == (str(other), 2)
    assert (second["name"], second["streams"]) == (str(file), 3)


@pytest.mark.parametrize("inside", ["", "deeper/still"])
def test_nothing_is_written_into_the_source(file: Path, tmp_path: Path, inside: str) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.yaml").write_text("")
    before = snapshot(source)
    result = call(source, "--out", source / inside)
    assert result.exit_code == 1 and "nothing is written into what is inspected" in result.stderr
    assert snapshot(source) == before
    report = tmp_path / "report.json"
    report.write_text("{}")
    assert "nothing is written into" in call(file, "--with", report, "--out", tmp_path).stderr
    assert report.read_text() == "{}"


def test_errors_take_one_line(file: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ((tmp_path,), "the folder"),
        ((file, "--token", 99), "token must be from 0 to"),
        ((file, "--out", file), "--out must be a folder"),
        ((file, "--with", Path(__file__).parent / "missing" / "run", "--out", tmp_path / "out"), "there is no"),
    ):
        result = call(*arguments)
        assert result.exit_code == 1 and words in result.stderr, result.output
        assert result.stderr.startswith("mhckit: ") and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("quick")
def test_what_is_wrong_with_a_model_is_no_error_of_the_command(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And names from a checkpoint neither format nor control the terminal."""
    hostile = "[bold]x[/bold]\x1b[31m\n"

    def inspect_hostile(*arguments: Any, **options: Any) -> Inspection:
        inspection = inspect_source(*arguments, **options)
        inspection.findings.insert(0, Finding("wrong", hostile, f"Bad in {hostile}.", "x"))
        return inspection

    monkeypatch.setattr(command, "inspect_source", inspect_hostile)
    result = call(file, "--out", tmp_path)
    assert result.exit_code == 0
    assert r"Bad in [bold]x[/bold]\x1b[31m\n." in result.stdout
    assert "\x1b" not in result.stdout


def test_without_matplotlib_it_says_so_before_it_reads_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call(tmp_path / "nothing", "--out", tmp_path / "out")
    assert isinstance(result.exception, ImportError) or result.exit_code == 1
    assert "mhckit[viz]" in f"{result.output}{result.exception}"


def test_help_says_what_the_exit_code_means() -> None:
    shown = " ".join(call("--help").stdout.replace("│", " ").split())
    assert "code is 0 when the report was made, whatever it says" in shown
    assert "mhckit inspect runs/tiny-mhc --with" in shown
