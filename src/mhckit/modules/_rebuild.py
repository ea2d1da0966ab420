"""What `recompute` keeps of a group of reads, and how it makes the rest again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhckit.ops._backend import choose
from mhckit.ops._register import contiguous, dtype_name
from mhckit.recipe import Recipe

from .streams import Streams


class Kept:
    """A tensor, to be used later as it is now: with hooks in place autograd leaves that check to them."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(self.tensor.shape)} is at version {self.tensor._version}; expected version "
                f"{self.version} instead"
            )
        return self.tensor

    def is_still(self, tensor: Tensor) -> bool:
        """Whether a tensor is this one: all of it, and nothing written into it since."""
        return address(self.tensor) != 0 and _what(tensor) == _what(self.tensor) and tensor._version == self.version


class Saved:
    """What autograd holds in place of a tensor: the tensor, or a handle to rebuild it."""

    def __init__(self, tensor: Tensor) -> None:
        self.kept: Kept | None = Kept(tensor)
        self.handle: Handle | None = None

    def get(self) -> Tensor:
        if self.handle is not None:
            return self.handle.group.take(self.handle)
        assert self.kept is not None
        return self.kept.get()


class Source(NamedTuple):
    """A tensor that can be rebuilt; holding it keeps its memory its own."""

    group: Group
    key: tuple[int, str]
    made_as: Kept

    def made(self, kept: Kept) -> bool:
        """Whether a tensor in the same memory is a part of this one, as it was made."""
        return kept.tensor.dtype == self.made_as.tensor.dtype and kept.version == self.made_as.version


class Handle(NamedTuple):
    """What to rebuild, and the part of it that was saved."""

    group: Group
    key: tuple[int, str]
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class Step(NamedTuple):
    """What makes y and x_in of one read from the streams before it."""

    f: Kept
    f_bias: Tensor | None
    post: Kept
    res: Kept | None
    weights: Kept  # that x_in is read with
    out_norm_weight: Tensor | None
    out_norm_eps: float
    out_dtype: torch.dtype
    backend: str

    def write(self, x: Tensor) -> Tensor:
        res = None if self.res is None else self.res.get()
        tensors = contiguous(self.f.get(), self.f_bias, self.post.get(), res)
        return torch.ops.mhckit.post_fwd(x, *tensors, self.backend)

    def read(self, y: Tensor) -> Tensor:
        weights, norm = self.weights.get().contiguous(), (self.out_norm_weight, self.out_norm_eps)
        return torch.ops.mhckit.pre_fwd(y, weights, *norm, dtype_name(self.out_dtype), self.backend)[0]


class Group:
    """Reads that follow each other; the streams x of the first are kept, and those of the rest made from them."""

    def __init__(self, x: Tensor) -> None:
        self.x = Kept(x)
        self.steps: list[Step] = []
        self.handles: dict[tuple[int, str], int] = {}
        self.rebuilt: dict[tuple[int, str], Tensor] = {}
        self.waiting: dict[tuple[int, str], int] = {}

    @property
    def reads(self) -> int:
        return 1 + len(self.steps)

    def add(
        self,
        before: Streams,
        h: Tensor,
        after: Streams,
        *,
        recipe: Recipe,
        out_norm_weight: Tensor | None = None,
        out_norm_eps: float = 1e-6,
        **_other: Any,
    ) -> int:
        """A read that follows the last one; returns its number."""
        assert before.mix is not None and before.f is not None and after.mix is not None
        pre, post, res = before.mix
        self.steps.append(
            Step(
                Kept(before.f),
                _copy(before.f_bias),
                Kept(post),
                None if res is None else Kept(res),
                Kept(pre if recipe.shifted else after.mix.pre),
                _copy(out_norm_weight),
                out_norm_eps,
                h.dtype,
                choose("post", after.x, recipe.streams),
            )
        )
        return len(self.steps) - 1

    def handle(self, source: Source, tensor: Tensor) -> Handle:
        self.handles[source.key] = self.handles.get(source.key, 0) + 1
        offset = tensor.storage_offset() - source.made_as.tensor.storage_offset()
        return Handle(self, source.key, tensor.shape, tensor.stride(), offset)

    def take(self, handle: Handle) -> Tensor:
        """The tensor of a handle. A group is rebuilt as a whole and let go of with the last handle of each tensor."""
        if handle.key not in self.rebuilt:
            self._rebuild()
        rebuilt = self.rebuilt[handle.key]
        self.waiting[handle.key] -= 1
        if not self.waiting[handle.key]:
            del self.rebuilt[handle.key]
        return rebuilt.as_strided(handle.size, handle.stride, rebuilt.storage_offset() + handle.offset)

    @torch.no_grad()
    def _rebuild(self) -> None:
        x, self.waiting = self.x.get(), dict(self.handles)
        for index, step in enumerate(self.steps):
            x = step.write(x)
            if (index, "y") in self.handles:
                self.rebuilt[index, "y"] = x
            if (index, "x_in") in self.handles:
                self.rebuilt[index, "x_in"] = step.read(x)


def address(tensor: Tensor) -> int:
    """Of a tensor's memory; 0 if it has none, or holds other tensors."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return tensor.untyped_storage().data_ptr() if plain else 0


def _what(tensor: Tensor) -> tuple[Any, ...]:
    """What tells tensors apart that live at the same time."""
    return address(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _copy(parameter: Tensor | None) -> Tensor | None:
    """FSDP2 frees what a parameter holds between forward and backward."""
    return None if parameter is None else parameter.detach().clone()
