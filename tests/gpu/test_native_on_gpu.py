"""Calls that C++ repeats, on a GPU: bits, gradients and errors as Python's, whatever is between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accuracy import cotangents_of, run
from noting_driver import native
from recipes import every_recipe
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mhckit
from mhckit.kernels import _launcher, _native
from mhckit.ops._calls import Calls
from mhckit.ops._register import Operator
from mhckit.testing import Call, make_call

DEVICE = torch.device("cuda")
OPERATORS = ("activate", "coefficients", "expand", "head", "junction", "post", "pre", "project", "sinkhorn")


@pytest.fixture(autouse=True)
def _compiled() -> None:
    native()


@pytest.fixture
def in_cpp(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operators whose calls were repeated by C++, one after the other."""
    module = _native.module(DEVICE)
    assert module is not None
    names: list[str] = []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            return getattr(module, name)

        def call(self, known: Any, args: tuple[Any, ...]) -> Any:
            results = module.call(known, args)
            names.extend(["C++"] if results is not None else [])
            return results

    for operator in Operator.__subclasses__():
        if isinstance(operator._calls, Calls):
            operator._calls.forget()
            monkeypatch.setattr(operator._calls, "_known", None)
    monkeypatch.setattr(_native, "module", lambda device: Noting())
    yield names


def _call(operator: str = "junction", recipe: str = "deepseek_v4", tokens: int = 70, channels: int = 256) -> Call:
    return make_call(
        operator, every_recipe()[recipe], lead=(tokens,), channels=channels, dtype=torch.bfloat16, device=DEVICE
    )


def _assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator(operator: str, in_cpp: list[str]) -> None:
    results = [run(_call(operator), "triton") for _ in range(5)]
    assert len(in_cpp) == 3
    for result in results[1:]:
        _assert_same(result, results[0])


@pytest.mark.parametrize("recipe", every_recipe())
@pytest.mark.parametrize(("tokens", "channels"), [(70, 256), (1, 128), (4000, 384)])
def test_every_recipe(recipe: str, tokens: int, channels: int, in_cpp: list[str]) -> None:
    """Few tokens and many, which are launched in other forms."""
    results = [run(_call(recipe=recipe, tokens=tokens, channels=channels), "triton") for _ in range(5)]
    assert len(in_cpp) == 3
    for result in results[1:]:
        _assert_same(result, results[0])


def _warm(call: Call) -> None:
    for _ in range(3):
        run(call, "triton")


def test_parameters_that_change_are_not_remembered(in_cpp: list[str]) -> None:
    _warm(_call())
    for seed in range(3):
        call = make_call(
            "junction", every_recipe()["deepseek_v4"], lead=(70,), channels=256, dtype=torch.bfloat16, device=DEVICE,
            seed=seed + 1,
        )  # fmt: skip
        before = len(in_cpp)
        got = run(call, "triton")
        assert len(in_cpp) == before + 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_native, "module", lambda device: None)
            patch.setattr(_launcher, "observer", _launcher.run_now_as_observer if False else _observe)
            _assert_same(got, run(call, "triton"))


def _observe(kernel: Any, grid: Any, args: Any, constants: Any) -> None:
    _launcher.run_now(kernel, grid, args, constants)


def test_frozen_parameters_and_gradients_that_nobody_wants(in_cpp: list[str]) -> None:
    call = _call()
    for frozen in ("x", "phi", "f"):
        results = []
        for _ in range(4):
            leaves = call.requires_grad()
            leaves.tensors[frozen].requires_grad_(False)
            outputs = leaves()
            torch.autograd.backward(outputs, cotangents_of(outputs))
            assert leaves.tensors[frozen].grad is None
            results.append({k: t.grad for k, t in leaves.tensors.items() if t.grad is not None})
        for result in results[1:]:
            _assert_same(result, results[0])
    assert len(in_cpp) >= 6


def test_only_some_outputs_are_used(in_cpp: list[str]) -> None:
    call = _call()
    for used in ([0], [1], [0, 1], [2, 3]):
        results = []
        for _ in range(4):
            leaves = call.requires_grad()
            outputs = [leaves()[k] for k in used]
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            results.append({k: t.grad for k, t in leaves.tensors.items() if t.grad is not None})
        for result in results[1:]:
            _assert_same(result, results[0])
    assert in_cpp


