"""What a checkpoint holds, read as plain data: loading one runs no code that whoever wrote it put there.

A checkpoint of torch.distributed.checkpoint describes itself in a pickle, .metadata, and keeps what is no tensor (the
optimizer's options) in pickles, too; and unpickling may run anything. Here a description may name the few classes that
it consists of, and everything else is what torch.load(weights_only=True) takes.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from .errors import in_one_line

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
}


class _Description(pickle._Unpickler):
    """Reads the description of a checkpoint, and refuses whatever else a pickle could hold.

    A pickle may also set attributes, of whatever it names: of the instances that it makes, not of classes, functions
    and members of an Enum, which the rest of the process uses too. Only the unpickler in Python can tell.
    """

    def _build(self: Any) -> None:
        made = self.stack[-2]
        if isinstance(made, type) or not dataclasses.is_dataclass(made):
            raise pickle.UnpicklingError(f"it changes {made!r}, which no description of a checkpoint does")
        self.load_build()

    dispatch: ClassVar = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}

    def find_class(self, module: str, name: str, /) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return lambda *parts: None  # where it was written, which nobody asks
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of a checkpoint does")


class PlainReader(filesystem.FileSystemReader):
    """Reads these files of a folder alone, those that its manifest lists, described by plain data."""

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self._folder, self._files = folder, frozenset(files)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        path = self._folder / ".metadata"
        if path.name not in self._files:
            raise ValueError(f"{self._folder} is no checkpoint of mhckit: its manifest lists no {path.name}")
        try:
            description = _Description(io.BytesIO(path.read_bytes())).load()
            files = {info.relative_path for info in description.storage_data.values()}
            described = description.state_dict_metadata.items()
            plain = isinstance(description, metadata.Metadata) and all(isinstance(name, str) for name, _ in described)
            missing = next((words for name, facts in described if (words := _missing(name, facts))), None)
        except Exception as error:  # a hostile pickle may raise anything
            raise ValueError(f"{path} was refused, and nothing of it was run: {in_one_line(error)}") from error
        if not plain or not files <= self._files:
            raise ValueError(f"{path} was refused: it describes something else than this checkpoint")
        if missing is not None:
            raise ValueError(f"{path} was refused: {missing}")
        description.storage_meta = metadata.StorageMeta()
        return description


def _missing(name: str, facts: object) -> str | None:
    """What no chunk is for would not be read, and stay as it is: there must be as many values as the tensor has."""
    if not isinstance(facts, metadata.TensorStorageMetadata):
        return None
    wanted, described = math.prod(facts.size), sum(math.prod(chunk.sizes) for chunk in facts.chunks)
    return None if wanted == described else f"of the {wanted} values of {name}, {described} are there"


def check_tensors(folder: Path, stored: dict[str, Any], prefix: str) -> None:
    """Raises ValueError if something below the prefix is no tensor."""
    for name, facts in stored.items():
        if name.startswith(f"{prefix}.") and not isinstance(facts, metadata.TensorStorageMetadata):
            raise ValueError(f"{folder} was refused: {name} must be a tensor, and is a pickled object")


def reason_of(error: BaseException) -> str:
    """Why a checkpoint could not be read; of all processes' reasons, the first."""
    if isinstance(error, CheckpointException):
        error = next((failure for failure, _traceback in error.failures.values()), error)
    return in_one_line(error)


@contextmanager
def alone_is_no_mistake() -> Iterator[None]:
    """One process by itself, which torch.distributed.checkpoint warns about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


class PlainPlanner(DefaultLoadPlanner):
    """Loads objects that are plain data, and no others."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            plain = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            name = read_item.dest_index.fqn
            raise ValueError(
                f"{name} was refused, and nothing of it was run; torch.serialization.add_safe_globals allows the "
                f"classes of options that are your own: {in_one_line(error)}"
            ) from error
        # torch unpickles freely, and some bytes to something else than what was judged: it gets bytes of our own.
        written = io.BytesIO()
        torch.save(plain, written)
        written.seek(0)
        super().load_bytes(read_item, written)
