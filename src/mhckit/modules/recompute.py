r"""Recompute: the streams inside a group of sublayers are rebuilt in backward instead of kept.

Autograd keeps, for every sublayer, its streams (N*C numbers per token), what it read (C) and its output f (C). Of these

    kept       f of every sublayer, the coefficients, and all of the first sublayer of a group
    rebuilt    y = res x + post f and x_in = pre . y [RMSNorm] of the others, by the operators `post` and `pre`

when backward first asks for one of them: the rebuilt values are the same bits, and no sublayer runs again. L sublayers
in groups of G hold N*C*ceil(L/G) numbers per token in place of N*C*L, and while a group is gone back through up to
(N+2)*C*G more; their sum is smallest near G = sqrt(N*L/(N+2)) (arXiv 2512.24880).

How: saved-tensor hooks see every tensor that autograd keeps. One that lies in the memory of a rebuildable y or x_in is
replaced by a handle; every other is kept as it is. Rebuilding needs no parameters (but a fused norm's weight [C],
of which there is a copy), so it does not matter where FSDP2 has them by then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhckit.ops._backend import choose
from mhckit.ops._register import contiguous
from mhckit.recipe import Recipe

from . import streams as _streams
from .streams import Streams


class recompute:
    """Inside a ``with`` block, keep of the streams only those at the start of each group of sublayers.

        with mhckit.recompute(model.blocks):
            for block in model.blocks:
                streams = block(streams)
            h = model.head(streams)

    Gradients are the same bits as without. Sublayers may hold anything, dropout and activation checkpointing included:
    they are not run again. It goes around a loop over blocks that read and write Streams, and around the head, which
    holds the last streams: the saving is between reads.
    Inside a checkpointed function it keeps what the checkpoint would not have.

    Under torch.compile what lies between reads is compiled, and the reads are not: compile sublayers, or whole blocks
    without ``fullgraph``. DTensors are kept, not rebuilt.

    Args:
        blocks: the modules that run inside; their HyperConnections are counted for the size of a group.
        every: the size of a group, in sublayers; by default the one that needs the least memory.
    """

    def __init__(self, blocks: nn.Module | Iterable[nn.Module] | None = None, *, every: int | None = None) -> None:
        if every is None and blocks is None:
            raise ValueError("recompute needs blocks, to count their sublayers, or every, the size of a group")
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"every must be a positive int, got {every!r}")
        self.every = group_size(*_count(blocks)) if every is None else every
        self._hooks: Any = None
        self._outer: Any = None
        self._group: _Group | None = None
        self._reads = 0
        # What the last read made, and the one before it. Their memory cannot pass to another tensor meanwhile.
        self._sources: dict[int, _Source] = {}
        self._earlier: dict[int, _Source] = {}
        # Saved since the last read. An operator saves its results before they are known here.
        self._saved: list[_Saved] = []

    def __enter__(self) -> recompute:
        if self._hooks is not None:
            raise RuntimeError("this recompute is already in use: make one for every pass through the blocks")
        self._reads = 0
        self._outer = _streams.observe(self._saw)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _Saved.get)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        _streams.observe(self._outer)
        self._hooks = self._group = None
        self._sources, self._earlier, self._saved = {}, {}, []
        if exception[0] is None and not self._reads:
            raise RuntimeError(
                "recompute saw no HyperConnection read from Streams: it goes around the loop over blocks, and around "
                "what torch.compile returned, not into a function that is compiled with fullgraph=True"
            )

    def _saw(self, before: Streams, h: Tensor, after: Streams, options: dict[str, Any]) -> None:
        """A read of the streams `before` gave h and `after`."""
        self._reads += 1
        if not torch.is_grad_enabled():
            return
        self._earlier, self._sources = self._sources, {}
        saved, self._saved = self._saved, []
        if self._group is None or before.f is None or self._group.reads >= self.every:
            self._group = _Group(after.x)
            return
        index = self._group.add(before, h, after, **options)
        for name, tensor in (("y", after.x), ("x_in", h)):
            if _address(tensor):
                self._sources[_address(tensor)] = _Source(self._group, (index, name), tensor, tensor._version)
        for each in saved:
            self._let_go(each)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.append(saved)
        self._let_go(saved)
        return saved

    def _let_go(self, saved: _Saved) -> None:
        """Of a saved tensor that can be rebuilt."""
        if saved.tensor is not None:
            address = _address(saved.tensor)
            source = self._sources.get(address) or self._earlier.get(address)
            if source is not None and source.made(saved.tensor):
                saved.handle, saved.tensor = source.group.handle(source, saved.tensor), None


def group_size(sublayers: int, streams: int) -> int:
    """The size G that minimises N*ceil(L/G) + (N+2)*G: streams kept, and a group as it is rebuilt."""

    def numbers_held(size: int) -> int:
        return streams * math.ceil(sublayers / size) + (streams + 2) * size

    return min(range(1, sublayers + 1), key=numbers_held)


class _Saved:
    """What autograd holds in place of a tensor: the tensor, or a handle to rebuild it.

    The check that nobody has written into a tensor since is left to hooks where there are some.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.handle: _Handle | None = None

    def get(self) -> Tensor:
        if self.handle is not None:
            return self.handle.group.take(self.handle)
        assert self.tensor is not None
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(self.tensor.shape)} is at version {self.tensor._version}; expected version "
                f"{self.version} instead"
            )
        return self.tensor


