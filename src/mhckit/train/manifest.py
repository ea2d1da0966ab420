"""What a checkpoint says about itself: step, config, and size and digest of every file.

The manifest is the last file to be written: a folder without one is no complete checkpoint. It carries a digest of
itself, so that a step or config that changed on the disk is noticed, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .atomic import written_whole

MANIFEST = "manifest.json"
KIND, VERSION = "mhckit checkpoint", 1
READ_BYTES = 1 << 22
SHOWN_DIFFERENCES = 8


@dataclass(frozen=True)
class FileFacts:
    """How a file is recognised."""

    bytes: int
    blake2b: str


@dataclass(frozen=True)
class Manifest:
    """``world`` is the number of processes that wrote; ``config`` holds JSON's types alone."""

    step: int
    world: int
    config: dict[str, Any]
    files: dict[str, FileFacts]

    def write(self, folder: Path) -> None:
        content = {"kind": KIND, "version": VERSION, **asdict(self)}
        with written_whole(folder / MANIFEST) as file:
            file.write_text(json.dumps(content | {"digest": _digest(content)}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ValueError for anything that is not the manifest of a complete checkpoint."""
        file = folder / MANIFEST
        if not file.is_file():
            raise ValueError(_why_none(folder))
        try:
            content = json.loads(file.read_bytes())
            kind, version = content["kind"], content["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{file} is corrupt, or not of mhckit: {error!r}") from error
        if kind != KIND or version != VERSION:
            raise ValueError(f"{file} must be of a {KIND}, version {VERSION}; it is of a {kind}, version {version}")
        if content.pop("digest", None) != _digest(content):
            raise ValueError(f"{file} is corrupt: its digest is another one")
        try:
            files = {name: FileFacts(**facts) for name, facts in content["files"].items()}
            manifest = cls(content["step"], content["world"], content["config"], files)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not of mhckit: {error!r}") from error
        for name in files:
            if Path(name).name != name:
                raise ValueError(f"{file} is not of mhckit: it lists {name!r}, which does not lie beside it")
        return manifest

    def verify(self, folder: Path, names: Iterable[str]) -> None:
        """Raises ValueError if one of these files is not as it was written."""
        for name in names:
            want = self.files[name]
            if not (folder / name).is_file():
                raise ValueError(f"{folder} is corrupt: {name} is missing")
            size = (folder / name).stat().st_size
            if size != want.bytes:
                raise ValueError(f"{folder} is corrupt: {name} must have {want.bytes} bytes, got {size}")
            if describe(folder / name) != want:
                raise ValueError(f"{folder} is corrupt: the contents of {name} are not those that were written")

    def compare(self, folder: Path, config: dict[str, Any]) -> None:
        """Raises ValueError that names the fields in which the config is another one."""
        differences = list(_differences(self.config, as_json(config)))
        if differences:
            more = len(differences) - SHOWN_DIFFERENCES
            shown = "; ".join(differences[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
            raise ValueError(f"{folder} was written with another config: {shown}")


def describe(path: Path) -> FileFacts:
    """The facts of a file as it is now."""
    digest, size = hashlib.blake2b(digest_size=32), 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileFacts(size, digest.hexdigest())


def as_json(config: dict[str, Any]) -> dict[str, Any]:
    """The config as it comes back from a file: tuples are lists."""
    try:
        return json.loads(json.dumps(config))
    except TypeError as error:
        raise TypeError(f"config must hold numbers, strings, lists and dicts alone: {error}") from error


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=32).hexdigest()


def _why_none(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no checkpoint {folder}"
    if any(folder.glob("*.distcp")):
        return f"{folder} is incomplete: it has no {MANIFEST}, which is written last"
    within = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    hint = f"; it holds {', '.join(within)}" if within else ""
    return f"{folder} is no checkpoint of mhckit: it has no {MANIFEST}{hint}"


def _differences(there: Any, here: Any, name: str = "") -> Iterable[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in dict.fromkeys([*there, *here]):
            inner = f"{name}.{key}" if name else key
            if key not in here:
                yield f"{inner} is {there[key]!r} there and absent here"
            elif key not in there:
                yield f"{inner} is absent there and {here[key]!r} here"
            else:
                yield from _differences(there[key], here[key], inner)
    elif there != here:
        yield f"{name} is {there!r} there and {here!r} here"
