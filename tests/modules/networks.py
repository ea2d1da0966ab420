"""The same small pre-norm network with a plain residual and with hyper-connections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mhckit import HyperConnection, HyperHead, Recipe, Streams


class Sublayer(nn.Module):
    """RMSNorm, then a two-layer perceptron."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(self.up(self.norm(h)).tanh())


class Plain(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(Sublayer(dim) for _ in range(depth))

    def forward(self, h: Tensor) -> Tensor:
        for sublayer in self.sublayers:
            h = h + sublayer(h)
        return h


class Connected(nn.Module):
    """Plain's sublayers, connected by streams."""

    def __init__(self, plain: Plain, dim: int, recipe: Recipe, **options) -> None:
        super().__init__()
        self.recipe = recipe
        self.sublayers = plain.sublayers
        self.connections = nn.ModuleList(
            HyperConnection(dim, recipe, layer_index=index, **options) for index in range(len(plain.sublayers))
        )
        self.head = HyperHead(dim, recipe)

    def forward(self, h: Tensor) -> Tensor:
        streams = Streams.expand(h, self.recipe.streams)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            h, streams = connection(streams)
            streams = streams.write(sublayer(h))
        return self.head(streams)


def make(recipe: Recipe, *, dim: int = 12, depth: int = 4, **options) -> tuple[Plain, Connected, Tensor]:
    torch.manual_seed(0)
    plain = Plain(dim, depth)
    return plain, Connected(plain, dim, recipe, **options), torch.randn(2, 5, dim)
