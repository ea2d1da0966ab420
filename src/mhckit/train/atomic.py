"""Files that are there whole or not at all, also after a crash: written beside, flushed to the disk, then renamed."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What a killed process left. A living one writes to its file all the time.
ABANDONED_SECONDS = 3600


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """A path to write to; it becomes ``target`` when the block ends, and nothing if the block raises."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    flush(target.parent)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(f".*.{'[0-9a-f]' * 32}.tmp"):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                path.unlink()
        except FileNotFoundError:  # its process has just finished, or another one cleans up too
            continue
