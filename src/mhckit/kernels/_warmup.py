"""Compiling what launches will need before they are made, many kernels at a time.

What is compiled is not written down here: operators run on a few tokens with their launches kept instead of made, so
it is what later launches look up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from . import _autotune, _launcher, _native
from ._compilers import compile_together, longest_first


class Launch(NamedTuple):
    """A launch that was not made."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


class Counts(NamedTuple):
    """Different kernels; of them those compiled now, and those that were in Triton's cache on disk."""

    kernels: int
    compiled: int
    loaded: int


# An observer and a listener are one for the whole process.
_one_at_a_time = threading.Lock()


def recorded(run: Callable[[], object]) -> list[Launch]:
    """The launches that run() would make, its backward included; what others launch meanwhile is launched."""
    with _one_at_a_time:
        return _recorded(run)


def _recorded(run: Callable[[], object]) -> list[Launch]:
    launches: list[Launch] = []
    outer, operators = _launcher.observer, _Operators()

    def observe(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        if operators.runs_one():
            forms = _launcher.forms(kernel, args, constants)
            launches.extend(Launch(form.kernel, grid, args, form.constants) for form in forms)
        else:
            (outer or _launcher.run_now)(kernel, grid, args, constants)

    _launcher.observer = observe
    try:
        with operators:
            run()
    finally:
        _launcher.observer = outer
    return launches


class _Operators(TorchDispatchMode):
    """Knows which threads run an operator for whoever entered this mode: that one's own, and, since modes follow a
    backward, autograd's for a device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self._here.runs = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._here.runs = False

    def runs_one(self) -> bool:
        return getattr(self._here, "runs", False)


def compile_launches(launches: Iterable[Launch], device: torch.device, workers: int | None = None) -> Counts:
    """Compile and load on the device what these launches need; raises what the first kernel that fails raises."""
    with _one_at_a_time:
        return _compile_launches(launches, device, workers)


def _compile_launches(launches: Iterable[Launch], device: torch.device, workers: int | None) -> Counts:
    _native.module(device)  # is compiled beside the kernels
    tunes = _autotune.is_enabled()
    wanted = _candidates(launches) if tunes else launches
    with _cache_hits() as hits:
        kernels = compile_together(longest_first(wanted), device, workers, may_not_fit=tunes)
    _native.module(device, wait=True)
    return Counts(len({id(kernel) for kernel in kernels}), hits.count(False), hits.count(True))


def _candidates(launches: Iterable[Launch]) -> Iterator[Launch]:
    """What a search for launch parameters will time."""
    for launch in launches:
        for stages in _autotune.candidates(launch.constants) if "STAGES" in launch.constants else (None,):
            change = {} if stages is None else {"STAGES": stages}
            yield launch._replace(constants=launch.constants | change)


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[bool]]:
    """For each kernel from now on, whether it was on disk; whoever listens to compilations already still does."""
    hits: list[bool] = []
    outer: Any = knobs.compilation.listener

    def listen(**facts: Any) -> None:
        hits.append(facts["cache_hit"])
        if outer is not None:
            outer(**facts)

    knobs.compilation.listener = listen
    try:
        yield hits
    finally:
        knobs.compilation.listener = outer
