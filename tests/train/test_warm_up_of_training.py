"""Before its first step on a GPU a run compiles its kernels, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import MODEL, small_config

from mhckit.models import LanguageModel
from mhckit.modules.warmup import Warmup
from mhckit.train import loop
from mhckit.train.distributed import Place
from mhckit.train.progress import Silence

GPU = Place(0, 1, torch.device("cuda", 0))


class Said(Silence):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []

    def warmup(model: LanguageModel, **options: Any) -> Warmup:
        made.append(options)
        return Warmup(18, 17, 1, 6.25)

    monkeypatch.setattr(loop, "warmup", warmup)
    return made


def test_with_the_dtype_and_the_recompute_of_the_run(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    shape = MODEL.replace(dtype="bfloat16")
    said = Said()
    loop.warm_up(small_config(tmp_path, model=shape), GPU, LanguageModel(shape, recompute=2), said)
    assert calls == [{"dtype": torch.bfloat16, "recompute": True, "device": GPU.device}]
    assert said.lines == ["18 kernels in 6.2 s: 17 compiled, 1 loaded from disk"]


def test_not_where_there_are_no_kernels(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    plain = MODEL.replace(residual="plain")
    loop.warm_up(small_config(tmp_path, model=plain), GPU, LanguageModel(plain), Said())
    loop.warm_up(small_config(tmp_path), GPU._replace(device=torch.device("cpu")), LanguageModel(MODEL), Said())
    assert calls == []


def test_a_run_warms_up_unless_it_has_all_its_steps(
    calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(loop, "warm_up", lambda *_: asked.append(1))
    config = small_config(tmp_path, max_steps=1, warmup_steps=1, eval_every=0)
    for _ in range(2):
        loop.Trainer(config, show=False).run()
    assert asked == [1]
