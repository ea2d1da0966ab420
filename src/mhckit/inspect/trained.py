"""Models of `mhckit train`: a run, one of its checkpoints, or the safetensors file of an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mhckit.models import LanguageModel, ModelConfig
from mhckit.models.loss import IGNORED
from mhckit.train.config import TrainConfig
from mhckit.train.errors import in_one_line
from mhckit.train.manifest import MANIFEST, Manifest
from mhckit.train.presets import load_config

from .source import Kind, Source

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"


def is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def open_run(folder: Path, device: torch.device) -> Source:
    """The latest checkpoint of a run."""
    from mhckit.train.checkpoint import latest

    newest = latest(folder / CHECKPOINTS)
    if newest is None:
        raise ValueError(f"{folder} is a run without a complete checkpoint in {CHECKPOINTS}: let it train further")
    return _open_step(newest, load_config(folder / CONFIG), "run", device)


def open_checkpoint(folder: Path, config: Path | None, device: torch.device) -> Source:
    """One checkpoint, with the config of its run if that is around, or with one that is given."""
    around = folder.resolve().parent
    of_run = around.parent / CONFIG
    file = config or (of_run if around.name == CHECKPOINTS and of_run.is_file() else None)
    return _open_step(folder, None if file is None else load_config(file), "checkpoint", device)


def open_export(file: Path, config: Path | None, device: torch.device) -> Source:
    """A file that `mhckit export` wrote; a config that is given wins over the one in the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            facts = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no whole safetensors file: {in_one_line(error)}") from error
    given = None if config is None else load_config(config)
    shape = given.model if given is not None else _shape_in(facts.get("config"), file)
    model = _rebuild(shape, weights, str(file)).to(device)
    return _as_source(model, given, "checkpoint", {"step": facts["step"]} if "step" in facts else {})


def _open_step(folder: Path, config: TrainConfig | None, kind: Kind, device: torch.device) -> Source:
    from mhckit.train.weights import read_weights

    weights, manifest = read_weights(folder)
    shape = config.model if config is not None else _shape_of(manifest, folder)
    model = _rebuild(shape, weights, str(folder)).to(device)
    return _as_source(model, config, kind, {"step": str(manifest.step)})


def _as_source(model: LanguageModel, config: TrainConfig | None, kind: Kind, facts: dict[str, str]) -> Source:
    return Source(
        kind=kind,
        model=model.eval(),
        loss=lambda tokens: model(tokens, _following(tokens)),
        vocab_size=model.config.vocab_size,
        longest=None if config is None else config.seq_len,
        tokenizer=None if config is None or config.tokenizer is None else Path(config.tokenizer),
        tokenizer_known=config is not None,
        facts={**facts, "dtype": model.config.dtype},
    )


def _following(tokens: Tensor) -> Tensor:
    """What each token should predict; the last one nothing."""
    return functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)


def _shape_of(manifest: Manifest, folder: Path) -> ModelConfig:
    config: Any = manifest.config
    return _shape_from(config.get("model") if isinstance(config, dict) else config, str(folder))


def _shape_in(text: str | None, file: Path) -> ModelConfig:
    if text is None:
        raise ValueError(
            f"{file} says no config in its metadata, so `mhckit export` did not write it: give the config with "
            "--config, or inspect the folder of its model"
        )
    try:
        return _shape_from(json.loads(text), str(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} has a config in its metadata that is no JSON: {error}") from error


def _shape_from(config: Any, where: str) -> ModelConfig:
    try:
        return ModelConfig(**config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} holds no config of a language model of mhckit: {error}") from error


def _rebuild(config: ModelConfig, weights: dict[str, Tensor], where: str) -> LanguageModel:
    """The model with these weights; made without memory first, so that a wrong config asks for none."""
    if config.recipe is None:
        raise ValueError(f"{where} has the plain residual, and inspect looks at hyper-connections: nothing to see here")
    if config.layers > len(weights):
        raise ValueError(f"{where} does not fit its config: {config.layers} layers, and {len(weights)} weights in all")
    try:
        model = LanguageModel(config, loss="chunked", device="meta")
    except (RuntimeError, TypeError) as error:  # sizes that overflow
        raise ValueError(f"{where} does not fit its config, which no model does: {in_one_line(error)}") from error
    _check_same(model, weights, where)
    model.load_state_dict(weights, assign=True)
    return model


def _check_same(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            raise ValueError(
                f"{where} does not fit its config: {name} must be {wanted.get(name, 'absent')}, "
                f"got {given.get(name, 'nothing')}"
            )
        if not weights[name].is_floating_point():
            raise ValueError(f"{where} is no model: {name} must be of floating point, got {weights[name].dtype}")
