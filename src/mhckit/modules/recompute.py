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
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mhckit.recipe import Recipe

from . import streams as _streams
from ._rebuild import Group, Kept, Saved, Source, address
from .hyper_connection import HyperConnection
from .streams import Streams


class recompute:
    """Inside a ``with`` block, keep of the streams only those at the start of each group of sublayers.

        with mhckit.recompute(model.blocks):
            for block in model.blocks:
                streams = block(streams)
            h = model.head(streams)

    Gradients are the same bits as without. Sublayers may hold anything, dropout and activation checkpointing included:
    they are not run again. It goes around a loop over blocks that read and write Streams, and around the head, which
    holds the last streams. Reads that do not follow each other, as of two interleaved chains, are kept.

    Its saved-tensor hooks take the place of those around it: inside a checkpointed function, or torch's save_on_cpu, it
    keeps on the device what they would not have.

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
        self._thread = 0
        self._forget()

    def _forget(self) -> None:
        self._reads = 0
        self._group: Group | None = None
        self._last: Kept | None = None  # the streams after the last read
        # What the last read made, and the one before it. Their memory cannot pass to another tensor meanwhile.
        self._sources: dict[int, Source] = {}
        self._earlier: dict[int, Source] = {}
        # Saved since the last read. An operator saves its results before they are known here.
        self._saved: list[Saved] = []

    def __enter__(self) -> recompute:
        if self._hooks is not None:
            raise RuntimeError("this recompute is already in use: make one for every pass through the blocks")
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, Saved.get)
        hooks.__enter__()  # raises where hooks are disabled
        self._hooks, self._thread = hooks, threading.get_ident()
        self._outer = _streams.observe(self._saw)
        return self

    def __exit__(self, *exception: Any) -> None:
        _streams.observe(self._outer)
        self._hooks.__exit__(*exception)
        self._hooks, reads = None, self._reads
        self._forget()
        if exception[0] is None and not reads:
            raise RuntimeError(
                "recompute saw no HyperConnection read from Streams: it goes around the loop over blocks, and around "
                "what torch.compile returned, not into a function that is compiled with fullgraph=True"
            )

    def _saw(self, before: Streams, h: Tensor, after: Streams, options: dict[str, Any]) -> None:
        """A read of the streams `before` gave h and `after`. Hooks are a thread's own, and so is what is seen here."""
        if threading.get_ident() != self._thread:
            return
        self._reads += 1
        if not torch.is_grad_enabled():
            return
        follows = self._last is not None and self._last.is_still(before.x) and before.f is not None
        self._last = Kept(after.x)
        self._earlier, self._sources = self._sources, {}
        saved, self._saved = self._saved, []
        if self._group is None or not follows or self._group.reads >= self.every:
            self._group = Group(after.x)
            return
        index = self._group.add(before, h, after, **options)
        for name, tensor in (("y", after.x), ("x_in", h)):
            if address(tensor):
                self._sources[address(tensor)] = Source(self._group, (index, name), Kept(tensor))
        for each in saved:
            self._let_go(each)

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        self._saved.append(saved)
        self._let_go(saved)
        return saved

    def _let_go(self, saved: Saved) -> None:
        """Of a saved tensor that can be rebuilt."""
        if saved.kept is not None:
            at = address(saved.kept.tensor)
            source = self._sources.get(at) or self._earlier.get(at)
            if source is not None and source.made(saved.kept):
                saved.handle, saved.kept = source.group.handle(source, saved.kept.tensor), None


def group_size(sublayers: int, streams: int) -> int:
    """The size G that minimises N*ceil(L/G) + (N+2)*G: streams kept, and a group as it is rebuilt."""

    def numbers_held(size: int) -> int:
        return streams * math.ceil(sublayers / size) + (streams + 2) * size

    return min(range(1, sublayers + 1), key=numbers_held)


def _count(blocks: nn.Module | Iterable[nn.Module] | None) -> tuple[int, int]:
    """Hyper-connections in the blocks, and their streams."""
    modules = [blocks] if isinstance(blocks, nn.Module) else list(blocks or ())
    recipes = [recipe for block in modules for module in block.modules() if (recipe := _recipe_of(module)) is not None]
    if not recipes:
        raise ValueError("recompute found no HyperConnection in the blocks: give every, the size of a group")
    return len(recipes), max(recipe.streams for recipe in recipes)


def _recipe_of(module: nn.Module) -> Recipe | None:
    """Of a HyperConnection, mhckit's own or one that `mhckit.integrations` replaced."""
    if isinstance(module, HyperConnection):
        return module.recipe
    replaced = type(module).__name__.endswith("HyperConnection")
    recipe: Any = getattr(module, "mhckit_recipe", None)
    return recipe if replaced and isinstance(recipe, Recipe) else None
