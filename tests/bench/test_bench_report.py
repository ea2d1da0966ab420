"""The page of a benchmark: from lines just measured, and from the committed files, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sample import FACTS, decode, lines
from sample import recipes as sample_recipes
from typer.testing import CliRunner

from mhckit.bench.report import make_report
from mhckit.cli import app

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_it_says_what_was_measured_where() -> None:
    html = make_report(lines()).html()
    for fact in ("commit", "device", "torch", "triton", "python", "date"):
        assert f"<dd>{FACTS[fact]}</dd>" in html
    assert "Percent of the ceiling, forward and backward" in html and "2 x 3: 50%" in html
    assert "F1, percent of the ceiling" in html and "2 x 3, norm: 20%" in html
    assert "<td>25.0%</td><td>31.2%</td>" in html and "<td>20.0%</td><td></td>" in html, "where it was measured"
    assert "eager: 3x" in html and "<td>3.00x</td>" in html
    assert "liger was not measured: No module named &#x27;liger_kernel&#x27;" in html


def test_the_commit_measured_last_counts() -> None:
    old = [{**line, "commit": "old"} | ({"tokens": 777} if "tokens" in line else {}) for line in lines()]
    assert "777 x 3" in make_report(old).html()
    assert make_report([*old, *lines()]).html() == make_report(lines()).html()


def test_recipes_and_inference() -> None:
    html = make_report([*sample_recipes(), *decode()]).html()
    assert "Recipes</h2>" in html and "Inference</h2>" in html
    assert "2 x 3, microseconds, forward and backward" in html and "deepseek_v4: 240 us; deepseek_v41: 180 us" in html
    assert "<td>66.7%</td><td>6</td><td>75.0%</td>" in html
    assert "deepseek_v41, C 3: microseconds of a junction" in html
    assert "mhckit, 1: 9 us; reference, 1: 251 us" in html and "as one of 20 in a CUDA graph" in html
    assert f"<dd>{FACTS['recipe']}</dd>" in html, "that of the run, not of its last line"
    alone = make_report(lines()).html()
    assert "Recipes</h2>" not in alone and "Inference</h2>" not in alone


def test_a_refused_measurement_is_shown() -> None:
    refused = {**FACTS, "kind": "refused", "measurement": "junction, <b>", "reason": "wrong gradients"}
    html = make_report([*lines(), refused]).html()
    assert "junction, &lt;b&gt; was refused: wrong gradients" in html and 'class="wrong"' in html


@pytest.mark.parametrize("name", ["junction", "training", "model"])
def test_committed_results_become_a_page(name: str, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["bench", "report", str(RESULTS / f"{name}.jsonl"), "--output", str(output)])
    assert done.exit_code == 0 and done.stdout.strip() == str(output)
    last = json.loads((RESULTS / f"{name}.jsonl").read_text().splitlines()[-1])
    html = output.read_text(encoding="utf-8")
    assert f"<dd>{last['commit']}</dd>" in html and "<figure>" in html


def test_lines_of_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match="lines that mhckit bench wrote"):
        make_report([{"attempt": "J", "microseconds": 1.0}])


def test_report_beside_a_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--report writes what was just measured, here by a benchmark that measures nothing."""
    run = pytest.importorskip("mhckit.bench.run")
    fine = [line for line in lines() if line["kind"] != "refused"]

    def measure(**_options: Any) -> list[dict[str, Any]]:
        return fine

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "run_benchmark", measure)
    output = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["bench", "--quick", "--report", str(output)])
    assert done.exit_code == 0 and str(output) in done.stdout
    assert output.read_text(encoding="utf-8") == make_report(fine).html()


def test_claims_have_no_report() -> None:
    done = CliRunner().invoke(app, ["bench", "--claims", "--report", "page.html"])
    assert done.exit_code == 2
