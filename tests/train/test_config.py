"""The configuration of a run: where its values come from, what it refuses, and what follows from it alone."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhckit.models import MODEL_PRESETS, LanguageModel, ModelConfig
from mhckit.train import PRESETS, TrainConfig, load_config
from mhckit.train.presets import to_yaml
from mhckit.train.schedule import learning_rate_factor
from mhckit.train.throughput import flops_per_token, peak_flops


def _yaml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_presets() -> None:
    assert PRESETS.keys() == MODEL_PRESETS.keys()
    for name in PRESETS:
        config = load_config(preset=name)
        assert config.model.replace(dtype="float32") == MODEL_PRESETS[name].replace(dtype="float32")
        assert config.run_name == f"{name}-mhc"
    assert load_config() == TrainConfig(run_name="tiny-mhc")
    assert load_config(preset="deep").model.dtype == "bfloat16"


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    path = _yaml(tmp_path, "preset: deep\nlr: 5e-4\nrecompute: off\nbatch_size: 6\nmodel: {layers: 5, residual: hc}")
    config = load_config(path, batch_size=8, layers=7)
    assert (config.lr, config.recompute, config.batch_size) == (5e-4, "off", 8)
    assert (config.model.layers, config.model.residual, config.model.dim) == (7, "hc", 512)
    assert config.run_name == "deep-hc"


def test_scale() -> None:
    config = load_config(preset="3b", scale=0.2, vocab_size=1024)
    assert config.model == MODEL_PRESETS["3b"].scaled(0.2).replace(vocab_size=1024, dtype="bfloat16")
    assert config.run_name == "3b-x0.2-mhc"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    config = load_config(preset="120m", residual="plain", betas=(0.8, 0.9), max_minutes=3, compile="blocks")
    assert load_config(_yaml(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr: 1", "lrr is no option: did you mean lr?"),
        ("layer: 3", "did you mean model.layers?"),
        ("dim: 64", "write model.dim"),
        ("model: {layer: 3}", "model.layer is no option: did you mean model.layers?"),
        ("model: 3", "model must be a map"),
        ("xyzzy: 3", "xyzzy is no option: known are"),
        ("- 1", "must hold a map of options, got list"),
        ("a: [", "is no YAML"),
    ],
)
def test_a_file_with_mistakes(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message.replace("?", r"\?")):
        load_config(_yaml(tmp_path, text))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no file"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"layer": 3}, "did you mean layers?"),
        ({"preset": "2b"}, "preset must be one of tiny"),
        ({"lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"lr": 0}, "lr must be positive, got 0"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"max_steps": 1.5}, "max_steps must be an int, got 1.5"),
        ({"seed": True}, "seed must be an int, got True"),
        ({"tied": 1}, "model.tied must be true or false, got 1"),
        ({"data": 3}, "data must be text or null"),
        ({"betas": [0.9]}, "betas must be a list of 2 values"),
        ({"betas": [0.9, 1]}, "betas must be in"),
        ({"loss": "half"}, "loss must be 'full' or 'chunked' or 'fused', got 'half'"),
        ({"recompute": "some"}, "recompute must be 'off' or 'auto' or an int, got 'some'"),
        ({"recompute": 0}, "recompute must be off, auto or a positive int"),
        ({"recompute": "auto", "residual": "plain"}, "residual='plain' has none"),
        ({"batch_size": 6, "grad_accum": 4}, "batch_size must be a multiple of grad_accum, got 6 and 4"),
        ({"warmup_steps": 30, "max_steps": 20}, "warmup_steps must fit"),
        ({"warmup_steps": -1}, "warmup_steps must not be negative"),
        ({"dtype": "float16"}, "needs loss scaling"),
        ({"run_name": "../other"}, "run_name must be the name of a folder"),
        ({"eval_batches": 0}, "eval_batches must be positive"),
    ],
)
def test_values_that_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message.replace("?", r"\?")):
        load_config(**flags)


def test_values_in_other_spellings() -> None:
    config = load_config(lr="1e-3", max_steps=1e3, recompute="4", seed=2**62 + 1, betas=[0, "0.5"])
    assert (config.lr, config.max_steps, config.recompute, config.seed) == (1e-3, 1000, 4, 2**62 + 1)
    assert config.betas == (0.0, 0.5) and isinstance(config.max_steps, int)


def test_python_is_held_to_the_same() -> None:
    with pytest.raises(TypeError, match="model must be a ModelConfig, got dict"):
        TrainConfig(model={"dim": 3})
    with pytest.raises(ValueError, match="lr must be positive"):
        TrainConfig().replace(lr=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().lr = 1


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", {1: 0.1, 10: 1, 60: 1, 110: 1}),
        ("cosine", {1: 0.1, 10: 1, 35: 0.2 + 0.8 * (0.5 + 0.125**0.5), 60: 0.6, 110: 0.2}),
        ("linear", {1: 0.1, 10: 1, 60: 0.6, 110: 0.2}),
        ("wsd", {1: 0.1, 10: 1, 60: 1, 70: 1, 90: 0.6, 110: 0.2}),
    ],
)
def test_schedules(schedule: Any, factors: dict[int, float]) -> None:
    config = TrainConfig(schedule=schedule, warmup_steps=10, max_steps=110, final_lr=0.2, decay_steps=40)
    assert {step: learning_rate_factor(step, config) for step in factors} == pytest.approx(factors)
    rates = [learning_rate_factor(step, config) for step in range(1, 111)]
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) <= 0.1 + 1e-9


def test_schedules_at_their_edges() -> None:
    assert learning_rate_factor(1, TrainConfig(warmup_steps=0, max_steps=1, final_lr=0.3)) == pytest.approx(0.3)
    assert learning_rate_factor(5, TrainConfig(warmup_steps=5, max_steps=5)) == 1
    wsd = TrainConfig(schedule="wsd", warmup_steps=0, max_steps=100)
    assert learning_rate_factor(80, wsd) == 1 > learning_rate_factor(81, wsd)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_of_the_products(tied: bool) -> None:
    config = ModelConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, hidden=64, residual="plain", tied=tied)
    tokens = torch.randint(64, (2, 16))
    with FlopCounterMode(display=False) as counter:
        LanguageModel(config)(tokens, tokens).backward()
    # Norms have weights that multiply no matrix, and the counter takes all pairs of positions for attention, whose
    # backward computes the scores once more.
    norms = 6 * (2 * config.layers + 1) * config.dim
    counts = counter.get_flop_counts()["Global"]
    attention = sum(count for operator, count in counts.items() if "attention" in str(operator))
    products = (counter.get_total_flops() - attention) / tokens.numel()
    assert flops_per_token(config, 16) == products + norms + 6 * config.layers * config.dim * 16


def test_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for name, peak in {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA L4": 121e12,
        "Some GPU": None,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device, name=name: name)
        assert peak_flops(gpu, "bfloat16") == peak
    assert peak_flops(gpu, "float32") is None and peak_flops(torch.device("cpu"), "bfloat16") is None
