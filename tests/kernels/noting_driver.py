"""Kernels that are launched without a GPU: a driver that notes with what, and computes nothing."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import mhckit
from mhckit.kernels import _launcher, _native, _plan, _runtime
from mhckit.ops import _register
from mhckit.ops._calls import Calls
from mhckit.ops._known import Known

_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
OUT_OF_RESOURCES = 701
_repeat = _plan.Plan.repeat


class Driver:
    """What was launched, first and again: pointers and numbers; and again, pointers alone. ``in_cpp`` counts launches
    of calls that C++ recognised.
    """

    def __init__(self) -> None:
        self.first: list[Any] = []
        self.again: list[Any] = []
        self.pointers_again: list[int] = []
        self.in_cpp = 0
        self.answer = 0
        self.asked_by_python = False
        self.launch = _LAUNCH(self._launch)
        self._parameters: list[list[str]] = [[]]  # of each kernel, by the function that stands for it: none is 0

    def run_now(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.first += [argument.data_ptr() for argument in args if isinstance(argument, Tensor)]
        types = tuple(_type(argument) for argument in args)
        self._parameters.append([kind for kind in types if kind != "constexpr"])
        settings = (128, 0, False)
        binary = _launcher.Binary(len(self._parameters) - 1, settings, types, (), lambda args: {})
        # Behind the grid and the stream.
        compiled = _launcher.Compiled(lambda *values: self._note(values[4:], types), (), (), binary)
        if (launches := _launcher._watching.launches) is not None:
            launches.append(_launcher.Recorded(compiled, (*grid, 1, 1)[:3], args))

    def _launch(self, _config: int, function: int, parameters: Any) -> int:
        self.in_cpp += not self.asked_by_python
        given = self._parameters[function]
        values = [ctypes.cast(parameters[k], ctypes.POINTER(ctypes.c_uint64)).contents.value for k in range(len(given))]
        self._note(values, given)
        return self.answer

    def _note(self, values: Sequence[Any], kinds: Sequence[str]) -> None:
        self.again.extend(values)
        self.pointers_again += [value for value, kind in zip(values, kinds, strict=True) if kind.startswith("*")]

    def repeat(self, plan: _plan.Plan, *args: Any, **options: Any) -> Any:
        """As a plan is repeated; one at a time, where several threads do."""
        self.asked_by_python = True
        try:
            return _repeat(plan, *args, **options)
        finally:
            self.asked_by_python = False

    def forget(self) -> None:
        self.first.clear()
        self.again.clear()
        self.pointers_again.clear()
        self.in_cpp = 0


def _type(argument: Any) -> str:
    if argument is None:
        return "constexpr"
    return "*fp32" if isinstance(argument, Tensor) else "i64" if isinstance(argument, int) else "fp32"


def native() -> ModuleType:
    """The module in C++, compiled where it is not."""
    library = _native.library()
    module = library.module(wait=True)
    assert module is not None, library.problem
    return module


@contextlib.contextmanager
def noting_driver(monkeypatch: pytest.MonkeyPatch, *, in_cpp: bool) -> Iterator[Driver]:
    driver = Driver()
    module = native() if in_cpp else None
    if module is not None:
        module.setup(ctypes.cast(driver.launch, ctypes.c_void_p).value, *[0] * 6)
    used: list[Known] = []
    keep = Known.keep
    monkeypatch.setattr(Known, "keep", lambda self, *call: used.append(self) or keep(self, *call))
    monkeypatch.setattr(_native, "module", lambda device, wait=False: module)
    monkeypatch.setattr(_launcher, "run_now", driver.run_now)
    monkeypatch.setattr(_plan.Plan, "repeat", lambda plan, *args, **options: driver.repeat(plan, *args, **options))
    monkeypatch.setattr(_runtime, "check", lambda device: None)
    monkeypatch.setattr(_plan, "_may_repeat", lambda tensor: _launcher.goes_straight())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    _register._load_kernel.cache_clear()
    with mhckit.backend("triton"):
        yield driver
    _register._load_kernel.cache_clear()
    for known in used:
        known._kinds.clear()
    for operator in _register.Operator.__subclasses__():
        if isinstance(operator._eager_calls, Calls):
            operator._eager_calls._known = None
    if module is not None and torch.cuda.is_available():  # for the tests that come after, on a GPU
        _native.set_up(module)
