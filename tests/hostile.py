"""Checkpoints as someone who means harm would write them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mhckit.train.manifest import Manifest, describe


class Bomb:
    """Unpickled, it would make a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def sign(checkpoint: Path) -> None:
    """Whoever changes a checkpoint can also write the manifest that fits it."""
    manifest = Manifest.read(checkpoint)
    files = {name: describe(checkpoint / name) for name in manifest.files}
    Manifest(manifest.step, manifest.world, manifest.config, files).write(checkpoint)


def describe_otherwise(checkpoint: Path, change: Callable[[Any], None]) -> None:
    """Change the description of a checkpoint that was written here."""
    path = checkpoint / ".metadata"
    description = pickle.loads(path.read_bytes())
    change(description)
    path.write_bytes(pickle.dumps(description))
    sign(checkpoint)
