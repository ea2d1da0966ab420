"""Activation checkpointing of a model of streams: same gradients, and only what was asked for runs again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from networks import Connected, make
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mhckit
from mhckit import Recipe, Streams

PRESETS = ["deepseek_v4", "deepseek_v41", "hy_v4"]
DEPTH = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Block = Callable[[Streams], Streams]
Wrap = Callable[[Block, Streams], Streams]


class Counted(TorchDispatchMode):
    """How often each of mhckit's operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mhckit":
            self.runs[func._opname] += 1
        return func(*args, **(kwargs or {}))


def _sublayers(model: Connected, first: int, last: int) -> Block:
    def block(streams: Streams) -> Streams:
        for index in range(first, last):
            h, streams = model.connections[index](streams)
            streams = streams.write(model.sublayers[index](h))
        return streams

    return block


def _step(model: Connected, h: Tensor, wrap: Wrap, size: int = 1) -> tuple[dict[str, Tensor], Counter[str]]:
    """Gradients of a model whose blocks of so many sublayers are wrapped, and what ran in the backward."""
    model.zero_grad()
    h = h.clone().requires_grad_()
    streams = Streams.expand(h, model.recipe.streams)
    for first in range(0, len(model.sublayers), size):
        streams = wrap(_sublayers(model, first, first + size), streams)
    loss = model.head(streams).sin().sum()
    with Counted() as counted:
        loss.backward()
    tensors = {"h": h, **dict(model.named_parameters())}
    return {name: tensor.grad.clone() for name, tensor in tensors.items()}, counted.runs


def _assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        assert torch.equal(gradient, want[name]), name


def _plain(block: Block, streams: Streams) -> Streams:
    return block(streams)


def _reentrant(block: Block, streams: Streams) -> Streams:
    """The reentrant kind sees gradients of tensors alone: Streams go in and out as their tensors."""
    specs = []
    tensors, spec = pytree.tree_flatten(streams)

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves, result = pytree.tree_flatten(block(pytree.tree_unflatten(tensors, spec)))
        specs.append(result)
        return tuple(leaves)

    leaves: Any = checkpoint(flat, *tensors, use_reentrant=True)
    return pytree.tree_unflatten(leaves, specs[0])


_not_reentrant = partial(checkpoint, use_reentrant=False)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("wrap", [_not_reentrant, _reentrant], ids=["not reentrant", "reentrant"])
def test_full(preset: str, size: int, wrap: Wrap) -> None:
    _, model, h = make(Recipe.preset(preset), depth=DEPTH)
    want, once = _step(model, h, _plain)
    got, runs = _step(model, h, wrap, size)
    _assert_equal(got, want)
    assert once["enter_fwd"] == once["junction_fwd"] == 0
    assert runs["enter_fwd"] == 1
    assert runs["junction_fwd"] == DEPTH - 1
    assert runs["junction_bwd"] == DEPTH - 1


def test_reentrant_says_that_it_sees_no_gradients_in_streams() -> None:
    _, model, h = make(Recipe.preset("deepseek_v4"), depth=DEPTH)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        streams: Any = checkpoint(_sublayers(model, 0, 1), Streams.expand(h.requires_grad_(), 4), use_reentrant=True)
    assert not streams.tensor.requires_grad


SAVED = {
    "both": (torch.ops.mhckit.enter_fwd.default, torch.ops.mhckit.junction_fwd.default),
    "junction": (torch.ops.mhckit.junction_fwd.default,),
    "none": (),
}


def _policy(saved: tuple[Any, ...], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("preset", PRESETS)
def test_selective(preset: str, saved: str, size: int) -> None:
    """What the policy saves does not run again, and all else does."""
    _, model, h = make(Recipe.preset(preset), depth=DEPTH)
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, SAVED[saved]))
    want, _ = _step(model, h, _plain)
    got, runs = _step(model, h, partial(_not_reentrant, context_fn=contexts), size)
    _assert_equal(got, want)
    assert runs["enter_fwd"] == (0 if saved == "both" else 1)
    assert runs["junction_fwd"] == (DEPTH - 1 if saved == "none" else 0)
    assert runs["junction_bwd"] == DEPTH - 1


def test_selective_by_a_list_of_operators() -> None:
    _, model, h = make(Recipe.preset("deepseek_v4"), depth=DEPTH)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.mhckit.junction_fwd.default])
    got, runs = _step(model, h, partial(_not_reentrant, context_fn=contexts))
    _assert_equal(got, _step(model, h, _plain)[0])
    assert runs["enter_fwd"] == 1
    assert runs["junction_fwd"] == 0


def test_selective_sees_kernels() -> None:
    """A policy watches calls that would go past the dispatcher, straight to a kernel, otherwise."""
    with mhckit.backend("triton"):
        implementation = mhckit.explain(torch.zeros(1, 4, 8, device=DEVICE))
    if implementation.startswith("raises"):
        pytest.skip(implementation)
    _, model, h = make(Recipe.preset("deepseek_v4"), depth=2, backend="triton")
    model, h = model.to(DEVICE), h.to(DEVICE)
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, SAVED["junction"]))
    want, _ = _step(model, h, _plain)
    got, runs = _step(model, h, partial(_not_reentrant, context_fn=contexts), size=2)
    _assert_equal(got, want)
    assert runs["enter_fwd"] == 1
    assert runs["junction_fwd"] == 0
