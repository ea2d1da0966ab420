"""Two processes (gloo, CPU) train the model that one process trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import WORLD, run_in_two
from safetensors.torch import load_file
from small_runs import as_flags, computed, small_config
from torch import Tensor, nn

from mhckit import HyperConnection, HyperHead
from mhckit.train import TrainConfig, Trainer
from mhckit.train.build import build
from mhckit.train.checkpoint import export_safetensors, latest
from mhckit.train.distributed import Place
from mhckit.train.run_folder import read_metrics

SECONDS = 150
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # as the two processes have


def _weights(config: TrainConfig) -> dict[str, Tensor]:
    folder = Path(config.out) / config.run_name
    checkpoint = latest(folder / "checkpoints")
    assert checkpoint is not None
    return load_file(export_safetensors(checkpoint, folder / "weights.safetensors"))


def _assert_equals_one_process(config: TrainConfig, tolerance: float = TOLERANCE) -> None:
    """A run that is done has the numbers and weights that one process gets, which does the same now."""
    one = config.replace(run_name=f"{config.run_name}-alone")
    single, lines = Trainer(one, show=False).run(), read_metrics(Path(config.out) / config.run_name / "metrics.jsonl")
    for want, got in zip(computed(single), computed(lines), strict=True):
        assert got == pytest.approx(want, rel=tolerance, abs=tolerance)
    for want, got in zip(single, lines, strict=True):
        if "health/phi_grad_norm" in want:
            assert got["health/phi_grad_norm"] == pytest.approx(want["health/phi_grad_norm"], rel=100 * tolerance)
    weights = _weights(config)
    for name, want in _weights(one).items():
        difference = (weights[name] - want).abs().max()
        assert difference <= tolerance, f"{name} differs by {difference}"


def test_started_by_torchrun(tmp_path: Path) -> None:
    config = small_config(tmp_path, max_steps=20, health_every=5, eval_every=3, checkpoint_every=0)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    command = [sys.executable, *launch, "-m", "mhckit", "train", *as_flags(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 20/20") == 1  # one of them prints
    _assert_equals_one_process(config)


def _configs(folder: Path) -> dict[str, TrainConfig]:
    config = small_config(folder, max_steps=6, health_every=2, grad_accum=2)
    return {
        "ddp": config.replace(run_name="ddp", parallel="ddp"),
        "recompute": config.replace(run_name="recompute", recompute=3, grad_clip=0.0),
        "half": config.replace(run_name="half", max_steps=3, schedule="constant"),
    }


def _train_all(rank: int, configs: list[TrainConfig]) -> None:
    for config in configs:
        Trainer(config, show=False).run()
    _check_dtypes(rank, configs[0].replace(parallel="fsdp"))


def _check_dtypes(rank: int, config: TrainConfig) -> None:
    """Blocks are gathered in bfloat16, connections and the head in float32; a step brings gradients to all."""
    model = build(
        config.replace(model=config.model.replace(dtype="bfloat16")), Place(rank, WORLD, torch.device("cpu"))
    ).model
    seen: dict[str, set[torch.dtype]] = {"connection": set(), "sublayer": set()}

    def look(module: nn.Module, _inputs: Any) -> None:
        kind = "connection" if isinstance(module, (HyperConnection, HyperHead)) else "sublayer"
        seen[kind] |= {parameter.dtype for parameter in module.parameters()}

    for module in model.modules():
        if isinstance(module, (HyperConnection, HyperHead)) or type(module).__name__ in ("Attention", "MLP"):
            module.register_forward_pre_hook(look)
    tokens = torch.randint(config.model.vocab_size, (2, 16))
    model(tokens, tokens).backward()
    assert seen == {"connection": {torch.float32}, "sublayer": {torch.bfloat16}}, seen
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name


def test_started_by_others(tmp_path: Path) -> None:
    """One pair of processes for all of it: starting them takes longer than what they do."""
    configs = _configs(tmp_path)
    run_in_two(_train_all, tmp_path, list(configs.values()))
    _assert_equals_one_process(configs["ddp"])
    _assert_equals_one_process(configs["recompute"])
    # One process goes on with what two began.
    rest = configs["half"].replace(max_steps=6)
    lines = Trainer(rest, show=False).run()
    alone = Trainer(rest.replace(run_name="half-alone"), show=False).run()
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in alone], rel=TOLERANCE)
    assert len(lines) == 6
