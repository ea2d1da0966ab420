"""Chains of reads and writes that launch what a model launches, without the model's sublayers and parameters."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhckit.recipe import Recipe

from .hyper_connection import HyperConnection
from .hyper_head import HyperHead
from .recompute import _recipe_of as recipe_of_connection
from .recompute import recompute
from .streams import Streams

# Kernels do not depend on the number of tokens.
TOKENS = 16
# The first read, one between others, and the last one: their results get different gradients.
READS = 3


class Chain(NamedTuple):
    """A connection, which reads more than once, and what ends such a chain."""

    connection: nn.Module
    head: nn.Module | None
    recipe: Recipe
    dim: int

    @property
    def device(self) -> torch.device:
        return next(self.connection.parameters()).device


class Kinds(NamedTuple):
    """What launches depend on beside the modules: as in `mhckit.warmup`."""

    dtype: torch.dtype
    sublayer_dtype: torch.dtype | None = None
    f_bias_dtype: torch.dtype | None = None
    training: bool = True
    recompute: bool = False


def find_chains(model: nn.Module) -> list[Chain]:
    """Every kind of connection in the model with every kind of head that fits it, once."""
    connections: dict[Any, nn.Module] = {}
    heads: dict[Any, nn.Module] = {}
    for module in model.modules():
        if recipe_of_connection(module) is not None:
            connections.setdefault(_describe(module), module)
        elif _is_head(module):
            heads.setdefault(_describe(module), module)
    chains = []
    for connection in connections.values():
        recipe: Any = recipe_of_connection(connection)
        dim = _width(connection, recipe)
        fitting = [head for head in heads.values() if _fits(head, recipe, dim)]
        chains += [Chain(connection, head, recipe, dim) for head in fitting or (None,)]
    return chains


def run_chain(chain: Chain, kinds: Kinds, device: torch.device) -> None:
    """Forward and, in training, backward: the operators of a model in its order, on memory that nobody has written."""
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(kinds.training),
        torch.autograd.set_detect_anomaly(False),
        torch.autocast(device.type, enabled=False),
    ):
        result, leaves = _forward(chain, kinds, device)
        if kinds.training:  # gradients of these leaves alone: whatever else a module holds is the model's
            torch.autograd.grad(result, leaves, torch.empty_like(result), allow_unused=True)


def _forward(chain: Chain, kinds: Kinds, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """What the chain ends with, and the leaves it was made from."""
    options = {"device": device, "requires_grad": kinds.training}
    h = torch.empty(TOKENS, chain.dim, dtype=kinds.dtype, **options)
    f_bias = None if kinds.f_bias_dtype is None else torch.empty(chain.dim, dtype=kinds.f_bias_dtype, **options)
    connection = _like(chain.connection, device)
    head = None if chain.head is None else _like(chain.head, device)
    parameters = [p for module in (connection, head) if module is not None for p in module._parameters.values()]
    leaves = [leaf for leaf in (h, f_bias, *parameters) if leaf is not None and leaf.requires_grad]
    streams = Streams.expand(h, chain.recipe.streams)
    with recompute(every=READS) if kinds.recompute and kinds.training else contextlib.nullcontext():
        for _ in range(READS):
            h, streams = connection.forward(streams)
            f = h.square()  # keeps h for backward, as sublayers do
            streams = streams.write(f if kinds.sublayer_dtype is None else f.to(kinds.sublayer_dtype), f_bias)
        return (streams.tensor if head is None else head.forward(streams)), leaves


def _like(module: nn.Module, device: torch.device) -> Any:
    """A module with parameters of its own: the model's may be shards, elsewhere, or have gradients already.

    Its forward is to be called, not the module: hooks are the model's.
    """
    like = object.__new__(type(module))
    vars(like).update(vars(module))
    vars(like).pop("forward", None)  # accelerate puts one there
    vars(like)["_parameters"] = {
        name: None
        if parameter is None
        else nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), parameter.requires_grad)
        for name, parameter in module._parameters.items()
    }
    return like


def is_connection_or_head(module: nn.Module) -> bool:
    return recipe_of_connection(module) is not None or _is_head(module)


def _is_head(module: nn.Module) -> bool:
    """A HyperHead, mhckit's own or one that `mhckit.integrations` replaced."""
    replaced = hasattr(type(module), "replaced") and type(module).__name__.endswith("HyperHead")
    return isinstance(module, HyperHead) or replaced


def _fits(head: nn.Module, recipe: Recipe, dim: int) -> bool:
    if isinstance(head, HyperHead):
        return (head.recipe.streams, head.dim) == (recipe.streams, dim)
    fn: Any = getattr(head, "hc_fn", None)
    return fn is None or fn.shape == (recipe.streams, recipe.streams * dim)


def _width(connection: Any, recipe: Recipe) -> int:
    return connection.dim if isinstance(connection, HyperConnection) else connection.fn.shape[-1] // recipe.streams


def _describe(module: Any) -> tuple[Any, ...]:
    """What tells kinds of modules apart."""
    parameters = tuple(
        (name, parameter.shape, parameter.dtype, parameter.device, parameter.requires_grad)
        for name, parameter in module._parameters.items()
        if parameter is not None
    )
    names = ("recipe", "mhckit_recipe", "dim", "out_dtype", "out_norm_eps", "backend")
    return type(module), parameters, *(getattr(module, name, None) for name in names)