class _Source(NamedTuple):
    """A tensor that can be rebuilt; holding it keeps its memory its own."""

    group: _Group
    key: tuple[int, str]
    tensor: Tensor
    version: int

    def made(self, tensor: Tensor) -> bool:
        """Whether a tensor in the same memory is a part of this one, as it was made."""
        return tensor.dtype == self.tensor.dtype and tensor._version == self.version


class _Handle(NamedTuple):
    """What to rebuild, and the part of it that was saved."""

    group: _Group
    key: tuple[int, str]
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _Step(NamedTuple):
    """What makes y and x_in of one read from the streams before it."""

    f: Tensor
    f_bias: Tensor | None
    post: Tensor
    res: Tensor | None
    weights: Tensor  # that x_in is read with
    out_norm_weight: Tensor | None
    out_norm_eps: float
    out_dtype: torch.dtype


class _Group:
    """Reads that follow each other; the streams x of the first are kept, and those of the rest made from them."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach()
        self.backend = choose("post", x, x.shape[-2])
        self.steps: list[_Step] = []
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
        assert before.mix is not None and before.f is not None and after.mix is not None
        _pre, post, res = before.mix
        weights = before.mix.pre if recipe.shifted else after.mix.pre
        self.steps.append(
            _Step(
                before.f.detach(),
                _copy(before.f_bias),
                post.detach(),
                None if res is None else res.detach(),
                weights.detach(),
                _copy(out_norm_weight),
                out_norm_eps,
                h.dtype,
            )
        )
        return len(self.steps) - 1

    def handle(self, source: _Source, tensor: Tensor) -> _Handle:
        self.handles[source.key] = self.handles.get(source.key, 0) + 1
        offset = tensor.storage_offset() - source.tensor.storage_offset()
        return _Handle(self, source.key, tensor.shape, tensor.stride(), offset)

    def take(self, handle: _Handle) -> Tensor:
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
        x, self.waiting = self.x, dict(self.handles)
        for index, step in enumerate(self.steps):
            x = _write(x, step, self.backend)
            if (index, "y") in self.handles:
                self.rebuilt[index, "y"] = x
            if (index, "x_in") in self.handles:
                self.rebuilt[index, "x_in"] = _read(x, step, self.backend)


def _write(x: Tensor, step: _Step, backend: str) -> Tensor:
    return torch.ops.mhckit.post_fwd(x, *contiguous(step.f, step.f_bias, step.post, step.res), backend)


def _read(x: Tensor, step: _Step, backend: str) -> Tensor:
    norm = (step.out_norm_weight, step.out_norm_eps)
    return torch.ops.mhckit.pre_fwd(x, step.weights.contiguous(), *norm, step.out_dtype, backend)[0]


def _address(tensor: Tensor) -> int:
    """Of a tensor's memory; 0 if it has none, or holds other tensors."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return tensor.untyped_storage().data_ptr() if plain else 0


def _copy(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach().clone()


def _count(blocks: nn.Module | Iterable[nn.Module] | None) -> tuple[int, int]:
    """Hyper-connections in the blocks, and their streams."""
    modules = [blocks] if isinstance(blocks, nn.Module) else list(blocks or ())
    recipes = [recipe for block in modules for module in block.modules() if (recipe := _recipe_of(module)) is not None]
    if not recipes:
        raise ValueError("recompute found no HyperConnection in the blocks: give every, the size of a group")
    return len(recipes), max(recipe.streams for recipe in recipes)


def _recipe_of(module: nn.Module) -> Recipe | None:
    """Of a HyperConnection, mhckit's own or one that `mhckit.integrations` replaced."""
    if not type(module).__name__.endswith("HyperConnection"):
        return None
    recipe: Any = getattr(module, "recipe", getattr(module, "mhckit_recipe", None))
    return recipe if isinstance(recipe, Recipe) else None
