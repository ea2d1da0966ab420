"""A model to look into, wherever it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["run", "checkpoint", "transformers"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Source:
    """A model on its device, in evaluation mode, and how text becomes its tokens.

    Attributes:
        kind: what it was read from.
        model: with connections that `mhckit.health` finds.
        loss: the mean next-token loss of tokens [B, S], which runs the model once.
        vocab_size: number of different tokens.
        longest: no sequence it was made for is longer; None if that is not known.
        tokenizer: a JSON file of the library tokenizers; None for bytes.
        tokenizer_known: whether it is that of the model's training; if not, bytes are a guess.
        facts: for the report.
    """

    kind: Kind
    model: nn.Module
    loss: Callable[[Tensor], Tensor]
    vocab_size: int
    longest: int | None = None
    tokenizer: Path | None = None
    tokenizer_known: bool = True
    facts: dict[str, str] = field(default_factory=dict)


def pick_device(wanted: Device) -> torch.device:
    """Where the model runs; auto is a GPU where there is one."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {wanted!r}")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, and torch.cuda.is_available() is False")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
