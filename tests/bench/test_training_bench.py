"""The measurement of training steps, on the CPU and without its clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mhckit import HyperConnection
from mhckit.bench import training
from mhckit.bench.training import REST, VARIANTS, TrainingCase, distance, overhead_table, part_of
from mhckit.models import LanguageModel, ModelConfig

CONFIG = ModelConfig(vocab_size=31, dim=32, layers=2, heads=4, hidden=48)


def _gradients(variant: training.Variant, change: Callable[[LanguageModel], None] = lambda model: None) -> torch.Tensor:
    """As the measurement compares them."""
    model = variant.build(CONFIG, device="cpu")
    training.spread_out(model)
    change(model)
    tokens = torch.randint(0, 31, (2, 17), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return training.gradients_of(model)


FUSED = next(variant for variant in VARIANTS if variant.residual != "plain")


def test_variants_of_mhc_are_the_same_model() -> None:
    """The same gradients but for rounding, so that their times compare."""
    fused, *others = (_gradients(variant) for variant in VARIANTS if variant.residual != "plain")
    assert fused.shape == (2 * CONFIG.layers, 24)
    for gradients in others:
        assert distance(gradients, fused) < 0.5 * training.TOLERANCE


def _transpose(model: LanguageModel) -> None:
    for module in model.modules():
        if isinstance(module, HyperConnection):
            module.recipe = module.recipe.replace(stored="out_in" if module.recipe.stored == "in_out" else "in_out")


def _mute(model: LanguageModel) -> None:
    for block in model.blocks:
        block.mlp.down.weight.data.zero_()


@pytest.mark.parametrize("change", [_transpose, _mute], ids=["transposed", "muted"])
def test_another_model_is_told_apart(change: Callable[[LanguageModel], None]) -> None:
    assert distance(_gradients(FUSED, change), _gradients(FUSED)) > 2 * training.TOLERANCE


CASE = TrainingCase("small", CONFIG, 1, 8)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measurements without a GPU: who was timed, in order; the first variant takes 10 ms a step, the next 20, ..."""
    timed: list[str] = []
    names = [variant.name for variant in VARIANTS]

    def prepare(case: TrainingCase, variant: training.Variant) -> training.Run:
        gradients = {"plain": 3.0, "mhckit": 2.0, "mhckit, recompute": 2.01, "unfused PyTorch": 2.3}
        line = {"case": case.name, "variant": variant.name}
        return training.Run(variant, line, torch.full((2, 24), gradients[variant.name]), lambda: variant.name)

    def milliseconds(step: Callable[[], str]) -> list[float]:
        timed.append(step())
        drift = timed.count(timed[-1])
        return [10.0 * (1 + names.index(timed[-1])) + drift] * 3

    monkeypatch.setattr(training, "_prepare", prepare)
    monkeypatch.setattr(training, "_step_milliseconds", milliseconds)
    monkeypatch.setattr(training, "_free", lambda: None)
    return timed


def test_a_variant_with_other_gradients_is_refused(turns: list[str]) -> None:
    lines = list(training.measure(CASE))
    assert [line["kind"] for line in lines] == ["training", "training", "training", "refused"]
    assert "milliseconds" not in lines[-1] and lines[-1]["error"] > training.TOLERANCE


def test_variants_take_turns_and_the_unfused_one_comes_alone(turns: list[str]) -> None:
    lines = list(training.measure(CASE))
    *together, alone = (variant.name for variant in VARIANTS)
    assert turns == together * training.ROUNDS + [alone] * training.ROUNDS
    middle = (1 + training.ROUNDS) / 2
    assert [line["milliseconds"] for line in lines[:3]] == [10 + middle, 20 + middle, 30 + middle]
    assert lines[0]["tokens_per_second"] == round(8e3 / (10 + middle))


def test_too_large_is_said(monkeypatch: pytest.MonkeyPatch, turns: list[str]) -> None:
    def out_of_memory(case: TrainingCase, variant: training.Variant) -> training.Run:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training, "_prepare", out_of_memory)
    lines = list(training.measure(CASE))
    assert [line["absent"] for line in lines] == ["out of memory"] * 4 and turns == []
    assert overhead_table(lines).row_count == 4


def test_overhead_is_over_the_plain_residual() -> None:
    size = dict(case="small", channels=32, layers=2, batch=1, positions=8, kind="training", tokens_per_second=1)
    lines = [
        dict(variant="plain", milliseconds=100.0, peak_bytes=3e9, activation_bytes=2e9, **size),
        dict(variant="mhckit", milliseconds=107.0, peak_bytes=4e9, activation_bytes=2.5e9, **size),
    ]
    columns = [list(column.cells) for column in overhead_table(lines).columns]
    assert columns[3] == ["+0.0%", "+7.0%"] and columns[6] == ["1.00x", "1.25x"]


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("write_project_kernel", "mhckit"),
        ("streams_bwd_kernel", "mhckit"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NTN", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_poi_fused_mul_silu_3", REST),
    ],
)
def test_parts(kernel: str, part: str) -> None:
    assert part_of(kernel) == part
