"""Kernels compiled side by side.

Triton reads a kernel's source one kernel at a time, but its passes, LLVM, the assembler and the C compiler that builds
a kernel's launcher work in threads. A warm-up compiles all kernels of a model so, a first call all of its own, and a
first launch all forms of its kernel.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime._async_compile import active_mode
from triton.runtime.errors import OutOfResources

from ._descriptors import described

# The longest kernel takes a sixth of the time of all, and more threads only compete for the interpreter's lock.
MAX_WORKERS = 8

# A kernel, its grid, arguments and constants.
Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]

# The garbage collector is one for the whole process.
_one_at_a_time = threading.Lock()


def longest_first(launches: Iterable[Launch]) -> list[Launch]:
    """In the order in which to compile them: the more tensors, the longer it takes, about."""
    return sorted(launches, key=lambda launch: -sum(isinstance(argument, torch.Tensor) for argument in launch[2]))


def compile_together(
    launches: Sequence[Launch],
    device: torch.device,
    workers: int | None = None,
    *,
    may_not_fit: bool = False,
    raises: bool = True,
) -> list[Any]:
    """Compile and load on the device what these launches need. Raises what the first kernel that fails raises, unless
    it is that the device is too small for one that may not fit, or a launch will raise it in its turn.
    """
    if active_mode.get() is not None:  # of a caller whose threads compile everything that is launched
        return _warmed_up(launches)
    count = min(multiprocessing.cpu_count(), MAX_WORKERS) if workers is None else workers
    with (
        _one_at_a_time,
        torch.cuda.device(device),
        _parsing_in_threads(),
        _Compilers(count, device) as compilers,
        AsyncCompileMode(compilers, ignore_errors=True) as mode,  # where it raises itself, it stays active
    ):
        kernels = _warmed_up(launches)
    for future in mode.raw_futures if raises else ():
        error = future.exception()
        if error is not None and not (may_not_fit and isinstance(error, OutOfResources)):
            raise error
    return kernels


def _warmed_up(launches: Sequence[Launch]) -> list[Any]:
    return [
        kernel.warmup(*described(kernel, args, constants), grid=grid, **constants)
        for kernel, grid, args, constants in launches
    ]


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
