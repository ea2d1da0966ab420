"""Compiling what launches will need before they are made, many kernels at a time.

What is compiled is not written down here: operators run on a few tokens with their launches kept instead of made, so
it is what later launches look up. Triton reads a kernel's source one kernel at a time, but its passes, LLVM, the
assembler and the C compiler that builds a kernel's launcher work side by side, in threads.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import AsyncCompileMode, knobs
from triton.runtime.errors import OutOfResources

from . import _autotune, _launcher
from ._descriptors import described

# The longest kernel takes a sixth of the time of all, and more threads only compete for the interpreter's lock.
MAX_WORKERS = 8


class Launch(NamedTuple):
    """A launch that was not made."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def tensors(self) -> int:
        return sum(isinstance(argument, Tensor) for argument in self.args)


class Counts(NamedTuple):
    """Different kernels; of them those compiled now, and those that were in Triton's cache on disk."""

    kernels: int
    compiled: int
    loaded: int


# An observer, a listener and the garbage collector are one for the whole process.
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
    tunes = _autotune.is_enabled()
    # The more tensors, the longer it takes, about: what takes longest is to begin first.
    wanted = sorted(_candidates(launches) if tunes else launches, key=lambda launch: -launch.tensors)
    count = min(multiprocessing.cpu_count(), MAX_WORKERS) if workers is None else workers
    with (
        torch.cuda.device(device),
        _parsing_in_threads(),
        _cache_hits() as hits,
        _Compilers(count, device) as compilers,
        AsyncCompileMode(compilers, ignore_errors=True) as mode,  # where it raises itself, it stays active
    ):
        kernels = [
            kernel.warmup(*described(kernel, args, constants), grid=grid, **constants)
            for kernel, grid, args, constants in wanted
        ]
    for future in mode.raw_futures:
        error = future.exception()
        if error is not None and not (tunes and isinstance(error, OutOfResources)):
            raise error
    return Counts(len({id(kernel) for kernel in kernels}), hits.count(False), hits.count(True))


class _Compilers(ThreadPoolExecutor):
    """Threads that load what they compiled, too: building a launcher takes a C compiler a good part of a second."""

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__(count, thread_name_prefix="mhckit-warmup")
        self._device = device

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._compile_and_load, fn, *args, **kwargs)

    def _compile_and_load(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kernel = fn(*args, **kwargs)
        with torch.cuda.device(self._device):
            _loaded = kernel.run
        return kernel


@contextlib.contextmanager
def _parsing_in_threads() -> Iterator[None]:
    """Lets threads parse sources at once in Python 3.11, which until 3.11.8 counts how deep a syntax tree is for all of
    them together: where a collection runs finalizers inside ast.parse, another thread may take over, and the count is
    off (SystemError: AST constructor recursion depth mismatch, gh-106905). Other versions do not collect there.
    """
    pauses = (3, 11) <= sys.version_info < (3, 11, 8) and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


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
