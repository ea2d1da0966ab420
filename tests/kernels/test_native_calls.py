"""Calls that C++ repeats are autograd's as Python's are: hooks, errors, threads, names. Nothing is computed here."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from noting_driver import OUT_OF_RESOURCES, Driver, noting_driver
from torch import Tensor
from torch._dynamo import compiled_autograd

import mhckit
from mhckit import Recipe
from mhckit.kernels import _launcher
from mhckit.testing import Call, make_call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    with noting_driver(monkeypatch, in_cpp=True) as driver:
        yield driver


def _call(operator: str = "junction", *, recipe: str = "deepseek_v4", tokens: int = 6) -> Call:
    return make_call(operator, Recipe.preset(recipe), lead=(tokens,), channels=8, dtype=torch.bfloat16)


def _backward(outputs: tuple[Tensor, ...], **options: Any) -> None:
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs], **options)


def _known(call: Call) -> tuple[Call, tuple[Tensor, ...]]:
    """A call that C++ repeats, backward included, and its outputs."""
    for _ in range(4):
        leaves = call.requires_grad()
        outputs = leaves()
        _backward(outputs)
    leaves = call.requires_grad()
    return leaves, leaves()


def _launches_in_cpp(driver: Driver, run: Any) -> int:
    driver.forget()
    run()
    assert driver.first == []
    return driver.in_cpp


@pytest.mark.parametrize("operator", ["junction", "coefficients", "post", "pre", "head", "expand", "sinkhorn"])
@pytest.mark.parametrize("gradients", [True, False])
def test_from_the_third_call_on(operator: str, gradients: bool, driver: Driver) -> None:
    for number in range(5):
        call = _call(operator)
        call = call.requires_grad() if gradients else call
        driver.forget()
        outputs = call()
        forward = driver.in_cpp
        assert (forward > 0) == (number >= 2), "the first is worked out, the second repeated in Python, and watched"
        if gradients:
            driver.forget()
            _backward(outputs)
            # The first of C++'s nodes asks Python, and watches it.
            assert (driver.in_cpp > 0) == (number >= 3)


def test_names_and_edges(driver: Driver) -> None:
    leaves, outputs = _known(_call())
    assert driver.in_cpp
    assert {output.grad_fn.name() for output in outputs} == {"_JunctionBackward"}  # type: ignore[union-attr]
    leaf_edges = [edge for edge, _ in outputs[0].grad_fn.next_functions]  # type: ignore[union-attr]
    # A tensor per argument, in their order; the pre that an unshifted recipe reads with is none of them.
    assert [edge is None for edge in leaf_edges] == [i == 3 for i in range(11)]
    assert leaf_edges[0].variable is leaves.tensors["x"]


def test_gradients_go_where_they_belong(driver: Driver) -> None:
    """A gradient for each tensor that wants one, of its shape and dtype, and each in memory of its own."""
    leaves, outputs = _known(_call())
    driver.forget()
    _backward(outputs)
    assert driver.in_cpp == 4
    given = {name: tensor for name, tensor in leaves.tensors.items() if name != "mix_pre"}
    for name, tensor in given.items():
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape and tensor.grad.dtype == tensor.dtype, name
        assert tensor.grad.data_ptr() in driver.again, name
    assert leaves.tensors["mix_pre"].grad is None
    assert len({tensor.grad.data_ptr() for tensor in given.values() if tensor.grad is not None}) == len(given)


def test_gradients_that_nobody_wants(driver: Driver) -> None:
    """Another kind of backward: the first of it asks Python."""
    leaves, outputs = _known(_call())
    x, f = leaves.tensors["x"], leaves.tensors["f"]
    ones = [torch.ones_like(output) for output in outputs]
    for number in range(3):
        driver.forget()
        gradients = torch.autograd.grad(outputs, (x, f), ones, retain_graph=True)
        assert [gradient.shape for gradient in gradients] == [x.shape, f.shape]
        assert (driver.in_cpp > 0) == (number >= 2)


def test_outputs_that_nobody_uses(driver: Driver) -> None:
    """Their gradients are absent, not zeros that somebody made."""
    leaves, outputs = _known(_call())
    handed = []
    for used in (outputs, outputs[:1]):
        for _ in range(4):
            driver.forget()
            ones = [torch.ones_like(output) for output in used]
            torch.autograd.grad(used, leaves.tensors["x"], ones, retain_graph=True)
        assert driver.in_cpp
        handed.append(len(driver.again))
    assert 0 < handed[1] < handed[0]


def _in_order(pointers: list[int]) -> list[int]:
    """Which of a call's pointers each is, by when it came first."""
    order = {pointer: number for number, pointer in enumerate(dict.fromkeys(pointers))}
    return [order[pointer] for pointer in pointers]


