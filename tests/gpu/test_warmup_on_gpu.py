"""After a warm-up nothing is left to compile; each in a process of its own, where nothing was compiled before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import sys
import torch
from triton import knobs
knobs.cache.dir = sys.argv[1]
import mhckit
from mhckit.bench.launches import recorded_launches
"""
OPERATORS = """
from mhckit.bench.cases import Case, OPERATORS
from mhckit.bench.compilation import first_call_compiles, warmup_compiles
case = Case(33, 136, out_norm=True)
_, compiled = warmup_compiles(case)
assert compiled > 10, compiled
for tokens in (33, 1, 4097):
    for operator in OPERATORS:
        _, again = first_call_compiles(operator, Case(tokens, 136, out_norm=True))
        assert again == 0, (operator, tokens, again)
_, others = first_call_compiles("junction", Case(33, 144, out_norm=True))
assert others > 3, "this test cannot see compilations"
"""
MODEL = """
from mhckit.models import LanguageModel, ModelConfig
shape = ModelConfig(vocab_size=64, dim=96, layers=2, heads=2, hidden=128, residual="{recipe}", dtype="bfloat16")
model = LanguageModel(shape, recompute={recompute}, device="cuda")
generator = torch.cuda.get_rng_state()
warmed = mhckit.warmup(model, dtype=torch.bfloat16, recompute={recompute})
assert warmed.kernels == warmed.compiled > 10 and warmed.loaded == 0, warmed
assert torch.equal(torch.cuda.get_rng_state(), generator)
assert all(parameter.grad is None for parameter in model.parameters())
tokens = torch.zeros(3, 11, dtype=torch.long, device="cuda")
launches = recorded_launches(lambda: model(tokens, tokens).backward())
assert not any(launch.compiled for launch in launches), [launch.name for launch in launches if launch.compiled]
assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
again = mhckit.warmup(model, dtype=torch.bfloat16, recompute={recompute})
assert (again.kernels, again.compiled, again.loaded) == (warmed.kernels, 0, 0), again
"""
FROM_DISK = """
warmed = mhckit.warmup(96, "{recipe}", norm=True)
assert warmed.compiled == 0 and warmed.loaded == warmed.kernels > 10, warmed
"""


def _run(code: str, cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + code, cache], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_operator(tmp_path: Path) -> None:
    _run(OPERATORS, tmp_path)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", ["deepseek_v4", "deepseek_v41"])
def test_a_step_of_a_model_and_then_another_process(recipe: str, recompute: bool, tmp_path: Path) -> None:
    _run(MODEL.format(recipe=recipe, recompute=recompute), tmp_path)
    _run(FROM_DISK.format(recipe=recipe), tmp_path)
