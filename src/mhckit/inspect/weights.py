"""The weights of a checkpoint that is not trusted.

A checkpoint of torch.distributed.checkpoint describes itself in a pickle, .metadata, and unpickling may run any code
that whoever wrote it put there. Here it may name the few classes that such a description consists of, and nothing else.
Tensors are read by torch.load(weights_only=True), pickled objects (the optimizer's options) not at all.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from mhckit.train.manifest import Manifest
from mhckit.train.state import MODEL

from .source import in_one_line

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
_MISSHAPEN = (TypeError, AttributeError, OverflowError)


def read_weights(folder: Path) -> tuple[dict[str, Tensor], Manifest]:
    """The model's weights by name, on the CPU. Raises ValueError for what is incomplete, corrupt, or not plain data."""
    manifest = Manifest.read(folder)
    manifest.verify(folder, manifest.files)
    reader = _Reader(folder, manifest)
    stored = reader.read_metadata().state_dict_metadata
    try:
        weights = {
            name: _room_for(name, facts)
            for name, facts in stored.items()
            if name.startswith(f"{MODEL}.") and isinstance(facts, metadata.TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            state_dict_loader.load(weights, storage_reader=reader, planner=_TensorsAlone(), no_dist=True)
    except (CheckpointException, pickle.UnpicklingError, RuntimeError, LookupError, ValueError, *_MISSHAPEN) as error:
        raise ValueError(f"{folder} could not be read: {in_one_line(error)}") from error
    return {name.removeprefix(f"{MODEL}."): weight for name, weight in weights.items()}, manifest


def _room_for(name: str, facts: metadata.TensorStorageMetadata) -> Tensor:
    """What no chunk is for would stay as it is: zeros, not what was in the memory before."""
    described = sum(math.prod(chunk.sizes) for chunk in facts.chunks)
    if described != math.prod(facts.size):
        raise ValueError(f"of the {math.prod(facts.size)} values of {name}, {described} are there")
    return torch.zeros(facts.size, dtype=facts.properties.dtype)


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


class _Reader(filesystem.FileSystemReader):
    """Reads files that the manifest lists, described by plain data."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._folder, self._files = folder, manifest.files

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        path = self._folder / ".metadata"
        if path.name not in self._files:
            raise ValueError(f"{self._folder} is no checkpoint of mhckit: its manifest lists no {path.name}")
        try:
            description = _Description(io.BytesIO(path.read_bytes())).load()
            files = {info.relative_path for info in description.storage_data.values()}
            described = description.state_dict_metadata.items()
            plain = isinstance(description, metadata.Metadata) and all(isinstance(name, str) for name, _ in described)
        except Exception as error:  # a hostile pickle may raise anything
            raise ValueError(f"{path} was refused, and nothing of it was run: {in_one_line(error)}") from error
        if not plain or not files <= self._files.keys():
            raise ValueError(f"{path} was refused: it describes something else than this checkpoint")
        description.storage_meta = metadata.StorageMeta()
        return description


class _TensorsAlone(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is a pickled object, and a tensor was expected")
