"""Repeated calls, without a GPU: launches go to a kernel that only notes its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.language import constexpr
from triton.runtime.jit import JITFunction

from mhckit.kernels import _launcher, _plan
from mhckit.kernels._plan import Planned
from mhckit.ops._register import absent, empty


def _add(x, w, inner, out, factor, N: constexpr):
    """Stands for a kernel; never compiled."""


KERNEL = JITFunction(_add)


class Device:
    """Takes launches like a GPU's driver."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.calls = 0
        self.current: int | None = None  # as the index of the CPU

    def run_now(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        compiled = _launcher.Compiled(lambda *values: self.launched.append(values), ("function", "settings"), (4,))
        if (launches := _launcher._watching.launches) is not None:
            launches.append(_launcher.Recorded(compiled, (*grid, 1, 1)[:3], args))

    def host(self, x: Tensor, w: Tensor | None, factor: float) -> tuple[Tensor, ...]:
        """A result like x, one of another shape, and an absent one; something in between."""
        self.calls += 1
        inner, more = empty(x, 3), empty(x, 5, dtype=torch.float64)
        out, other = empty(x, *x.shape), empty(x, 2, dtype=torch.float32)
        _launcher.run(KERNEL, (x.shape[0],), x, w, inner, out, factor, N=4)
        _launcher.run(KERNEL, (7, 2), more, inner, other, absent(x), None, N=4)
        return out, other, absent(x)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(_launcher, "run_now", device.run_now)
    monkeypatch.setattr(_plan, "_may_repeat", lambda tensor: _launcher.goes_straight())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    return device


def _run(planned: Planned, args: list[Any], *, none_for_absent: bool = True) -> Any:
    return planned(args, none_for_absent=none_for_absent)[0]


def _x(*shape: int) -> Tensor:
    return torch.randn(shape or (3, 8), dtype=torch.float64)


def test_a_call_like_an_earlier_one_launches_the_same_on_its_own_tensors(device: Device) -> None:
    planned = Planned(device.host)
    _run(planned, [_x(), _x(4), 2.0])
    assert (device.calls, device.launched) == (1, [])
    x, w = _x(), _x(4)
    out, other, nothing = _run(planned, [x, w, 2.0])
    assert device.calls == 1, "the host function did not run again"
    first, second = device.launched
    inner = first[8]
    start = (3, 1, 1, "stream", "function", "settings")
    assert first == (*start, x.data_ptr(), w.data_ptr(), inner, out.data_ptr(), 2.0, 4)
    more = second[6]
    assert second == (7, 2, *start[2:], more, inner, other.data_ptr(), 0, None, 4)
    assert abs(more - inner) >= min(3 * 8, 5 * 8) and inner % 16 == more % 16, "room of their own, aligned"
    assert out.shape == x.shape and out.dtype == torch.float64 and out.is_contiguous()
    assert other.shape == (2,) and other.dtype == torch.float32
    assert nothing is None
    again = _run(planned, [x, w, 2.0], none_for_absent=False)
    assert again[0].data_ptr() != out.data_ptr(), "results are allocated anew"
    assert again[2].shape == (0,) and again[2].dtype == torch.float64


def test_another_kind_of_call_is_worked_out_anew(device: Device) -> None:
    planned = Planned(device.host)
    kinds = (
        [_x(), _x(4), 2.0],
        [_x(5, 8), _x(4), 2.0],
        [_x(), None, 2.0],
        [_x(), _x(4), 3.0],
        [_x().float(), None, 2.0],
    )
    for args in (*kinds, *kinds):
        _run(planned, args)
    assert device.calls == len(kinds)


def test_tensors_that_are_not_aligned_are_copied(device: Device) -> None:
    planned = Planned(device.host)
    _run(planned, [_x(), None, 2.0])
    for x in (_x(8, 3).T, torch.randn(25, dtype=torch.float64)[1:].view(3, 8)):
        _run(planned, [x, None, 2.0])
    pointers = [values[6] for values in device.launched[::2]]
    assert device.calls == 1 and all(pointer % 16 == 0 for pointer in pointers)


def test_what_cannot_be_repeated_is_called_every_time(device: Device) -> None:
    def fills(x: Tensor, w: Tensor | None, factor: float) -> tuple[Tensor, ...]:
        out, other, nothing = device.host(x, w, factor)
        return out, other.zero_(), nothing

    def computes(x: Tensor, w: Tensor | None, factor: float) -> tuple[Tensor, ...]:
        return device.host(2 * x, w, factor)

    def returns_another(x: Tensor, w: Tensor | None, factor: float) -> tuple[Tensor, ...]:
        return device.host(x, w, factor)[0], x.new_zeros(2), absent(x)

    def views(x: Tensor, w: Tensor | None, factor: float) -> tuple[Tensor, ...]:
        out, other, nothing = device.host(x, w, factor)
        return out.view(-1), other, nothing

    def hands_on(x: Tensor, w: Tensor | None, factor: float) -> tuple[Tensor, ...]:
        return x, *device.host(x, w, factor)[1:]

    for function in (fills, computes, returns_another, views, hands_on):
        device.calls, planned = 0, Planned(function)
        for _ in range(3):
            _run(planned, [_x(), _x(4), 2.0])
        assert device.calls == 3, function.__name__
    assert device.launched == []


def test_a_tensor_that_came_twice_may_come_as_two_later(device: Device) -> None:
    planned, x = Planned(device.host), _x()
    _run(planned, [x, x, 2.0])
    _run(planned, [_x(), _x(), 2.0])
    x, w = _x(), _x()
    _run(planned, [x, w, 2.0])
    assert device.calls == 2
    assert device.launched[0][6:8] == (x.data_ptr(), w.data_ptr())


def test_no_tokens(device: Device) -> None:
    planned = Planned(device.host)
    for _ in range(2):
        assert _run(planned, [_x(0, 8), None, 2.0])[0].shape == (0, 8)
    assert device.calls == 2


def test_those_who_watch_launches_see_them(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, seen = Planned(device.host), []
    _run(planned, [_x(), None, 2.0])
    monkeypatch.setattr(_launcher, "observer", lambda *launch: seen.append(launch))
    _run(planned, [_x(), None, 2.0])
    assert len(seen) == 2 and device.launched == []


def test_plans_do_not_pile_up(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "MAX_PLANS", 3)
    planned = Planned(device.host)
    for tokens in range(1, 9):
        _run(planned, [_x(tokens, 8), None, 2.0])
        assert len(planned.plans) <= 3


def test_in_inference_mode(device: Device) -> None:
    planned = Planned(device.host)
    with torch.inference_mode():
        for _ in range(3):
            _run(planned, [_x(), _x(4), 2.0])
    assert device.calls == 1 and len(device.launched) == 4


def test_a_tensor_elsewhere_is_another_kind_of_call(device: Device) -> None:
    """Launched with its pointer it would be read as memory of the device."""
    planned = Planned(device.host)
    _run(planned, [_x(), _x(4), 2.0])
    _run(planned, [_x(), torch.empty(4, dtype=torch.float64, device="meta"), 2.0])
    assert device.calls == 2 and device.launched == []


def test_a_plan_repeats_the_calls_it_was_made_for(device: Device) -> None:
    planned = Planned(device.host)
    _, plan = planned([_x(), None, 2.0], none_for_absent=True)
    assert plan is not None
    x = _x()
    out, _, nothing = plan.repeat((x, None), none_for_absent=True)
    assert device.calls == 1 and device.launched[0][6] == x.data_ptr() and device.launched[0][9] == out.data_ptr()
    assert nothing is None and plan.repeat((x, None), none_for_absent=False)[2].shape == (0,)
    assert planned([x, None, 2.0], none_for_absent=True)[1] is plan


def test_a_plan_says_where_it_cannot(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unaligned tensor, another device, an observer: nothing is launched."""
    _, plan = Planned(device.host)([_x(), None, 2.0], none_for_absent=True)
    assert plan is not None
    assert plan.repeat((torch.randn(25, dtype=torch.float64)[1:].view(3, 8), None), none_for_absent=True) is None
    device.current = 1
    assert plan.repeat((_x(), None), none_for_absent=True) is None
    device.current = None
    monkeypatch.setattr(_launcher, "observer", lambda *launch: None)
    assert plan.repeat((_x(), None), none_for_absent=True) is None
    assert device.launched == []
    monkeypatch.setattr(_launcher, "observer", None)
    assert plan.repeat((_x(), None), none_for_absent=True) is not None


def test_no_plan_for_tensors_that_were_copied(device: Device) -> None:
    """It would launch with pointers to what they were copied from."""
    planned = Planned(device.host)
    planned([_x(), None, 2.0], none_for_absent=True)
    for x in (_x(8, 3).T, torch.randn(25, dtype=torch.float64)[1:].view(3, 8)):
        assert planned([x, None, 2.0], none_for_absent=True)[1] is None


def test_memory_is_allocated_as_compiled_code_does_unless_torch_fills_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plan = Planned(device.host)([_x(), None, 2.0], none_for_absent=True)
    assert plan is not None
    quick: list[tuple[Any, ...]] = []

    def allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        quick.append((size, stride, dtype))
        return torch.empty_strided(size, stride, dtype=dtype)

    monkeypatch.setattr(_plan, "_empty_strided_cuda", allocate)
    assert plan.repeat((_x(), None), none_for_absent=True)[0].isnan().all() and quick == []
    torch.use_deterministic_algorithms(False)
    out, other, _ = plan.repeat((_x(), None), none_for_absent=True)
    assert out.shape == (3, 8) and other.dtype == torch.float32
    assert quick[:2] == [((3, 8), (8, 1), torch.float64), ((2,), (1,), torch.float32)]
    assert quick[2:] == [((512,), (1,), torch.uint8)], "two pieces of 256 bytes between the results"
    monkeypatch.setattr(_plan, "_empty_strided_cuda", None)
    assert plan.repeat((_x(), None), none_for_absent=True)[0].shape == (3, 8)
