"""Operators called again and again, without a GPU: which calls are repeated, and with which tensors, by Python and by
C++.

Launches go to a driver that only notes them, so results are whatever was in memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from noting_driver import Driver, noting_driver
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mhckit import Recipe
from mhckit.kernels import _launcher, _plan
from mhckit.testing import Call, make_call


@pytest.fixture(params=["python", "c++"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    with noting_driver(monkeypatch, in_cpp=request.param == "c++") as driver:
        yield driver


def _call(operator: str = "junction", seed: int = 0) -> Call:
    recipe = Recipe.preset("deepseek_v4")
    return make_call(operator, recipe, lead=(6,), channels=8, dtype=torch.bfloat16, seed=seed)


def _pointers(call: Call) -> set[int]:
    """Of what the operator takes: an unshifted junction does not read with the pre it is given."""
    return {tensor.data_ptr() for name, tensor in call.tensors.items() if name != "mix_pre"}


@pytest.mark.parametrize("operator", ["junction", "enter", "coefficients", "post", "pre", "head", "expand", "sinkhorn"])
@pytest.mark.parametrize("gradients", [True, False])
def test_the_second_call_of_a_kind_repeats_the_first(
    operator: str, gradients: bool, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    plan = _plan.Planned.__call__
    monkeypatch.setattr(_plan.Planned, "__call__", lambda *call, **how: planned.append(1) or plan(*call, **how))
    for seed in range(3):
        driver.forget()
        call = _call(operator, seed)
        call = call.requires_grad() if gradients else call
        outputs = call()
        assert (driver.first == []) == (seed > 0)
        assert (driver.again == []) == (seed == 0)
        if seed:
            assert _pointers(call) <= set(driver.again)
            assert {output.data_ptr() for output in outputs} - _pointers(call) <= set(driver.again)
        assert all(output.requires_grad == gradients for output in outputs)
        if gradients:
            driver.forget()
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            assert (driver.first == []) == (seed > 0)
            results = {tensor.grad.data_ptr() for tensor in call.tensors.values() if tensor.grad is not None}
            assert seed == 0 or (results and results <= set(driver.again))
        assert len(planned) == 1 + gradients, "only for the first"


def test_gradients_in_any_layout_and_saved_tensors_from_hooks(driver: Driver) -> None:
    """What backward launches with is what autograd hands it: copies of strided gradients, and what hooks return."""
    copies: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:
        copies.append(tensor.clone())
        return copies[-1]

    for step in range(3):
        call = _call().requires_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            outputs = call()
        gradients = [torch.ones((1,) * output.dim(), dtype=output.dtype).expand(output.shape) for output in outputs]
        driver.forget()
        copies.clear()
        torch.autograd.backward(outputs, gradients)
        assert (driver.again == []) == (step == 0)
        if step:
            assert {copy.data_ptr() for copy in copies} <= set(driver.again)
            assert not {gradient.data_ptr() for gradient in gradients} & set(driver.again)
            assert not _pointers(call) & set(driver.again)


def _negative(x: Tensor) -> Tensor:
    return torch.ops.aten._neg_view(x)


def _zeros(x: Tensor) -> Tensor:
    return torch.ops.aten._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)


def _transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def _unaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("change", [_negative, _zeros, _transposed, _unaligned])
def test_tensors_that_are_more_than_their_memory_are_not_launched_with(change: Any, driver: Driver) -> None:
    call = _call("post")
    for _ in range(3):
        driver.forget()
        call()
    count = len(_addresses(driver))
    x = change(call.tensors["x"])
    driver.forget()
    call(x=x)
    assert len(_addresses(driver)) == count and x.data_ptr() not in _addresses(driver)


def _addresses(driver: Driver) -> list[int]:
    return [value for value in driver.first + driver.again if isinstance(value, int) and value > 2**20]


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_those_who_watch_see_a_repeated_call(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call = _call("post")
    for _ in range(3):
        call()
    with _Seen() as seen:
        call()
    assert "post_fwd.default" in seen.operators
    launches: list[Any] = []
    monkeypatch.setattr(_launcher, "observer", lambda *launch: launches.append(launch))
    driver.forget()
    call()
    assert launches and driver.again == []


def test_calls_through_the_dispatcher_are_repeated_too(driver: Driver) -> None:
    """As compiled code makes them; what is absent is an empty tensor there."""
    recipe, x = Recipe.preset("hy_v4"), torch.randn(6, 4, 8)
    phi, scale, bias = torch.randn(recipe.rows, 32), torch.ones(2), torch.zeros(recipe.rows)
    for step in range(3):
        driver.forget()
        results = torch.ops.mhckit.coefficients_fwd(x, phi, scale, bias, None, recipe.key, "triton")
        assert (driver.again == []) == (step == 0)
        assert [result.shape for result in results] == [(6, 4), (6, 4), (0,), (6, recipe.rows), (6,)]


def test_nothing_of_a_call_is_kept(driver: Driver) -> None:
    """Neither its tensors nor its results: their memory is free again once the caller lets go."""
    call = _call("post").requires_grad()
    call()
    outputs = call()
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    alive = [weakref.ref(tensor) for tensor in (*call.tensors.values(), *outputs)]
    del call, outputs
    assert [reference() for reference in alive] == [None] * len(alive)
