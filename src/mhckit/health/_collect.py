"""What the connections of a model compute in one forward, seen by hooks that are there only meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mhckit.modules import HyperConnection, Streams
from mhckit.ops import Mix

KINDS = ("phi", "scale", "bias")


class Collected:
    """The mix of every connection that ran, in the order in which they ran, and the streams that the last one read.

    Of a connection that runs more than once the first run counts: activation checkpointing runs it again in backward,
    and gradient accumulation with other tokens. Nothing is computed here, for selective checkpointing replays the
    operators of a forward by their order: an additional one could give it another operator's result.
    """

    def __init__(self) -> None:
        self.mixes: dict[nn.Module, Mix] = {}
        self.last_x: Tensor | None = None

    def hook(self, module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or module in self.mixes:
            return
        streams = output[1] if isinstance(output, tuple) and len(output) == 2 else None
        if isinstance(streams, Streams) and streams.mix is not None:
            pre, post, res = streams.mix
            self.mixes[module] = Mix(_local(pre), _local(post), None if res is None else _local(res))
            self.last_x = _local(streams.x)


@contextlib.contextmanager
def collecting(model: nn.Module) -> Iterator[Collected]:
    """What `model` computes inside the ``with`` block; an error if none of its connections was seen."""
    connections = find_connections(model)
    collected = Collected()
    hooks = [connection.register_forward_hook(collected.hook) for connection in connections]
    try:
        with _eager_if_compiled(model):
            yield collected
    finally:
        for hook in hooks:
            hook.remove()
    if not collected.mixes:
        raise RuntimeError(
            f"none of the model's {len(connections)} hyper-connections was seen: call the model inside the block; in a "
            "function given to torch.compile hooks do not run: call it inside "
            "torch.compiler.set_stance('force_eager') then"
        )


def find_connections(model: nn.Module) -> dict[nn.Module, str]:
    """The hyper-connections of a model, with their names."""
    found = {module: name for name, module in model.named_modules() if _is_connection(module)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no mhckit.HyperConnection (those of transformers count after "
            "mhckit.integrations.transformers.apply)"
        )
    return found


def learned(connection: nn.Module) -> dict[str, Tensor | None]:
    """phi, scale and bias of a connection; fn and base are what transformers calls them."""
    names = KINDS if isinstance(connection, HyperConnection) else ("fn", "scale", "base")
    return {kind: getattr(connection, name) for kind, name in zip(KINDS, names, strict=True)}


def _is_connection(module: nn.Module) -> bool:
    patched = hasattr(module, "mhckit_recipe") and all(hasattr(module, name) for name in ("fn", "scale", "base"))
    return patched or isinstance(module, HyperConnection)


def _eager_if_compiled(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Compiled code runs no hooks that came after it, so a module that holds connections runs as it was written."""
    for module in model.modules():
        if _is_compiled(module) and any(_is_connection(inner) for inner in module.modules()):
            return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")


def _local(tensor: Any) -> Tensor:
    """Without a graph, and of a DTensor the tokens that are here."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
