"""The weights of a checkpoint, without a model to read them into; of pickled objects, none is read."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from .description import PlainReader, alone_is_no_mistake, check_tensors, reason_of
from .manifest import Manifest
from .state import MODEL

_MISSHAPEN = (TypeError, AttributeError, OverflowError)


def read_weights(folder: Path) -> tuple[dict[str, Tensor], Manifest]:
    """The model's weights by name, on the CPU. Raises ValueError for what is incomplete, corrupt, or not plain data."""
    manifest = Manifest.read(folder)
    manifest.verify(folder, manifest.files)
    reader = PlainReader(folder, manifest.files)
    stored = reader.read_metadata().state_dict_metadata
    check_tensors(folder, stored, MODEL)
    try:
        weights = {
            name: torch.zeros(facts.size, dtype=facts.properties.dtype)
            for name, facts in stored.items()
            if name.startswith(f"{MODEL}.") and isinstance(facts, metadata.TensorStorageMetadata)
        }
        with alone_is_no_mistake():
            state_dict_loader.load(weights, storage_reader=reader, planner=_TensorsAlone(), no_dist=True)
    except (CheckpointException, pickle.UnpicklingError, RuntimeError, LookupError, ValueError, *_MISSHAPEN) as error:
        raise ValueError(f"{folder} could not be read: {reason_of(error)}") from error
    return {name.removeprefix(f"{MODEL}."): weight for name, weight in weights.items()}, manifest


class _TensorsAlone(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is a pickled object, and a tensor was expected")
