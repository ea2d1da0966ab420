"""The plain residual connection, in the form of hyper-connections: one block serves both.

h, streams = connection(streams)        h = norm(x)
streams = streams.write(f(h))           x + f
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mhckit.modules import HyperConnection, HyperHead, Streams

from .config import ModelConfig


class PlainResidual(NamedTuple):
    """One stream: what `Streams` are to a HyperConnection."""

    x: Tensor

    def write(self, f: Tensor) -> PlainResidual:
        return PlainResidual(self.x + f)


class PlainConnection(nn.Module):
    """Reads through an RMSNorm. The weight is named as in HyperConnection, so that `mhckit.upcycle` finds it."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.out_norm_weight = nn.Parameter(torch.ones(dim))

    def forward(self, residual: PlainResidual) -> tuple[Tensor, PlainResidual]:
        return rms_norm(residual.x, self.out_norm_weight, self.eps), residual


class PlainHead(nn.Module):
    def forward(self, residual: PlainResidual) -> Tensor:
        return residual.x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computed in float32 and rounded once, as the norm that mhckit fuses into a read."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return functional.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


def make_connection(config: ModelConfig, sublayer: int) -> nn.Module:
    if config.recipe is None:
        return PlainConnection(config.dim, config.norm_eps)
    return HyperConnection(config.dim, config.recipe, layer_index=sublayer, norm=True, out_norm_eps=config.norm_eps)


def make_head(config: ModelConfig) -> nn.Module:
    return PlainHead() if config.recipe is None else HyperHead(config.dim, config.recipe)


def start(h: Tensor, streams: int | None) -> Streams | PlainResidual:
    """The residual that begins with h, as one or as N streams."""
    return PlainResidual(h) if streams is None else Streams.expand(h, streams)
