"""Runs that take a second: a model of two blocks, on a text that is made here."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from mhckit.models import ModelConfig
from mhckit.train import TrainConfig

MODEL = ModelConfig(vocab_size=320, dim=32, layers=2, heads=2, hidden=64)
# Numbers of the computation, which must be the same however often a run was interrupted; others are of the clock.
COMPUTED = ("step", "loss", "grad_norm", "lr", "validation_loss")


def write_text(folder: Path) -> Path:
    """Words in random order: something to learn, and never the same twice."""
    words = ("the", "stream", "writes", "what", "it", "reads", "and", "keeps", "every", "sum", "at", "one")
    path = folder / "text.txt"
    chooser = random.Random(0)
    path.write_text(" ".join(chooser.choice(words) for _ in range(6000)))
    return path


def small_config(folder: Path, **changes: Any) -> TrainConfig:
    defaults: dict[str, Any] = {
        "model": MODEL,
        "data": str(write_text(folder)),
        "out": str(folder / "runs"),
        "device": "cpu",
        "seq_len": 32,
        "batch_size": 4,
        "max_steps": 12,
        "warmup_steps": 3,
        "log_every": 4,
        "checkpoint_every": 5,
        "eval_every": 6,
        "eval_batches": 2,
        "health_every": 0,
    }
    return TrainConfig(**{**defaults, **changes})


def as_flags(config: TrainConfig) -> list[str]:
    """The command line of a config."""
    values = {**config.to_dict(), **config.to_dict()["model"]}
    flags = []
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(option if value else option.replace("--", "--no-"))
        elif isinstance(value, list):
            flags += [option, *map(str, value)]
        elif value is not None and name != "model":
            flags += [option, str(value)]
    return flags


def computed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: line[name] for name in COMPUTED if name in line} for line in lines]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
