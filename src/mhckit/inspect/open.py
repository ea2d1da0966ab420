"""Which kind of thing a name stands for."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from .source import Device, Source, pick_device
from .trained import CHECKPOINTS, CONFIG, is_checkpoint, is_run, open_checkpoint, open_export, open_run

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WANTED = (
    f"a run of mhckit train (with {CONFIG}), one of its {CHECKPOINTS}, a .safetensors file of mhckit export, "
    "or a model of transformers (with config.json)"
)


def open_source(name: str, *, config: Path | None = None, device: Device = "auto") -> Source:
    """The model that a path, or a name on the Hugging Face hub, stands for. Nothing there is changed.

    Args:
        name: a run of `mhckit train`, a checkpoint of one, a .safetensors file of `mhckit export`, or the folder or
            the hub's name of a model of transformers.
        config: YAML of `mhckit train`, for a checkpoint or a file that was taken away from its run.
        device: where the model runs.
    """
    path, place = Path(name), pick_device(device)
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"inspect reads {WANTED}; {path} is another kind of file, and pickles are not opened")
        return open_export(path, config, place)
    if is_checkpoint(path):
        return open_checkpoint(path, config, place)
    if config is not None:
        raise ValueError(f"--config goes with a checkpoint or a .safetensors file, and {name} is neither")
    if is_run(path):
        return open_run(path, place)
    if (path / "config.json").is_file():
        return _open_transformers(name, place)
    if path.is_dir():
        raise ValueError(f"inspect reads {WANTED}; the folder {path} is none of them")
    misspelt = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    if misspelt or not HUB_NAME.fullmatch(name):
        raise ValueError(f"inspect reads {WANTED}; there is no {path}")
    try:
        return _open_transformers(name, place)
    except ValueError as error:
        raise ValueError(
            f"there is no file or folder {name}, and as a name on the Hugging Face hub: {error}"
        ) from error


def _open_transformers(name: str, place: torch.device) -> Source:
    from .hugging_face import open_transformers

    return open_transformers(name, place)