@pytest.mark.parametrize("operator", ["junction", "coefficients", "post", "pre", "head", "expand", "sinkhorn"])
def test_kernels_get_what_python_hands_them(operator: str) -> None:
    """Tensors, results, and places in the buffer between them, each in its place."""
    orders, forward = [], []
    for in_cpp in (False, True):
        with pytest.MonkeyPatch.context() as patch, noting_driver(patch, in_cpp=in_cpp) as driver:
            for _ in range(4):
                driver.forget()
                outputs = _call(operator).requires_grad()()
                forward = _in_order(driver.pointers_again)
                driver.forget()
                _backward(outputs)
            assert (driver.in_cpp > 0) == in_cpp
            orders.append((forward, _in_order(driver.pointers_again)))
    assert orders[0] == orders[1] and all(orders[0])


def test_the_same_shapes_in_another_dtype(driver: Driver) -> None:
    call = _call("post")
    for _ in range(3):
        call()
    other = Call(
        "post", call.recipe, {k: t.half() if t.dtype == torch.bfloat16 else t for k, t in call.tensors.items()}
    )
    driver.forget()
    (y,) = other()
    assert driver.in_cpp == 0 and y.dtype == torch.float16


@pytest.mark.parametrize("frozen", ["phi", "x"])
def test_frozen_tensors_are_another_kind(frozen: str, driver: Driver) -> None:
    call = _call()
    _known(call)
    for expected in (0, 0, 2):
        leaves = call.requires_grad()
        leaves.tensors[frozen].requires_grad_(False)
        driver.forget()
        outputs = leaves()
        assert driver.in_cpp == expected
        _backward(outputs)
        assert leaves.tensors[frozen].grad is None and leaves.tensors["bias"].grad is not None


def test_without_gradients_nothing_requires_one(driver: Driver) -> None:
    """Leaves that do, in a mode that does not; known in the other mode, first in one order, then in the other."""
    leaves, _outputs = _known(_call())
    for _ in range(4):
        with torch.no_grad():
            assert not any(output.requires_grad for output in leaves())
        driver.forget()
        assert all(output.requires_grad for output in leaves()) and driver.in_cpp


def test_nothing_of_a_call_is_kept(driver: Driver) -> None:
    """Neither by its own node, nor by the backward that Python was asked for, nor by those that C++ repeats."""
    call = _call()
    for number in range(6):
        leaves = call.requires_grad()
        outputs = leaves()
        if number % 2:
            _backward(outputs)
        alive = [weakref.ref(tensor) for tensor in (*leaves.tensors.values(), *outputs)]
        del leaves, outputs
        assert [reference() for reference in alive] == [None] * len(alive), number
    assert driver.in_cpp


@pytest.mark.parametrize("operator", ["junction", "post"])
def test_backward_twice(operator: str, driver: Driver) -> None:
    _leaves, outputs = _known(_call(operator))
    _backward(outputs, retain_graph=True)
    _backward(outputs)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        _backward(outputs)


@pytest.mark.parametrize("changed", ["x", "f", "phi", "y"])
def test_what_was_changed_after_it_was_saved(changed: str, driver: Driver) -> None:
    leaves, outputs = _known(_call())
    with torch.no_grad():
        (outputs[0] if changed == "y" else leaves.tensors[changed]).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _backward(outputs)


