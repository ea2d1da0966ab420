"""Health beside PyTorch's machinery: nothing waits for the device, nothing is counted twice, nothing stays behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from stream_network import Network, batch, mixes_and_last_streams
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mhckit
from mhckit.health import Health, mean_mixing_matrices
from mhckit.health._coefficients import measure


class NoSync(TorchDispatchMode):
    """Raises where a number is asked for, or a shape that depends on numbers: on a GPU, the host would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "unique2", "equal", "is_nonzero", "tolist"):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


class Ran(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Checkpointed(Network):
    """Every block runs again in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__("hc")
        self.use_reentrant = use_reentrant

    def forward(self, h: Tensor) -> Tensor:
        x = self.start(h).tensor
        for block in self.blocks:
            x = checkpoint(partial(_run, block), x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Recomputed(Network):
    def forward(self, h: Tensor) -> Tensor:
        with mhckit.recompute(self.blocks):
            return super().forward(h)


def _run(block: nn.Module, x: Tensor) -> Tensor:
    return block(mhckit.Streams(x)).tensor


def _hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def _metrics_of(network: nn.Module, run: Any, h: Tensor, *, backward_inside: bool = False) -> dict[str, Tensor]:
    health = Health(network)
    network.zero_grad()
    with health.sample():
        loss = run(h).square().sum()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    return health.metrics()


def _assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_nothing_waits_for_the_device() -> None:
    network, h = Network("deepseek_v4"), batch()
    with NoSync():
        health = Health(network, tokens=4)
        with health.sample():
            loss = network(h).sum()
        loss.backward()
        assert len(health.metrics()) == 25 and health.per_sublayer()
        mean_mixing_matrices(network, h)
        with pytest.raises(AssertionError, match="waits for the device"):
            loss.item()


def test_tensors_without_data() -> None:
    """Where there is no data there is nothing to wait for."""
    network = Network("deepseek_v4").to("meta")
    metrics = _metrics_of(network, network, torch.empty(2, 3, 8, device="meta"))
    assert all(value.is_meta and value.shape == () for value in metrics.values())
    with FakeTensorMode():
        network = Network("paper")
        metrics = _metrics_of(network, network, batch())
    assert metrics["health/phi_grad_norm"].shape == ()


@torch.no_grad()
def test_under_autocast_nothing_is_rounded() -> None:
    seen = mixes_and_last_streams(Network("hc"), batch())
    expected = measure(*seen, tokens=256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = measure(*seen, tokens=256)
    for numbers, exact in zip(got, expected, strict=True):
        assert all(torch.equal(numbers[name], exact[name]) for name in exact)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_what_runs_again_does_not_count_again(use_reentrant: bool, backward_inside: bool) -> None:
    network = Checkpointed(use_reentrant=use_reentrant)
    h = batch().requires_grad_()  # a reentrant checkpoint needs an input that does
    expected = _metrics_of(network, lambda h: Network.forward(network, h), h)
    _assert_same(_metrics_of(network, network, h, backward_inside=backward_inside), expected)


def test_no_operator_is_added_to_the_forward() -> None:
    """Selective checkpointing replays saved results of operators in their order. (A detach it knows to ignore.)"""
    network, h = Network("deepseek_v4"), batch()
    with Ran() as plain:
        network(h)
    with Health(network).sample(), Ran() as sampled:
        network(h)
    assert plain.names and sampled.names == plain.names


def test_recompute() -> None:
    network, h = Recomputed("deepseek_v4"), batch()
    expected = _metrics_of(network, lambda h: Network.forward(network, h), h)
    _assert_same(_metrics_of(network, network, h), expected)


def test_of_several_forwards_the_first_counts() -> None:
    network, first, second = Network("hc"), batch(), batch(4, 7)
    expected = _metrics_of(network, network, first)
    health = Health(network)
    with health.sample():
        network(first)
        network(second)
    metrics = health.metrics()
    assert metrics["health/composite_gain_forward"] == expected["health/composite_gain_forward"]
    assert metrics["health/stream_cosine"] == expected["health/stream_cosine"]


def test_hooks_are_there_only_meanwhile() -> None:
    network, h = Network(), batch()
    health = Health(network)
    with health.sample():
        assert _hooks(network) == len(network.blocks)
        network(h)
    before = health.metrics()["health/composite_gain_backward"]
    with pytest.raises(KeyError), health.sample():
        network(2 * h)
        raise KeyError
    assert _hooks(network) == 0
    assert health.metrics()["health/composite_gain_backward"] == before


def _compiled(kind: str, backend: Any = "aot_eager") -> Any:
    """A network that is compiled in some way."""
    options: Any = {"backend": backend, "fullgraph": True}
    network = Network("hc")
    if kind == "model":
        return torch.compile(network, **options)
    for index, block in enumerate(network.blocks):
        if kind == "blocks":
            block.compile(**options)
        elif kind == "wrapped blocks":
            network.blocks[index] = torch.compile(block, **options)
        elif kind == "forwards":
            block.forward = torch.compile(block.forward, **options)
        else:
            block.sublayer.compile(**options)
    return network


@pytest.mark.parametrize("kind", ["model", "blocks", "wrapped blocks", "forwards", "sublayers"])
@pytest.mark.parametrize("fresh", [False, True], ids=["compiled", "fresh"])
def test_compiled(kind: str, fresh: bool) -> None:
    """Whether it was compiled before or not; and it is not compiled again because of us."""
    torch.compiler.reset()
    network = _compiled(kind)
    h = batch()
    with torch.compiler.set_stance("force_eager"):
        expected = _metrics_of(network, network, h)
    if not fresh:
        network(h)
    _assert_same(_metrics_of(network, network, h), expected)
    network(h)
    with torch.compiler.set_stance("fail_on_recompile"):
        _metrics_of(network, network, h)
        network(h)


def test_compiled_sublayers_stay_compiled() -> None:
    runs = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        return lambda *args: runs.append(graph) or graph.forward(*args)

    torch.compiler.reset()
    network = _compiled("sublayers", backend)
    _metrics_of(network, network, batch())
    assert len(runs) == len(network.blocks)


def test_a_compiled_function_is_an_error_that_says_what_to_do() -> None:
    torch.compiler.reset()
    network, h = Network(), batch()
    health, step = Health(network), torch.compile(lambda h: network(h).sum(), backend="aot_eager")
    for _ in range(2):  # when it is compiled, and when it is there already
        with pytest.raises(RuntimeError, match=r"set_stance\('force_eager'\)"), health.sample():
            step(h)
    with health.sample(), torch.compiler.set_stance("force_eager"):
        step(h)
    assert health.metrics()


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"Linear has no mhckit\.HyperConnection"):
        Health(nn.Linear(3, 3))
    for tokens in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match="tokens must be a positive int"):
            Health(Network(), tokens=tokens)
    health = Health(Network())
    for ask in (health.metrics, health.per_sublayer, lambda: health.names):
        with pytest.raises(RuntimeError, match="nothing was sampled yet"):
            ask()
    with pytest.raises(RuntimeError, match="none of the model's 5 hyper-connections was seen"), health.sample():
        pass
