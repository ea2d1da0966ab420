"""`mhckit warmup` hands its options to mhckit.warmup, with Triton's cache in the folder. It runs in tests/gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs
from typer.testing import CliRunner

import mhckit
from mhckit import Recipe
from mhckit.cli import app
from mhckit.modules.warmup import Warmup


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What warmup was asked for, and the folder of the cache by then; on a machine that says it has a GPU."""
    calls: list[Any] = []

    def warmup(*args: Any, **options: Any) -> Warmup:
        calls.append((args, options, knobs.cache.dir))
        return Warmup(7, 5, 2, 1.25)

    monkeypatch.setattr(mhckit, "warmup", warmup)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(knobs.cache, "dir", knobs.cache.dir)  # put back at the end
    return calls


def test_options_arrive(asked: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "kernels"
    options = ["--recipe", "deepseek_v4", "--streams", "2", "--dtype", "float32", "--norm", "--inference"]
    result = CliRunner().invoke(app, ["warmup", "--dim", "96", *options, "--cache", str(folder)])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"7 kernels in 1.2 s: 5 compiled, 2 loaded from disk\n{folder}\n"
    recipe = Recipe.preset("deepseek_v4", streams=2)
    wanted = dict(dtype=torch.float32, norm=True, training=False, recompute=False)
    assert asked == [((96, recipe), wanted, str(folder.resolve()))]


def test_without_options(asked: list[Any]) -> None:
    folder = knobs.cache.dir
    result = CliRunner().invoke(app, ["warmup", "--dim", "96"])
    assert result.exit_code == 0, result.output
    wanted = dict(dtype=torch.bfloat16, norm=False, training=True, recompute=False)
    assert asked == [((96, Recipe.preset("paper")), wanted, folder)]


def test_what_is_wrong_is_a_line(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = CliRunner().invoke(app, ["warmup", "--dim", "96", "--recipe", "papper"])
    assert unknown.exit_code == 1 and unknown.stderr.startswith("mhckit: ") and "papper" in unknown.stderr
    assert CliRunner().invoke(app, ["warmup"]).exit_code == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    without = CliRunner().invoke(app, ["warmup", "--dim", "96"])
    assert without.exit_code == 1 and "needs a CUDA GPU" in str(without.exception or without.output)
    assert asked == []