def test_second_derivatives_raise(driver: Driver) -> None:
    leaves, outputs = _known(_call())
    for _ in range(3):
        torch.autograd.grad(outputs[0], leaves.tensors["x"], torch.ones_like(outputs[0]), retain_graph=True)
    (gradient,) = torch.autograd.grad(outputs[0].float().sum(), leaves.tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        gradient.float().sum().backward()


def test_compiled_autograd(driver: Driver) -> None:
    """Where it is on in forward, nodes are Python's; where it is not, the error says what to do."""
    enable = compiled_autograd._enable
    call = _call("post")
    _leaves, outputs = _known(call)
    with enable(lambda graph: graph), pytest.raises(NotImplementedError, match="MHCKIT_NATIVE=0"):
        _backward(outputs)
    driver.forget()
    with enable(lambda graph: graph):
        outputs = call.requires_grad()()
    assert driver.in_cpp == 0 and driver.again


def test_anomalies_are_traced(driver: Driver) -> None:
    call = _call("post")
    _known(call)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly(check_nan=False):
        node: Any = call.requires_grad()()[0].grad_fn
    assert any("test_native_calls" in line for line in node.metadata["traceback_"])


def test_floats_that_float32_does_not_hold(driver: Driver) -> None:
    x, pre, weight = torch.randn(6, 4, 8), torch.rand(6, 4), torch.ones(8)
    for _ in range(3):
        driver.forget()
        mhckit.pre(x, pre, out_norm_weight=weight, out_norm_eps=1e39)
    assert driver.in_cpp == 1 and 0x7F800000 in driver.again, "infinity"


def test_hooks_for_saved_tensors(driver: Driver) -> None:
    call = _call()
    _known(call)
    packed: list[Tensor] = []
    copies: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        copies.append(tensor.clone())
        return copies[-1]

    driver.forget()
    leaves = call.requires_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        outputs = leaves()
    assert driver.in_cpp == 2
    driver.forget()
    _backward(outputs)
    assert driver.in_cpp == 4 and len(packed) == len(copies) > 10
    assert {copy.data_ptr() for copy in copies} <= set(driver.again)
    assert leaves.tensors["x"].data_ptr() not in driver.again


def test_saved_tensors_of_another_layout(driver: Driver) -> None:
    """C++ does not launch with them: Python copies them first."""
    call = _call()
    _known(call)
    strided: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:
        strided.append(torch.stack([tensor, tensor], -1)[..., 0])
        return strided[-1]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        outputs = call.requires_grad()()
    driver.forget()
    _backward(outputs)
    assert driver.in_cpp == 0 and not {tensor.data_ptr() for tensor in strided} & set(driver.again + driver.first)


def test_gradients_of_another_layout(driver: Driver) -> None:
    _leaves, outputs = _known(_call())
    strided = [torch.stack([torch.ones_like(output)] * 2, -1)[..., 0] for output in outputs]
    driver.forget()
    torch.autograd.backward(outputs, strided)
    assert driver.in_cpp == 0 and not {tensor.data_ptr() for tensor in strided} & set(driver.again + driver.first)


def test_those_who_watch_see_a_backward(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    _leaves, outputs = _known(_call())
    launches: list[Any] = []
    driver.forget()
    with monkeypatch.context() as patch:
        patch.setattr(_launcher, "observer", lambda *launch: launches.append(launch))
        _backward(outputs, retain_graph=True)
    assert len(launches) == 4 and driver.in_cpp == 0
    _backward(outputs)
    assert driver.in_cpp == 4


def test_a_profiler_sees_operators(driver: Driver) -> None:
    call = _call()
    _known(call)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        _backward(call.requires_grad()())
    names = {event.name for event in profile.events() or ()}
    assert {"mhckit::junction_fwd", "mhckit::junction_bwd"} <= names


def test_launches_that_fail(driver: Driver) -> None:
    call = _call()
    _leaves, outputs = _known(call)
    driver.answer = OUT_OF_RESOURCES
    with pytest.raises(RuntimeError, match=r"a kernel could not be launched.*CUDA error 701"):
        call.requires_grad()()
    with pytest.raises(RuntimeError, match=r"a kernel could not be launched.*CUDA error 701"):
        _backward(outputs, retain_graph=True)
    driver.answer = 0
    _backward(outputs)


def test_an_error_of_python_in_backward(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call = _call("post")
    for _ in range(2):
        _backward(call.requires_grad()())
    outputs = call.requires_grad()()

    def fail(*_args: Any, **_options: Any) -> None:
        raise ZeroDivisionError("of all things")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "repeat", fail)
        with pytest.raises(ZeroDivisionError, match="of all things"):
            _backward(outputs, retain_graph=True)
    _backward(outputs)


def test_another_recipe_is_another_kind(driver: Driver) -> None:
    """Of the same shapes; an equal one is not."""
    call = _call()
    for _ in range(3):
        call()
    equal, other = (dataclasses.replace(call.recipe, norm_eps=eps) for eps in (call.recipe.norm_eps, 1e-3))
    assert equal is not call.recipe
    assert _launches_in_cpp(driver, Call("junction", equal, call.tensors)) == 2
    for expected in (0, 0, 2):
        driver.forget()
        Call("junction", other, call.tensors)()
        assert driver.in_cpp == expected


def test_recipes_with_absent_results(driver: Driver) -> None:
    """No residual matrix: the third of a mix is None."""
    leaves, outputs = _known(_call(recipe="hy_v4"))
    assert driver.in_cpp and len(outputs) == 4
    driver.forget()
    _backward(outputs)
    assert driver.in_cpp == 4 and leaves.tensors["x"].grad is not None


def test_more_kinds_than_are_kept(driver: Driver) -> None:
    for tokens in range(1, 530):
        call = _call("expand", tokens=tokens)
        call()
        call()
        assert _launches_in_cpp(driver, call) == 1


def test_many_threads(driver: Driver) -> None:
    call = _call()
    _known(call)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                leaves = call.requires_grad()
                _backward(leaves())
                assert leaves.tensors["phi"].grad is not None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_a_long_graph_is_freed(driver: Driver) -> None:
    """Nodes are taken down one after the other, not one inside the other."""
    call = _call("post")
    _known(call)
    y = call.tensors["x"].clone().requires_grad_()
    first = weakref.ref(y)
    for _ in range(20_000):
        y = call(x=y)[0]
    assert "_PostBackward" in y.grad_fn.name()  # type: ignore[union-attr]
    del y
    gc.collect()
    assert first() is None
