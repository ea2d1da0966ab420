"""MHC: any layer with its own hyper-connection, as one module from streams to streams."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mhckit.recipe import Recipe, as_recipe

from .hyper_connection import HyperConnection
from .streams import Streams


class MHC(nn.Module):
    """Wraps a layer [..., C] -> [..., C] as [..., N, C] -> [..., N, C].

    The simplest way in: `x + layer(x)` becomes `MHC(layer, dim)(x)` on streams. Every call writes its result at once;
    a chain of HyperConnections on Streams does the same with one pass over the streams fewer per sublayer.

    Args:
        layer: the sublayer; extra arguments of the call go to it.
        dim: C, the width of the model.
        recipe: the math, or the name of a preset. Shifted recipes hand a pre from sublayer to sublayer and need
            Streams.
        options: as in HyperConnection.
    """

    def __init__(self, layer: nn.Module, dim: int, recipe: Recipe | str = "paper", **options: Any) -> None:
        super().__init__()
        if as_recipe(recipe).shifted:
            raise ValueError("a shifted recipe reads with the previous sublayer's pre: use HyperConnection and Streams")
        self.layer = layer
        self.connection = HyperConnection(dim, recipe, **options)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        h, streams = self.connection(Streams(x))
        streams = streams.write(self.layer(h, *args, **kwargs))
        with self.connection.use_own_backend():
            return streams.tensor
