"""A language model of two transformer blocks with hyper-connections, by mhckit's modules or naively."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mhckit import HyperConnection, HyperHead, Recipe, Streams

from . import naive

VOCABULARY = 4096
BLOCKS = 2
HEAD_WIDTH = 128
EPS = 1e-6
RECIPE = Recipe.preset("liger")


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = max(1, dim // HEAD_WIDTH)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 8 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        gate, up = self.gate_up(h).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class LanguageModel(nn.Module):
    """Tokens [B, T] to their mean next-token loss. Both ways of computing it use the same parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        sublayers = [kind(dim) for _ in range(BLOCKS) for kind in (Attention, MLP)]
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.sublayers = nn.ModuleList(sublayers)
        self.connections = nn.ModuleList(
            HyperConnection(dim, RECIPE, layer_index=index, norm=True, out_norm_eps=EPS)
            for index in range(len(sublayers))
        )
        self.head = HyperHead(dim, RECIPE)
        self.norm_weight = nn.Parameter(torch.ones(dim))
        self.vocabulary = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, *, naively: bool) -> Tensor:
        h = self.embedding(tokens)
        h = self._naive(h) if naively else self._fused(h)
        predicted = self.vocabulary(naive.rms_norm(h, self.norm_weight, EPS))
        return functional.cross_entropy(naive.upcast(predicted[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def _pairs(self) -> Iterator[tuple[Any, nn.Module]]:
        """Connections (whose parameters torch types as Tensor | Module) and their sublayers."""
        return zip(self.connections, self.sublayers, strict=True)

    def _fused(self, h: Tensor) -> Tensor:
        streams = Streams.expand(h, RECIPE.streams)
        for connection, sublayer in self._pairs():
            h, streams = connection(streams)
            streams = streams.write(sublayer(h))
        return self.head(streams)

    def _naive(self, h: Tensor) -> Tensor:
        x = h.unsqueeze(-2).repeat(1, 1, RECIPE.streams, 1)
        for connection, sublayer in self._pairs():
            pre, post, res = naive.liger_coefficients(x, connection.phi, connection.scale, connection.bias)
            h = naive.rms_norm(naive.read(x, pre), connection.out_norm_weight, EPS)
            x = naive.write(x, sublayer(h), post, res)
        return x.mean(-2)


def parameter_shapes(dim: int) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in _skeleton(dim).named_parameters()}


def loss(tensors: dict[str, Tensor], *, naively: bool) -> tuple[Tensor]:
    """The loss, from the tokens and the model's parameters by name."""
    parameters = {name: tensor for name, tensor in tensors.items() if name != "tokens"}
    model = _skeleton(tensors["norm_weight"].shape[0])
    return (torch.func.functional_call(model, parameters, (tensors["tokens"],), {"naively": naively}),)


@functools.cache
def _skeleton(dim: int) -> LanguageModel:
    """The model without values for its parameters."""
    with torch.device("meta"):
        return LanguageModel(dim)
