"""Memory of the emulated device, and of a program."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arithmetic import Lanes
from .hazards import GRAIN, Hazards

_ALIGNMENT = 512
_BASE = 1 << 40
# Where shared memory begins; hardware, too, keeps the first kilobyte.
SHARED_BASE = 1024
_MANY = -1  # readers
_NOTHING, _TENSOR, _BEHIND = range(3)


class BadAccess(Exception):
    """To memory that does not exist, is not aligned, or belongs to somebody else."""


class DeviceMemory:
    """The tensors of a launch, each with 16 bytes' worth of room behind its end and nothing there that is a number."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._placed: dict[int, tuple[Tensor, int]] = {}
        size = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._placed:
                self._placed[storage.data_ptr()] = (torch.empty(0, dtype=torch.uint8).set_(storage), size)
                size += -(-(storage.nbytes() + 16) // _ALIGNMENT) * _ALIGNMENT
        self.bytes = np.full(size, 0xFF, np.uint8)
        self._kind = np.full(size, _NOTHING, np.uint8)
        self._writer = np.zeros(size, np.int32)
        self._reader = np.zeros(size, np.int32)
        for content, at in self._placed.values():
            end = at + len(content)
            self.bytes[at:end] = content.numpy()
            self._kind[at:end] = _TENSOR
            self._kind[end : -(-end // 16) * 16] = _BEHIND

    def address(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage().data_ptr()
        return _BASE + self._placed[storage][1] + tensor.data_ptr() - storage

    def take_back(self) -> None:
        """What was stored, into the tensors."""
        for content, at in self._placed.values():
            content.copy_(torch.from_numpy(self.bytes[at : at + len(content)].copy()))

    def load(self, addresses: Lanes, size: int, reader: int) -> Any:
        """[addresses, size] bytes."""
        at = self._places(addresses, size)
        if (self._kind[at] == _NOTHING).any():
            raise BadAccess("loads what does not exist")
        writer = self._writer[at]
        if ((writer != 0) & (writer != reader)).any():
            raise BadAccess("loads what another warp of this launch stored")
        before = self._reader[at]
        self._reader[at] = np.where((before == 0) | (before == reader), reader, _MANY)
        return self.bytes[at]

    def store(self, addresses: Lanes, values: Any, writer: int) -> None:
        at = self._places(addresses, values.shape[1])
        if (self._kind[at] != _TENSOR).any():
            raise BadAccess("stores outside of a tensor")
        before = self._writer[at]
        if ((before != 0) & (before != writer)).any():
            raise BadAccess("stores over what another warp of this launch stored")
        read = self._reader[at]
        if ((read != 0) & (read != writer)).any():
            raise BadAccess("stores over what another warp of this launch loads")
        self._writer[at] = writer
        _store(self.bytes, at, values)

    def _places(self, addresses: Lanes, size: int) -> Any:
        at = np.asarray(addresses, np.int64) - _BASE
        if (at % min(size, 16)).any():
            raise BadAccess(f"{size} bytes, not aligned")
        if len(at) and (at.min() < 0 or at.max() + size > len(self.bytes)):
            raise BadAccess("far outside of every tensor")
        return at[:, None] + np.arange(size)


class SharedMemory:
    def __init__(self, size: int, hazards: Hazards) -> None:
        self.bytes = np.full(SHARED_BASE + size, 0xFF, np.uint8)
        self._hazards = hazards

    def load(self, agent: int, addresses: Lanes, size: int, source: str) -> Any:
        """[addresses, size] bytes."""
        at, grains = self._places(addresses, size)
        self._hazards.access(agent, grains.ravel(), False, source)
        return self.bytes[at]

    def store(self, agent: int, addresses: Lanes, values: Any, source: str) -> None:
        at, grains = self._places(addresses, values.shape[1])
        changes = (self.bytes[at] != values).reshape(*grains.shape, -1).any(2)
        self._hazards.access(agent, grains[changes], True, source)
        _store(self.bytes, at, values)

    def _places(self, addresses: Lanes, size: int) -> tuple[Any, Any]:
        at = np.asarray(addresses, np.int64)
        if (at % min(size, 16)).any():
            raise BadAccess(f"{size} bytes of shared memory, not aligned")
        if len(at) and (at.min() < SHARED_BASE or at.max() + size > len(self.bytes)):
            raise BadAccess("outside of shared memory")
        return at[:, None] + np.arange(size), at[:, None] // GRAIN + np.arange(-(-size // GRAIN))


def _store(memory: Any, at: Any, values: Any) -> None:
    memory[at] = values
    stored = memory[at]
    if (stored != values).any() and not _differ_in_nan_alone(stored, values):
        raise BadAccess("lanes store different values to one place")


def _differ_in_nan_alone(stored: Any, values: Any) -> bool:
    """Hardware has one NaN for every result. Here it is one of the operands', and lanes may have them in any order."""
    if values.shape[1] % 4:
        return False
    here, there = (np.ascontiguousarray(each, np.uint8).view(np.float32) for each in (stored, values))
    return bool(((here.view(np.uint32) == there.view(np.uint32)) | (np.isnan(here) & np.isnan(there))).all())


def swizzled(addresses: Any, row_bytes: int) -> Any:
    """Where bytes lie whose rows of 32, 64 or 128 are swizzled: 16 bytes at a time, by how many 128 come before."""
    return addresses ^ ((addresses >> 7) & (row_bytes // 16 - 1)) << 4
