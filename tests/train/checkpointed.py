"""A small model in training, whose batches come from the random generator: resuming to the bit needs its state too."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mhckit import param_groups
from mhckit.models import LanguageModel, ModelConfig

MODEL = ModelConfig(vocab_size=16, dim=8, layers=1, heads=2, hidden=12, streams=2)
CONFIG: dict[str, Any] = {"model": dataclasses.asdict(MODEL), "corpus": "none"}


def make(seed: int = 0) -> tuple[LanguageModel, Optimizer]:
    model = LanguageModel(MODEL, seed=seed)
    return model, make_optimizer(model)


def make_optimizer(model: nn.Module) -> Optimizer:
    return AdamW(param_groups(model, weight_decay=0.1), lr=0.01)


def train(model: nn.Module, optimizer: Optimizer, steps: int, rows: slice = slice(None)) -> None:
    for _ in range(steps):
        tokens = torch.randint(MODEL.vocab_size, (4, 7))[rows]
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()


def contents(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every tensor that must come back to the bit, as a copy."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {
        f"{names[parameter]}.{kind}": value
        for parameter, values in optimizer.state.items()
        for kind, value in values.items()
    }
    everything = dict(model.state_dict()) | state | {"rng": torch.get_rng_state()}
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
        for name, tensor in everything.items()
    }


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, to show that nothing there changed."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
