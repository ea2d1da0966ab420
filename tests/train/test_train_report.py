"""The page that a run ends with: after every run, whole, and never a reason for a run to fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import MODEL, small_config

from mhckit.train import Trainer, ending
from mhckit.train.report import make_report
from mhckit.train.step import Stepper


def _page(config: Any) -> str:
    return (Path(config.out) / config.run_name / "report.html").read_text(encoding="utf-8")


def test_a_run_and_its_resumption_end_with_a_page(tmp_path: Path) -> None:
    config = small_config(tmp_path, max_steps=5, health_every=2)
    Trainer(config, show=False).run()
    html = _page(config)
    assert "5 of 5 steps done" in html and "step 1: loss" in html
    for title in ("Loss", "Norm of all gradients", "Composite gain", "Peak memory", "Tokens per second"):
        assert f"<h3>{title}</h3>" in html
    assert '"names":["blocks.0' in html and "warmup_steps" in html

    more = config.replace(max_steps=8)
    Trainer(more, show=False).run()
    assert "8 of 8 steps done" in _page(more) and "step 1: loss" in _page(more) and "step 8: loss" in _page(more)
    assert not [*(Path(config.out) / config.run_name).glob(".*")], "drafts are gone"


def test_a_plain_residual_has_no_matrices(tmp_path: Path) -> None:
    config = small_config(tmp_path, max_steps=1, warmup_steps=0, model=MODEL.replace(residual="plain"), eval_every=0)
    Trainer(config, show=False).run()
    assert "<h2>Mixing</h2>" not in _page(config)


def test_a_run_that_diverges_leaves_a_page_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Stepper.step

    def diverges(self: Stepper, number: int) -> Any:
        done = step(self, number)
        return done._replace(loss=torch.full_like(done.loss, math.nan)) if number == 3 else done

    monkeypatch.setattr(Stepper, "step", diverges)
    config = small_config(tmp_path, max_steps=4, eval_every=0)
    with pytest.raises(FloatingPointError, match="step 3 has loss nan"):
        Trainer(config, show=False).run()
    html = _page(config)
    assert "step 3 has loss nan" in html and "1 value is not drawn" in html


@pytest.mark.parametrize(
    ("broken", "said"), [("write_report", "no report was written"), ("mean_mixing_matrices", "no mixing matrices")]
)
def test_what_goes_wrong_is_said_in_a_line_and_fails_no_run(
    broken: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_arguments: Any) -> None:
        raise OSError("no space left\non the disk")

    monkeypatch.setattr(ending, broken, fails)
    config = small_config(tmp_path, max_steps=1, warmup_steps=0, eval_every=0)
    assert len(Trainer(config).run()) == 1
    printed = capsys.readouterr().out
    assert f"{said}: OSError: no space left\n" in printed
    assert (Path(config.out) / config.run_name / "report.html").exists() == (broken != "write_report")


def test_other_processes_write_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        class here:
            rank = 1

    said: list[str] = []
    ending.leave_report(None, Other, said.append)
    assert said == []


def test_a_run_without_lines(tmp_path: Path) -> None:
    assert "No step is done yet." in make_report(small_config(tmp_path), [], None).html()
