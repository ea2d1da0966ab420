"""From a name to an Inspection: open, read a text, observe, measure, find."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import torch
from torch import Tensor

import mhckit

from .findings import find
from .measure import mixing_depth, sublayers
from .measured import Inspection
from .observe import observe
from .open import open_source
from .source import Device, Source
from .text import Reading, read


def inspect_source(
    name: str,
    *,
    text: Path | None = None,
    tokens: int = 512,
    token: int | None = None,
    tokenizer: Path | None = None,
    config: Path | None = None,
    device: Device = "auto",
) -> Inspection:
    """Look inside a trained model while it reads a text.

        inspection = inspect_source("runs/tiny-mhc")

    Args:
        name: a run of `mhckit train`, a checkpoint of one, a .safetensors file of `mhckit export`, or the folder or
            the hub's name of a model of transformers.
        text: a UTF-8 file; a module of Python's standard library by default.
        tokens: how many are read at most.
        token: the one whose H is shown alone; the middle one by default.
        tokenizer: a JSON file of the library tokenizers, where the model does not say its own.
        config: YAML of `mhckit train`, for a checkpoint that was taken away from its run.
        device: where the model runs; auto is a GPU where there is one.
    """
    source = open_source(name, config=config, device=device)
    reading = read(source, file=text, tokenizer=tokenizer, count=tokens)
    return inspect_model(source, reading, name, token)


def inspect_model(source: Source, reading: Reading, name: str, token: int | None = None) -> Inspection:
    """Look inside a model that is open already."""
    count = reading.tokens.numel()
    index = _index(token, count)
    place = next(source.model.parameters()).device
    observed, loss = observe(source.model, lambda: source.loss(reading.tokens.to(place)))
    measured = sublayers(observed, index)
    loss_value = _loss(loss, reading.tokens)
    recipe = observed[0].recipe
    return Inspection(
        name=name,
        kind=source.kind,
        recipe=dataclasses.asdict(recipe),
        streams=recipe.streams,
        tokens=count,
        token=index,
        token_text=reading.text_of(index),
        text=reading.beginning,
        loss=loss_value,
        sublayers=measured,
        mixing_depth=mixing_depth(measured),
        findings=find(measured, recipe, loss_value),
        facts=_facts(source, reading, place),
    )


def _index(token: int | None, count: int) -> int:
    if token is None:
        return count // 2
    if not 0 <= token < count:
        raise ValueError(f"token must be from 0 to {count - 1}, for {count} tokens were read, got {token}")
    return token


def _loss(loss: Tensor, tokens: Tensor) -> float | None:
    """None where sequences are so short that nothing is predicted."""
    return float(loss) if tokens.shape[1] > 1 else None


def _facts(source: Source, reading: Reading, place: torch.device) -> dict[str, str]:
    gpu = torch.cuda.get_device_name(place) if place.type == "cuda" else ""
    rows, length = reading.tokens.shape
    return {
        **source.facts,
        "parameters": f"{sum(each.numel() for each in source.model.parameters()):,}",
        "text": reading.origin,
        "tokens": f"{rows} x {length}, {reading.tokenized}",
        "device": gpu or str(place),
        "torch": str(torch.__version__),
        "mhckit": mhckit.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
