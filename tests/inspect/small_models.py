"""Small language models whose connections are as a test wants them, and the way from there to an inspection."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mhckit.inspect import Finding, Inspection, inspect_source
from mhckit.models import LanguageModel, ModelConfig
from mhckit.modules import HyperConnection
from mhckit.train.checkpoint import export_safetensors

SHAPE = ModelConfig(vocab_size=256, dim=16, layers=2, heads=2, hidden=16, streams=3)
SUBLAYERS = 2 * SHAPE.layers
TOKENS = 24


def connections(model: nn.Module) -> list[HyperConnection]:
    return [module for module in model.modules() if isinstance(module, HyperConnection)]


@torch.no_grad()
def healthy(**changes: Any) -> LanguageModel:
    """Mixing that differs between tokens, sublayers and streams, without extremes."""
    model = LanguageModel(SHAPE.replace(**changes), seed=3)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith((".out.weight", ".down.weight")):
            parameter.mul_(40)
    for connection in connections(model):
        assert connection.scale is not None
        connection.scale.fill_(0.5)
        connection.bias.add_(torch.randn(connection.bias.shape, generator=generator), alpha=0.8)
    return model


def residual_bias(connection: HyperConnection) -> torch.Tensor:
    """The part of the bias that is the N x N logits, as a view."""
    n = connection.recipe.streams
    return connection.bias.data[2 * n :].view(n, n)


def inspect_saved(model: LanguageModel, folder: Path, **options: Any) -> Inspection:
    """Through the file that `mhckit export` writes."""
    file = export_safetensors(model, folder / "model.safetensors")
    return inspect_source(str(file), **{"tokens": TOKENS, "device": "cpu", **options})


def said(inspection: Inspection, pattern: str, *levels: str) -> list[Finding]:
    """The findings of some levels, by default what is not good, whose text has the pattern."""
    wanted = levels or ("wrong", "note")
    return [each for each in inspection.findings if each.level in wanted and re.search(pattern, each.text)]


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder and when it was written, to show that nothing there changed."""
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in sorted([folder, *folder.rglob("*")])
    }
