"""The measurement of training steps, on the CPU and without its clock."""

from __future__ import annotations

import pytest
import torch

from mhckit.bench import training
from mhckit.bench.training import REST, VARIANTS, TrainingCase, overhead_table, part_of
from mhckit.models import ModelConfig

CONFIG = ModelConfig(vocab_size=31, dim=32, layers=2, heads=4, hidden=48)


def _loss_and_gradients(variant: training.Variant) -> tuple[float, list[torch.Tensor]]:
    model = variant.build(CONFIG, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    tokens = torch.randint(0, 31, (2, 17), generator=torch.Generator().manual_seed(0))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.item(), [parameter.grad.float() for parameter in model.parameters()]


def test_variants_of_mhc_are_the_same_model() -> None:
    """The same loss and gradients but for rounding, so that their times compare."""
    fused, *others = (_loss_and_gradients(variant) for variant in VARIANTS if variant.residual != "plain")
    for loss, gradients in others:
        assert abs(loss - fused[0]) < 1e-2 * fused[0]
        distance = sum((a - b).square().sum() for a, b in zip(gradients, fused[1], strict=True))
        assert distance < 0.05**2 * sum(a.square().sum() for a in fused[1])


def test_a_variant_with_another_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"plain": 3.0, "mhckit": 2.0, "mhckit, recompute": 2.01, "unfused PyTorch": 2.2}
    monkeypatch.setattr(training, "_measure_variant", lambda case, variant: {"loss": losses[variant.name]})
    monkeypatch.setattr(training, "_free", lambda: None)
    kinds = [line["kind"] for line in training.measure(TrainingCase("small", CONFIG, 1, 8))]
    assert kinds == ["training", "training", "training", "refused"]


def test_too_large_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(case: TrainingCase, variant: training.Variant) -> dict[str, float]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training, "_measure_variant", out_of_memory)
    monkeypatch.setattr(training, "_free", lambda: None)
    lines = list(training.measure(TrainingCase("small", CONFIG, 1, 8)))
    assert [line["absent"] for line in lines] == ["out of memory"] * 4
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
