"""The speed check: beside the committed result, never typed by hand, and only where it means something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mhckit.bench.results import append_lines, latest, of_kind, read_lines
from mhckit.cli import app
from mhckit.doctor import speed
from mhckit.doctor.committed import CASE, FILE, committed_speed, speeds_of
from mhckit.doctor.findings import Finding
from mhckit.doctor.gpu import GIB, Gpu
from mhckit.doctor.speed import Measured, speed_findings

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/junction.jsonl"
GPU = Gpu("Sample GPU", (9, 0), free=100 * GIB, total=140 * GIB)
JUNCTION = Finding("junction", "ok", "right")
COMMITTED = {"commit": "new", "copy_terabytes_per_second": 4.0, "microseconds": 700.0, "of_ceiling": 0.8}


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "committed_speed", {GPU.name: COMMITTED}.get)
    monkeypatch.setattr(speed, "is_interpreted", lambda: False)


def test_the_speeds_are_not_stale() -> None:
    assert (ROOT / "src/mhckit/doctor" / FILE).read_text() == speeds_of(RESULTS), "run `make readme`"


def test_the_newest_results_are_found() -> None:
    """The same numbers as the README's."""
    (line,) = of_kind(latest(read_lines(RESULTS), "junction"), "junction", direction="both", **CASE.facts())
    found = committed_speed(line["device"])
    assert found is not None and found["of_ceiling"] == line["of_ceiling"] and found["commit"] == line["commit"]
    assert committed_speed("Another GPU") is None


def test_the_last_of_each_kind_of_gpu_counts(tmp_path: Path) -> None:
    results, path = tmp_path / "results.jsonl", tmp_path / "committed.json"
    line = CASE.facts() | COMMITTED | {"kind": "junction", "direction": "both", "device": "A", "date": "2000-01-01"}
    other = line | {"device": "B", "of_ceiling": 0.5}
    later = line | {"of_ceiling": 0.9, "commit": "later"}
    append_lines(
        results, [line, other, later, later | {"direction": "forward", "of_ceiling": 0.1}, later | {"tokens": 1}]
    )
    result = CliRunner().invoke(app, ["bench", "committed", "--results", str(results), "--path", str(path)])
    assert result.exit_code == 0, result.output
    speeds = json.loads(path.read_text())
    assert {name: (each["commit"], each["of_ceiling"]) for name, each in speeds.items()} == {
        "A": ("later", 0.9),
        "B": ("new", 0.5),
    }


@pytest.mark.parametrize(
    ("measured", "copy", "junction"),
    [
        (Measured(4.0, 700.0, 0.8), "ok", "ok"),
        (Measured(3.7, 790.0, 0.73), "ok", "ok"),
        (Measured(4.0, 790.0, 0.72), "ok", "failed"),
        (Measured(3.6, 780.0, 0.8), "warning", "ok"),
    ],
)
@pytest.mark.usefixtures("committed")
def test_slower_than_committed(monkeypatch: pytest.MonkeyPatch, measured: Measured, copy: str, junction: str) -> None:
    monkeypatch.setattr(speed, "measure", lambda: measured)
    findings = list(speed_findings(GPU, JUNCTION))
    assert [(finding.name, finding.status) for finding in findings] == [("copy", copy), ("speed", junction)]
    assert "committed 4.00" in findings[0].seen and "committed 80.0% at new" in findings[1].seen
    assert all(bool(finding.advice) == (finding.status != "ok") for finding in findings)


@pytest.mark.usefixtures("committed")
def test_no_committed_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "measure", lambda: Measured(1.0, 7000.0, 0.1))
    copy, junction = speed_findings(Gpu("Other GPU", (8, 0), 100 * GIB, 140 * GIB), JUNCTION)
    assert copy.status == "ok" and junction.status == "skipped"
    assert "no committed result for Other GPU" in junction.seen and "mhckit bench" in junction.advice


@pytest.mark.usefixtures("committed")
def test_when_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(gpu: Gpu | None, junction: Finding | None) -> set[str]:
        findings = list(speed_findings(gpu, junction))
        assert [(finding.name, finding.status) for finding in findings] == [("copy", "skipped"), ("speed", "skipped")]
        return {finding.seen for finding in findings}

    monkeypatch.setattr(speed, "measure", lambda: pytest.fail("measured"))
    full = Gpu("Sample GPU", (9, 0), free=GIB, total=140 * GIB)
    assert reasons(None, JUNCTION) == {"there is no GPU"}
    assert reasons(full, JUNCTION) == {"too little memory is free"}
    assert reasons(GPU, None) == reasons(GPU, Finding("junction", "failed", "wrong"))
    monkeypatch.setattr(speed, "is_interpreted", lambda: True)
    assert reasons(GPU, JUNCTION) == {"kernels are interpreted"}
