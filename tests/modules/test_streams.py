"""Streams: deferred write-back, and a passage through everything PyTorch puts between two modules."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from networks import make
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import mhckit
from mhckit import HyperConnection, HyperHead, Recipe, Streams
from mhckit.ops import _register

RECIPE = Recipe.preset("deepseek_v4")


def _pending() -> Streams:
    h, streams = HyperConnection(8, RECIPE)(Streams(torch.randn(3, 4, 8)))
    return streams.write(h.sin(), torch.randn(8))


def test_write_runs_nothing_until_the_streams_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    h, streams = HyperConnection(8, RECIPE)(Streams(torch.randn(3, 4, 8)))
    ran: list[str] = []
    original = _register._without_autocast
    monkeypatch.setattr(_register, "_without_autocast", lambda device: ran.append(device) or original(device))
    written = streams.write(h)
    assert ran == []
    HyperConnection(8, RECIPE)(written)
    assert len(ran) == 1  # one junction, not a write and a read


def test_tensor_materialises() -> None:
    streams = _pending()
    assert streams.mix is not None
    assert streams.f is not None
    want = mhckit.leave(streams.x, streams.f, streams.mix, recipe=RECIPE, f_bias=streams.f_bias)
    assert torch.equal(streams.tensor, want)
    fresh = Streams.expand(torch.randn(3, 8), 4)
    assert fresh.tensor is fresh.x
    assert fresh.x.shape == (3, 4, 8)


def test_misuse() -> None:
    fresh = Streams(torch.randn(3, 4, 8))
    with pytest.raises(ValueError, match="nothing has been read from these streams"):
        fresh.write(torch.randn(3, 8))
    h, streams = HyperConnection(8, RECIPE)(fresh)
    with pytest.raises(ValueError, match="a sublayer output is already waiting"):
        streams.write(h).write(h)
    with pytest.raises(ValueError, match="these streams were read and nothing was written"):
        HyperConnection(8, RECIPE)(streams)
    for lost in (lambda: streams.tensor, lambda: HyperHead(8, RECIPE)(streams)):
        with pytest.raises(ValueError, match=r"use what streams.write\(f\) returned"):
            lost()
    with pytest.raises(ValueError, match=re.escape("f must be [..., C] = (3, 8), got (3, 7)")):
        streams.write(h[..., :7])
    with pytest.raises(ValueError, match=re.escape("f_bias must be [C] = (8,), got (7,)")):
        streams.write(h, torch.randn(7))


def test_pytree() -> None:
    streams = _pending()
    leaves, spec = pytree.tree_flatten(streams)
    assert len(leaves) == 6  # x, pre, post, res, f, f_bias
    back = pytree.tree_unflatten(leaves, spec)
    assert isinstance(back, Streams)
    assert isinstance(back.mix, mhckit.Mix)
    assert torch.equal(back.tensor, streams.tensor)
    doubled = pytree.tree_map(lambda t: t.double(), streams)
    assert doubled.tensor.dtype == torch.float64
    for other in (Streams(streams.x), HyperConnection(8, RECIPE)(Streams(streams.x))[1]):
        detached = pytree.tree_map(lambda t: t.detach(), other)  # only what is there is a leaf
        assert torch.equal(detached.x, other.x)
        assert (detached.mix is None, detached.f) == (other.mix is None, None)
    identity = HyperConnection(8, "hy_v4")(Streams(streams.x))[1]
    assert pytree.tree_map(lambda t: t.detach(), identity).mix.res is None


def test_deepcopy() -> None:
    with torch.no_grad():
        streams = _pending()
    twin = copy.deepcopy(streams)
    assert torch.equal(twin.tensor, streams.tensor)
    assert twin.x is not streams.x


def _assert_same_gradients(run, model: nn.Module, h: torch.Tensor) -> None:
    """run(h) against model(h): the same output and the same gradient for every parameter."""
    weights = torch.randn_like(h)
    (model(h) * weights).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    out = run(h)
    torch.testing.assert_close(out, model(h))
    (out * weights).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.parametrize("preset", ["deepseek_v4", "deepseek_v41", "hy_v4"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_graph_breaks(preset: str, backend: str) -> None:
    torch._dynamo.reset()
    _, connected, h = make(Recipe.preset(preset))
    _assert_same_gradients(torch.compile(connected, fullgraph=True, backend=backend), connected, h)


def test_crosses_the_border_of_a_compiled_block() -> None:
    """Each block compiled on its own: pending Streams are its input and its output."""
    torch._dynamo.reset()
    _, connected, h = make(RECIPE)

    def block(streams: Streams, index: int) -> Streams:
        h, streams = connected.connections[index](streams)
        return streams.write(connected.sublayers[index](h))

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")

    def run(h: torch.Tensor) -> torch.Tensor:
        streams = Streams.expand(h, 4)
        for index in range(len(connected.sublayers)):
            streams = compiled(streams, index)
        assert isinstance(streams, Streams)
        return connected.head(streams)

    _assert_same_gradients(run, connected, h)


@pytest.mark.parametrize("preset", ["deepseek_v4", "deepseek_v41", "hy_v4"])
def test_checkpointed_blocks(preset: str) -> None:
    _, connected, h = make(Recipe.preset(preset))

    def block(streams: Streams, index: int) -> Streams:
        h, streams = connected.connections[index](streams)
        return streams.write(connected.sublayers[index](h))

    def run(h: torch.Tensor) -> torch.Tensor:
        streams = Streams.expand(h, connected.recipe.streams)
        for index in range(len(connected.sublayers)):
            streams = checkpoint(block, streams, index, use_reentrant=False)
        return connected.head(streams)

    _assert_same_gradients(run, connected, h)


def test_exports() -> None:
    _, connected, h = make(RECIPE)
    program = torch.export.export(connected, (h,))
    torch.testing.assert_close(program.module()(h), connected(h))


def test_exports_with_streams_at_both_ends(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.connection = HyperConnection(8, RECIPE)

        def forward(self, streams: Streams) -> Streams:
            h, streams = self.connection(streams)
            return streams.write(h.sin())

    block = Block()
    with torch.no_grad():
        pending = _pending()
    program = torch.export.export(block, (pending,))
    torch.export.save(program, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    torch.testing.assert_close(loaded(pending).tensor, block(pending).tensor)


def test_hooks_and_containers() -> None:
    """Forward hooks and nested containers hand Streams on unharmed."""
    connection, head = HyperConnection(8, RECIPE), HyperHead(8, RECIPE)
    seen = []
    connection.register_forward_hook(lambda module, args, output: seen.append(type(output[1])))
    h, streams = connection(Streams(torch.randn(3, 4, 8)))
    nested = pytree.tree_map(lambda t: t, {"streams": [streams.write(h)]})
    assert seen == [Streams]
    assert torch.equal(head(nested["streams"][0]), head(streams.write(h)))
