"""What the replacements of all families share.

A replacement is a subclass with the name of the class it replaces. `apply` changes the class of modules that exist:
parameters, buffers, hooks and names stay as they are, and state dicts with them. `register` lets transformers
construct the replacement itself.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from mhckit.modules import Streams
from mhckit.modules.streams import as_streams, read_streams
from mhckit.ops import head
from mhckit.recipe import Recipe


class Replacement(nn.Module):
    """A class that stands for `replaced`; `prepare` sets what it needs beside the attributes of the original."""

    replaced: ClassVar[type[nn.Module]]
    added: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepare()

    def prepare(self) -> None:
        """Set the attributes named in `added`, from those of the original."""


class Connection(Replacement):
    """A hyper-connection. Streams give what the sublayer reads and Streams; a tensor gives what the original gives."""

    added = ("mhckit_recipe",)
    fn: Tensor
    scale: Tensor
    base: Tensor

    def prepare(self) -> None:
        self.mhckit_recipe = self.make_recipe()

    def make_recipe(self) -> Recipe:
        raise NotImplementedError

    def returned(self, h: Tensor, streams: Streams) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def forward(self, hidden_streams: Any) -> Any:
        streams = as_streams(hidden_streams)
        h, read = read_streams(streams, self.fn, self.scale, self.base, recipe=self.mhckit_recipe)
        return (h, read) if streams is hidden_streams else self.returned(h, read)


class Layer(Replacement):
    """A decoder layer: its own sublayers, between reads and writes of Streams.

    The output of its last sublayer is written at the end, so that layers hand tensors to each other; with
    `mhckit_across_layers` it waits in the Streams for the next layer, or for the head.
    """

    added = ("mhckit_across_layers",)

    def prepare(self) -> None:
        self.mhckit_across_layers = False

    def handed_on(self, streams: Streams) -> Any:
        return streams if self.mhckit_across_layers else streams.tensor


class LearnedHead(Replacement):
    """A head with weights per token."""

    added = ("mhckit_recipe",)
    hc_fn: Tensor
    hc_scale: Tensor
    hc_base: Tensor

    def prepare(self) -> None:
        self.mhckit_recipe = self.make_recipe()

    def make_recipe(self) -> Recipe:
        raise NotImplementedError

    def forward(self, x: Any) -> Tensor:
        return head(
            as_streams(x).tensor, recipe=self.mhckit_recipe, fn=self.hc_fn, scale=self.hc_scale, base=self.hc_base
        )
