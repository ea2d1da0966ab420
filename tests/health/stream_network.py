"""A small network of streams whose coefficients are large, different for every token, and far from symmetric."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mhckit import HyperConnection, HyperHead, Mix, Recipe, Streams

DIM, DEPTH = 8, 5


class Sublayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h.tanh())


class Block(nn.Module):
    """One sublayer with its connection."""

    def __init__(self, recipe: Recipe, index: int) -> None:
        super().__init__()
        self.connection = HyperConnection(DIM, recipe, layer_index=index)
        self.sublayer = Sublayer()

    def forward(self, streams: Streams) -> Streams:
        h, streams = self.connection(streams)
        return streams.write(self.sublayer(h))


class Network(nn.Module):
    def __init__(self, recipe: Recipe | str = "paper", depth: int = DEPTH, spread: float = 0.7) -> None:
        super().__init__()
        self.recipe = Recipe.preset(recipe) if isinstance(recipe, str) else recipe
        self.blocks = nn.ModuleList(Block(self.recipe, index) for index in range(depth))
        self.head = HyperHead(DIM, self.recipe)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=spread)

    def start(self, h: Tensor) -> Streams:
        return Streams.expand(h, self.recipe.streams)

    def forward(self, h: Tensor) -> Tensor:
        streams = self.start(h)
        for block in self.blocks:
            streams = block(streams)
        return self.head(streams)


def mixes_and_last_streams(network: Network, h: Tensor) -> tuple[list[Mix], Tensor]:
    """What the connections compute, without any hook: the mix of each, and the streams that the last one reads."""
    mixes, read, streams = [], [], network.start(h)
    for block in network.blocks:
        h, streams = block.connection(streams)
        mixes.append(streams.mix)
        read.append(streams.x)
        streams = streams.write(block.sublayer(h))
    return mixes, read[-1]


def batch(sequences: int = 2, positions: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sequences, positions, DIM, dtype=dtype)
