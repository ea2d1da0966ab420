"""Block recompute: the same bits, fewer bytes, and sublayers that run once."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mhckit
from mhckit import HyperConnection, HyperHead, Recipe, Streams
from mhckit.modules import streams as streams_module
from mhckit.modules.recompute import group_size

DIM, TOKENS = 12, 7


class Sublayer(nn.Module):
    """Keeps what it reads, through a view, and is run only once per step."""

    def __init__(self, dim: int, *, bias: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.runs = 0

    def forward(self, h: Tensor) -> Tensor:
        self.runs += 1
        gate, up = self.up(h.view(-1, h.shape[-1])).chunk(2, -1)
        return nn.functional.linear(self.dropout(gate.tanh() * up), self.down.weight).view(h.shape) * (1 + h[..., :1])


class Network(nn.Module):
    def __init__(self, recipe: Recipe, sublayers: int = 7, *, norm: bool = True, **options: Any) -> None:
        super().__init__()
        self.recipe = recipe
        self.connections = nn.ModuleList(
            HyperConnection(DIM, recipe, layer_index=index, norm=norm) for index in range(sublayers)
        )
        self.sublayers = nn.ModuleList(Sublayer(DIM, **options) for _ in range(sublayers))
        self.head = HyperHead(DIM, recipe)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)

    def forward(self, h: Tensor, run: Callable[..., Tensor] = lambda sublayer, h: sublayer(h)) -> Tensor:
        streams = Streams.expand(h, self.recipe.streams)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            h, streams = connection(streams)
            streams = streams.write(run(sublayer, h), sublayer.down.bias)
        return self.head(streams)


@contextlib.contextmanager
def _watched(context: mhckit.recompute) -> Iterator[list[Any]]:
    """What the context saves, in a list."""
    pack, packed = context._pack, []
    context._pack = lambda tensor: packed.append(pack(tensor)) or packed[-1]
    with context:
        yield packed


def _inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)


def _gradients(network: nn.Module, compute: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
    h = _inputs(dtype).requires_grad_()
    network.zero_grad()
    torch.manual_seed(3)
    compute(h).float().square().sum().backward()
    return [leaf.grad for leaf in (h, *network.parameters()) if leaf.grad is not None]


def _assert_same_bits(network: Network, dtype: torch.dtype = torch.float32, every: int | None = None, **call: Any):
    """As without; and of every read that is not the first of its group, what is saved is to be rebuilt."""

    def recomputed(h: Tensor) -> Tensor:
        context = mhckit.recompute(network, every=every)
        with _watched(context) as packed:
            out = network(h, **call)
        reads = len(network.connections)
        rebuilt = {(id(saved.handle.group), saved.handle.key) for saved in packed if saved.handle is not None}
        assert len(rebuilt) >= reads - math.ceil(reads / context.every)
        return out

    plain = _gradients(network, lambda h: network(h, **call), dtype)
    again = _gradients(network, recomputed, dtype)
    assert len(plain) == len(again) > 10
    for i, (want, got) in enumerate(zip(plain, again, strict=True)):
        assert want.isfinite().all() and torch.equal(want, got), i


RECIPES = {
    "paper": Recipe(),
    "deepseek_v4": Recipe.preset("deepseek_v4"),
    "shifted": Recipe.preset("deepseek_v41"),
    "identity": Recipe.preset("hy_v4", streams=2),
    "static": Recipe.preset("mhc_cu", dynamic=False),
    "free": Recipe.preset("hc"),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("every", [None, 1, 3, 100])
def test_gradients_are_the_same_bits(name: str, every: int | None) -> None:
    _assert_same_bits(Network(RECIPES[name]), every=every)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    network = Network(Recipe())
    network.sublayers.to(dtype)
    _assert_same_bits(network, dtype)


def test_sublayers_with_norms_of_their_own() -> None:
    network = Network(Recipe(), sublayers=3, norm=False)
    _assert_same_bits(network, run=lambda sublayer, h: sublayer(nn.functional.rms_norm(h, (DIM,))))


def test_bias_that_is_written_with_the_output() -> None:
    _assert_same_bits(Network(Recipe(), bias=True))


def test_dropout_is_drawn_once() -> None:
    network = Network(Recipe(), dropout=0.5)
    _assert_same_bits(network)
    assert all(sublayer.runs == 2 for sublayer in network.sublayers)  # once in each of the two steps


def test_checkpointed_sublayers() -> None:
    _assert_same_bits(
        Network(Recipe(), dropout=0.5), run=lambda sublayer, h: checkpoint(sublayer, h, use_reentrant=False)
    )


def test_backward_twice() -> None:
    network, h = Network(Recipe()), _inputs().requires_grad_()
    with mhckit.recompute(network):
        loss = network(h).square().sum()
    loss.backward(retain_graph=True)
    once = h.grad.clone()
    h.grad = None
    loss.backward()
    assert torch.equal(h.grad, once)


def test_sublayer_that_writes_into_what_it_reads() -> None:
    """What is saved after the write is not what the read made: it is kept."""
    _assert_same_bits(Network(Recipe()), every=100, run=lambda sublayer, h: sublayer(h.mul_(2)))


def test_tensor_written_into_after_it_was_kept() -> None:
    def spoil(sublayer: nn.Module, h: Tensor) -> Tensor:
        wide = h.exp()
        f = sublayer(h) * wide
        wide.add_(1)
        return f

    network = Network(Recipe())
    with mhckit.recompute(network):
        loss = network(_inputs(), run=spoil).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_output_written_into_after_it_was_handed_over() -> None:
    """Also where only what is rebuilt needs it."""
    network, outputs = Network(Recipe()), []
    with mhckit.recompute(network, every=100):
        loss = network(_inputs(), run=lambda sublayer, h: outputs.append(sublayer(h)) or outputs[-1]).sum()
    with torch.no_grad():
        outputs[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, network.sublayers[-1].up.weight)


def _two_chains(network: Network, h: Tensor) -> Tensor:
    one = two = Streams.expand(h, 4)
    for connection, sublayer in zip(network.connections, network.sublayers, strict=True):
        (first, one), (second, two) = connection(one), connection(two)
        one, two = one.write(sublayer(first)), two.write(sublayer(2 * second))
    return network.head(one) + network.head(two)


def _side_branch(network: Network, h: Tensor) -> Tensor:
    streams, extra = Streams.expand(h, 4), []
    for connection, sublayer in zip(network.connections, network.sublayers, strict=True):
        before = streams
        h, streams = connection(before)
        streams = streams.write(sublayer(h))
        side, branch = network.connections[0](before)
        extra.append(network.head(branch.write(side.tanh())))
    return network.head(streams) + sum(extra)


def _changed_streams(network: Network, h: Tensor) -> Tensor:
    streams = Streams.expand(h, 4)
    for connection, sublayer in zip(network.connections, network.sublayers, strict=True):
        h, streams = connection(Streams(1.5 * streams.x, streams.mix, streams.f))
        streams = streams.write(sublayer(h))
    return network.head(streams)


def _operator_between(network: Network, h: Tensor) -> Tensor:
    streams, own = Streams.expand(h, 4), network.connections[0]
    for index, (connection, sublayer) in enumerate(zip(network.connections, network.sublayers, strict=True)):
        if index == 2:
            x, h, mix = mhckit.junction(
                streams.x, streams.f, streams.mix, own.phi, own.scale, own.bias, recipe=network.recipe
            )
            streams = Streams(x, mix).write(h.tanh())
        h, streams = connection(streams)
        streams = streams.write(sublayer(h))
    return network.head(streams)


def _part_without_gradients(network: Network, h: Tensor) -> Tensor:
    streams = Streams.expand(h, 4)
    for index, (connection, sublayer) in enumerate(zip(network.connections, network.sublayers, strict=True)):
        with torch.set_grad_enabled(index != 3):
            h, streams = connection(streams)
            streams = streams.write(sublayer(h))
    return network.head(streams)


def _nested(network: Network, h: Tensor) -> Tensor:
    streams = Streams.expand(h, 4)
    for index, (connection, sublayer) in enumerate(zip(network.connections, network.sublayers, strict=True)):
        with mhckit.recompute(every=2) if index == 3 else contextlib.nullcontext():
            h, streams = connection(streams)
        streams = streams.write(sublayer(h))
    return network.head(streams)


@pytest.mark.parametrize(
    "compute",
    [_two_chains, _side_branch, _changed_streams, _operator_between, _part_without_gradients, _nested],
    ids=lambda function: function.__name__.strip("_"),
)
def test_reads_that_do_not_follow_each_other(compute: Callable[[Network, Tensor], Tensor]) -> None:
    network = Network(Recipe())

    def recomputed(h: Tensor) -> Tensor:
        with mhckit.recompute(every=100):
            return compute(network, h)

    plain = _gradients(network, lambda h: compute(network, h), torch.float32)
    again = _gradients(network, recomputed, torch.float32)
    for want, got in zip(plain, again, strict=True):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_a_forward_in_another_thread_is_left_alone() -> None:
    network, other, outputs = Network(Recipe()), Network(Recipe()), []
    with mhckit.recompute(network, every=100):
        thread = threading.Thread(target=lambda: outputs.append(other(_inputs())))
        thread.start()
        thread.join()
        loss = network(_inputs()).sum()
    loss.backward()
    assert torch.equal(outputs[0], other(_inputs()))


def test_where_hooks_are_disabled_nothing_stays_behind() -> None:
    with (
        pytest.raises(RuntimeError, match="no hooks here"),
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
        mhckit.recompute(every=2),
    ):
        pass
    assert streams_module._observer is None and not streams_module._observed


def test_connections_of_a_class_of_ones_own() -> None:
    class Custom(HyperConnection):
        pass

    assert mhckit.recompute([Custom(DIM) for _ in range(32)]).every == 4


class _Bytes:
    """Storages that autograd holds through hooks, each counted once."""

    def __init__(self) -> None:
        self.storages: dict[int, Any] = {}

    def add(self, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = storage

    def without(self, parameters: Any) -> int:
        own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        return sum(storage.nbytes() for address, storage in self.storages.items() if address not in own)


def _held_bytes(network: Network, every: int | None) -> int:
    """What a forward leaves behind for the backward, besides parameters."""
    held = _Bytes()
    run = lambda _sublayer, h: h * h.detach()  # noqa: E731  keeps what it reads, and nothing else
    parameters = list(network.parameters())
    if every is None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.add(t) or t, lambda t: t):
            out = network(_inputs(), run=run)
        return held.without([*parameters, out])
    with _watched(mhckit.recompute(every=every)) as packed:
        out = network(_inputs(), run=run)
    for saved in packed:
        if saved.handle is None:
            held.add(saved.kept.tensor)
        else:
            group = saved.handle.group
            parts = [group.x, *(part for step in group.steps for part in (step.f, step.post, step.res, step.weights))]
            held.add(*(part.tensor for part in parts))
    return held.without([*parameters, out])


@pytest.mark.parametrize(("sublayers", "every"), [(8, 4), (7, 3), (6, 1)])
def test_bytes_that_are_kept(sublayers: int, every: int) -> None:
    """Streams and reads of a group's first sublayer, the outputs of all, coefficients and statistics; and, once, the
    streams that the head reads.
    """
    network, n = Network(Recipe(), sublayers), 4
    groups = math.ceil(sublayers / every)
    token = 4 * 2 * TOKENS
    streams, outputs, pre = n * DIM * token, DIM * token, n * token
    coefficients = (n + n * n + network.recipe.rows + 2) * token
    everything = (sublayers + 1) * streams + sublayers * (2 * outputs + coefficients)
    assert _held_bytes(network, None) == everything
    rebuilt = (sublayers - groups) * (streams + outputs - pre)
    assert _held_bytes(network, every) == everything - rebuilt


def test_group_size_is_the_cheapest() -> None:
    assert [group_size(length, 4) for length in (1, 2, 8, 32, 64, 128)] == [1, 1, 2, 4, 6, 8]
    for length in range(1, 200):
        size = group_size(length, 4)
        assert abs(size - math.sqrt(4 * length / 6)) <= 2.5


def test_default_group_size_counts_connections() -> None:
    network = Network(Recipe(), sublayers=32)
    assert mhckit.recompute(network).every == mhckit.recompute(network.connections).every == 4
    assert mhckit.recompute(list(network.connections)[:8]).every == group_size(8, 4)


def test_memory_is_let_go_of_in_backward() -> None:
    network = Network(Recipe(), sublayers=9)
    with _watched(mhckit.recompute(network, every=3)) as packed:
        loss = network(_inputs()).sum()
    groups = {saved.handle.group for saved in packed if saved.handle is not None}
    assert len(groups) == 3
    loss.backward()
    assert all(not group.rebuilt for group in groups)


def test_reads_without_gradients() -> None:
    network = Network(Recipe())
    with torch.no_grad():
        expected = network(_inputs())
        with mhckit.recompute(network):
            assert torch.equal(network(_inputs()), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_network(backend: str) -> None:
    network = Network(Recipe(), sublayers=3)
    compiled = torch.compile(network, backend=backend)
    compiled(_inputs())  # compiled without, first: the reads of this graph are not seen again

    def recomputed(h: Tensor) -> Tensor:
        with _watched(mhckit.recompute(network, every=3)) as packed:
            out = compiled(h)
        assert {saved.handle.key for saved in packed if saved.handle is not None} >= {(0, "y"), (1, "y")}
        return out

    plain = _gradients(network, network, torch.float32)
    again = _gradients(network, recomputed, torch.float32)
    for want, got in zip(plain, again, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_fullgraph_says_why() -> None:
    network = Network(Recipe(), sublayers=2)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_read_for_recompute"), mhckit.recompute(network):
        compiled(_inputs())


def test_nothing_remains_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), mhckit.recompute(every=2):
        raise ZeroDivisionError
    assert streams_module._observer is None and not streams_module._observed


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {}, "needs blocks"),
        ((), {"every": 0}, "every must be a positive int, got 0"),
        ((), {"every": True}, "every must be a positive int, got True"),
        ((nn.Linear(2, 2),), {}, "found no HyperConnection"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mhckit.recompute(*arguments, **options)


def test_used_twice_at_once() -> None:
    context = mhckit.recompute(every=2)
    network = Network(Recipe(), sublayers=2)
    with context:
        network(_inputs())
        with pytest.raises(RuntimeError, match="already in use"):
            context.__enter__()


def test_blocks_without_connections() -> None:
    with pytest.raises(RuntimeError, match="saw no HyperConnection"), mhckit.recompute(every=2):
        nn.Linear(2, 2)(torch.ones(2))