def test_in_a_graph_and_on_another_stream(in_cpp: list[str]) -> None:
    call = _call()
    want = run(call, "triton")
    _warm(call)
    leaves = call.requires_grad()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _assert_same(run(call, "triton"), want)
    torch.cuda.current_stream().wait_stream(stream)
    graph, before = torch.cuda.CUDAGraph(), len(in_cpp)
    inputs = [tensor for tensor in leaves.tensors.values()]
    with torch.cuda.graph(graph):
        outputs = leaves()
        cotangents = [torch.ones_like(output) for output in outputs]
        gradients = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    assert len(in_cpp) == before + 1
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        eager = call()
    for got, wanted in zip(outputs, eager, strict=True):
        assert torch.equal(got, wanted)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant: bool, in_cpp: list[str]) -> None:
    call = _call()
    want = run(call, "triton")
    _warm(call)
    names = list(call.tensors)
    leaves = call.requires_grad()

    def junction(*tensors: Tensor) -> tuple[Tensor, ...]:
        return Call("junction", call.recipe, dict(zip(names, tensors, strict=True)))()

    before = len(in_cpp)
    outputs = checkpoint(junction, *leaves.tensors.values(), use_reentrant=reentrant)
    torch.autograd.backward(outputs, cotangents_of(outputs))
    assert len(in_cpp) > before
    _assert_same({f"d{k}": t.grad for k, t in leaves.tensors.items() if t.grad is not None},
                 {k: v for k, v in want.items() if k.startswith("d")})  # fmt: skip


def test_second_derivatives_raise(in_cpp: list[str]) -> None:
    call = _call()
    _warm(call)
    leaves = call.requires_grad()
    y = leaves()[0]
    assert in_cpp
    (gradient,) = torch.autograd.grad(y.float().sum(), leaves.tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        gradient.float().sum().backward()


def test_backward_twice(in_cpp: list[str]) -> None:
    call = _call()
    _warm(call)
    outputs = call.requires_grad()()
    assert in_cpp
    torch.autograd.backward(outputs, cotangents_of(outputs), retain_graph=True)
    torch.autograd.backward(outputs, cotangents_of(outputs))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.backward(outputs, cotangents_of(outputs))


def test_what_was_saved_and_changed_is_noticed(in_cpp: list[str]) -> None:
    call = _call()
    _warm(call)
    leaves = call.requires_grad()
    outputs = leaves()
    assert in_cpp
    outputs[0].data.zero_()  # of which autograd knows nothing
    with torch.no_grad():
        leaves.tensors["phi"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, cotangents_of(outputs))


def test_nothing_stays_allocated(in_cpp: list[str]) -> None:
    call = _call()
    _warm(call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        outputs = call.requires_grad()()
        torch.autograd.backward(outputs, cotangents_of(outputs))
        del outputs
    assert in_cpp
    assert torch.cuda.memory_allocated() <= before + call.tensors["x"].nbytes


Make = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("change", [
    lambda x: x.mT.contiguous().mT,
    lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    lambda x: torch.nn.Parameter(x),
])  # fmt: skip
def test_tensors_of_other_kinds(change: Make, in_cpp: list[str]) -> None:
    call = _call("post")
    want = run(call, "triton")
    _warm(call)
    for _ in range(4):
        changed = Call("post", call.recipe, call.tensors | {"x": change(call.tensors["x"]).detach()})
        _assert_same(run(changed, "triton"), want)


def test_a_kernel_that_cannot_be_launched(in_cpp: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of Triton's sees every launch."""
    call, seen = _call(), []
    _warm(call)
    from triton import knobs

    knobs.runtime.launch_enter_hook.add(lambda metadata: seen.append(metadata))
    try:
        before = len(in_cpp)
        run(call, "triton")
    finally:
        knobs.runtime.launch_enter_hook.calls.clear()
    assert len(in_cpp) == before and len(seen) == 6


def test_autocast_and_inference_mode(in_cpp: list[str]) -> None:
    call = _call()
    _warm(call)
    with torch.no_grad():
        want = call()
        for _ in range(4):
            for got, wanted in zip(call(), want, strict=True):
                assert torch.equal(got, wanted)
    with torch.inference_mode():
        for _ in range(4):
            for got, wanted in zip(call(), want, strict=True):
                assert torch.equal(got, wanted) and got.is_inference()
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(4):
            for got, wanted in zip(call(), want, strict=True):
                assert torch.equal(got, wanted)
    assert len(in_cpp) >= 6


def test_with_mhckit_native_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHCKIT_NATIVE", "0")
    assert _native.module(DEVICE) is None
    assert mhckit.backend
