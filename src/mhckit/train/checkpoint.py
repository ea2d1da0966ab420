"""Checkpoints that are there whole or not at all, by torch.distributed.checkpoint.

    folder/step-00000100/               complete: the rename that gives it this name comes last
        __<rank>_0.distcp .metadata     weights, optimizer, random generators, each process its part (`state`)
        manifest.json                   step, config, size and digest of every file (`manifest`)
    folder/step-00000200.unfinished/    being written, being deleted, or left by a killed process;
                                        the next save removes it

Many processes need a folder that all of them see. Two runs must not share one.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .atomic import flush
from .export import export_safetensors
from .manifest import MANIFEST, FileFacts, Manifest, as_json, describe
from .state import own_files, read_state, write_state
from .together import on_every_rank, on_first_rank, rank_and_world

__all__ = ["export_safetensors", "latest", "load", "save"]

NAME = re.compile(r"step-(\d{8,})")
UNFINISHED = ".unfinished"


def save(
    folder: str | Path, step: int, model: nn.Module, optimizer: Optimizer, *, config: dict[str, Any], keep: int = 2
) -> Path:
    """Write a checkpoint, to be called by all processes; returns its path.

    Args:
        folder: of the checkpoints of one run.
        step: more than that of any checkpoint in the folder.
        model: plain, sharded by FSDP2, or wrapped by DDP.
        config: what must be the same for the checkpoint to be loaded, in JSON's types.
        keep: how many to keep, this one included. Older ones are deleted when it is complete.
    """
    folder, config = Path(folder), as_json(config)
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    target = folder / f"step-{step:08d}"
    temporary = target.with_name(target.name + UNFINISHED)
    on_first_rank(lambda: _prepare(temporary, step, config))
    write_state(temporary, model, optimizer)
    written = on_every_rank(lambda: {path.name: describe(path) for path in own_files(temporary)})
    files = {name: facts for part in written for name, facts in part.items()}
    manifest = Manifest(step, len(written), config, files)
    on_first_rank(lambda: _complete(temporary, target, manifest, keep))
    return target


def latest(folder: str | Path) -> Path | None:
    """The complete checkpoint of the highest step; None if there is none."""
    found = _complete_ones(Path(folder))
    return found[max(found)] if found else None


def load(path: str | Path, model: nn.Module, optimizer: Optimizer, *, config: dict[str, Any]) -> int:
    """Read a checkpoint into model, optimizer and random generators, to be called by all processes; returns the step.

    Raises ValueError for one that is incomplete, corrupt or of another config: every file is read and compared with its
    digest first. With another number of processes than wrote it, the random generators of additional ones stay as they
    are. Nothing in a checkpoint is run: what is not plain data is refused (`description`).
    """
    path = Path(path)
    rank, world = rank_and_world()

    def examine() -> Manifest:
        manifest = Manifest.read(path)
        manifest.compare(path, config)
        manifest.verify(path, sorted(manifest.files)[rank::world])
        return manifest

    manifest = on_every_rank(examine)[rank]
    read_state(path, manifest.files, model, optimizer)
    return manifest.step


def _prepare(temporary: Path, step: int, config: dict[str, Any]) -> None:
    folder = temporary.parent
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"the folder of checkpoints must be one, and {folder} is a file")
    _check_room(folder, step, config)
    for path in _unfinished_ones(folder):
        shutil.rmtree(path)
    temporary.mkdir(parents=True)


def _check_room(folder: Path, step: int, config: dict[str, Any]) -> None:
    """Refuses what `latest` would not find afterwards, and what would in time delete the checkpoints of others."""
    found = _complete_ones(folder)
    if found and max(found) >= step:
        raise ValueError(
            f"step {step} cannot be saved beside {found[max(found)]}, which would stay the latest: "
            "go on from there, move it away, or take another folder"
        )
    for path in found.values():
        manifest = _read_or_none(path)
        if manifest is not None:
            manifest.compare(path, config)


def _complete(temporary: Path, target: Path, manifest: Manifest, keep: int) -> None:
    for name, facts in manifest.files.items():
        _check_visible(temporary / name, facts)
    manifest.write(temporary)
    temporary.rename(target)
    flush(target.parent)
    found = _complete_ones(target.parent)
    for step in sorted(found)[:-keep]:
        if _read_or_none(found[step]) is not None:
            _delete(found[step])


def _check_visible(path: Path, facts: FileFacts) -> None:
    if not path.is_file() or path.stat().st_size != facts.bytes:
        raise ValueError(f"{path} was written by another process and is not seen by rank 0: all need the same folder")


def _delete(path: Path) -> None:
    """First the name, so that what a killed process leaves is not taken for complete."""
    shutil.rmtree(path.rename(path.with_name(path.name + UNFINISHED)))


def _complete_ones(folder: Path) -> dict[int, Path]:
    matches = ((path, NAME.fullmatch(path.name)) for path in _list(folder))
    return {int(match[1]): path for path, match in matches if match and (path / MANIFEST).is_file()}


def _unfinished_ones(folder: Path) -> list[Path]:
    return [
        path
        for path in _list(folder)
        if path.name.endswith(UNFINISHED) and NAME.fullmatch(path.name.removesuffix(UNFINISHED))
    ]


def _list(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _read_or_none(path: Path) -> Manifest | None:
    """None for a damaged manifest: no reason to stop a run, but such a checkpoint is not ours to delete."""
    try:
        return Manifest.read(path)
    except ValueError:
        return None
