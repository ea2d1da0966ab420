"""The command line: what it offers, and what it says where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sample
import torch
from typer.testing import CliRunner

from mhckit.bench.readme import BEGIN, COST_BEGIN, COST_END, END, TRACE_BEGIN, TRACE_END
from mhckit.bench.results import append_lines
from mhckit.bench.sections import Section, chosen_sections
from mhckit.cli import app


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("arguments", [[], ["--quick"], ["--only", "cold"], ["--only", "decode"], ["--claims"]])
@pytest.mark.usefixtures("_no_gpu")
def test_needs_a_gpu(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 1
    assert "mhckit bench needs a CUDA GPU" in result.output


def test_an_unknown_part_is_refused() -> None:
    assert CliRunner().invoke(app, ["bench", "--only", "everything"]).exit_code == 2


def test_help_as_a_module() -> None:
    command = [sys.executable, "-m", "mhckit", "bench", "--help"]
    help_text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    for word in ("--quick", "--only", "--claims", "--output", "plot", "readme"):
        assert word in help_text


def test_sections() -> None:
    assert chosen_sections(None, quick=False) == tuple(Section)
    assert not {Section.BASELINES, Section.RECIPES, Section.DECODE} & set(chosen_sections(None, quick=True))
    assert chosen_sections(Section.COLD, quick=True) == (Section.COLD,)


def test_readme(tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "results.jsonl"
    readme.write_text(f"{BEGIN}\n{END}\n")
    page = tmp_path / "page.md"
    page.write_text(f"{TRACE_BEGIN}\n{TRACE_END}\n")
    costs = tmp_path / "costs.md"
    costs.write_text(f"{COST_BEGIN}\n{COST_END}\n")
    append_lines(results, sample.lines())
    options = ["--results", str(results), "--path", str(readme), "--page", str(page), "--costs", str(costs)]
    result = CliRunner().invoke(app, ["bench", "readme", *options])
    assert result.exit_code == 0, result.output
    assert "Sample GPU" in readme.read_text() and "Memset" in page.read_text()


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="`make` installs it")
    results = tmp_path / "results.jsonl"
    append_lines(results, sample.lines())
    result = CliRunner().invoke(app, ["bench", "plot", str(results), "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "ceiling.png").exists()
