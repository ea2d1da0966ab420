"""`mhckit doctor`: the same findings on the screen and as JSON, and an exit code that tells."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import mhckit
from mhckit.cli import app
from mhckit.doctor import examine as examine_package
from mhckit.doctor import selftest
from mhckit.doctor.findings import Finding, exit_code
from mhckit.doctor.report import summary
from mhckit.doctor.selftest import Size
from mhckit.testing import OPERATORS

examine_module = sys.modules["mhckit.doctor.examine"]
INSTALLED = ["mhckit", "torch", "Triton", "C compiler", "host code", "extras"]
EXAMINED = ["GPU", *INSTALLED, "settings", "CUDA tensors", "CPU tensors"]


@pytest.fixture(autouse=True)
def _small_and_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(selftest, "SIZES", (Size(5, 7, torch.float32),))


def test_json_and_the_screen_say_the_same() -> None:
    as_json = CliRunner().invoke(app, ["doctor", "--json"])
    assert as_json.exit_code == 0, as_json.output
    data = json.loads(as_json.stdout)
    assert data["exit_code"] == 0
    assert [finding["name"] for finding in data["findings"]] == [*EXAMINED, *OPERATORS, "copy", "speed"]
    screen = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "250"})
    assert screen.exit_code == 0
    assert "\x1b" not in screen.stdout
    rows = [line for line in screen.stdout.splitlines() if not line.lstrip().startswith("->")]
    assert len(rows) == len(data["findings"]) + 1
    for row, finding in zip(rows, data["findings"], strict=False):
        assert row.split(maxsplit=1)[0] == finding["status"]
        assert finding["name"] in row and finding["seen"] in row


def test_a_wrong_operator_is_told_by_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mhckit.junction

    def wrong(x: torch.Tensor, *args: object, **kwargs: object) -> object:
        y, *rest = right(x, *args, **kwargs)
        return (y if x.dtype == torch.float64 else 1.1 * y, *rest)

    monkeypatch.setattr(mhckit, "junction", wrong)
    screen = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "250"})
    assert screen.exit_code == 1 and "1 failed: junction" in screen.stdout and "->" in screen.stdout
    as_json = CliRunner().invoke(app, ["doctor", "--json"])
    assert as_json.exit_code == json.loads(as_json.stdout)["exit_code"] == 1


def test_a_nan_is_still_json(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mhckit.expand
    monkeypatch.setattr(
        mhckit, "expand", lambda h, n: right(h, n) if h.dtype == torch.float64 else right(h, n) * torch.nan
    )
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1 and "NaN" not in result.stdout.replace('"', "")


def test_a_part_that_raises_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising() -> None:
        raise RuntimeError("CUDA driver: initialization error")

    monkeypatch.setattr(examine_module, "current_gpu", raising)
    told: list[str] = []
    findings = examine_package(told.append)
    assert findings[0].status == "failed" and "initialization error" in findings[0].seen
    assert [finding.name for finding in findings] == [*EXAMINED, *OPERATORS, "copy", "speed"]
    assert "self-test: junction ok" in told


def test_exit_code_and_summary() -> None:
    well = [Finding("a", "ok", ""), Finding("b", "skipped", "")]
    assert (exit_code(well), summary(well)) == (0, "nothing is wrong here")
    warned = [*well, Finding("c", "warning", "")]
    assert (exit_code(warned), summary(warned)) == (0, "1 warning: c")
    failed = [*warned, Finding("d", "failed", ""), Finding("e", "failed", "")]
    assert (exit_code(failed), summary(failed)) == (1, "2 failed: d, e; 1 warning: c")


def test_without_triton_in_a_process_of_its_own() -> None:
    """Nothing but JSON on stdout, and no word on stderr where nobody watches."""
    code = """
import sys
sys.modules["triton"] = None
import torch
from mhckit.doctor import selftest
torch.cuda.is_available = lambda: False
selftest.SIZES = (selftest.Size(5, 7, torch.float32),)
sys.argv = ["mhckit", "doctor", "--json"]
from mhckit.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["Triton"]["status"] == "skipped" and "triton" in findings["Triton"]["seen"]
    assert all(findings[operator]["status"] == "ok" for operator in OPERATORS)


def test_help_tells_the_exit_code() -> None:
    result = CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "--json" in result.output and "exit code is 0" in result.output
