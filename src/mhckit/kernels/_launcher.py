"""Launching kernels without asking Triton each time what it found out the first time.

``kernel[grid](...)`` binds, specialises and hashes some forty arguments in Python on every launch: a hundred
microseconds and more, longer than many of the kernels run. What a launch depends on is small: the dtypes of the
tensors, which of them are absent, the constants, and whether a count needs 64 bits. Pointers are always aligned here
(ops/_register.py sees to it). The first launch with such a key goes through Triton, the others straight to the driver.
On AMD a launch also depends on whether a tensor exceeds 2 GB: there each goes through Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from . import _autotune

_INT32_MAX = 2**31 - 1

# Tools that look at launches put a function here; it gets (kernel, grid, args, constants) in place of the launch.
observer: Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None] | None = None


class _Compiled(NamedTuple):
    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


_compiled: dict[tuple[Any, ...], _Compiled] = {}


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)``; constants are compile-time ones, in any order but always the same."""
    if observer is not None:
        observer(kernel, grid, args, constants)
    else:
        run_now(kernel, grid, args, constants)


def run_now(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    if not isinstance(kernel, JITFunction) or torch.version.hip or _is_observed(kernel):
        kernel[grid](*args, **constants)
        return
    device = torch.cuda.current_device()
    key = (kernel, device, *_kinds(kernel, args), *constants.values())
    compiled = _compiled.get(key)
    if compiled is None:
        if 0 in grid:
            return
        if _autotune.is_enabled():
            constants = _autotune.tuned(kernel, grid, args, constants)
        launched = kernel[grid](*args, **constants)
        if launched is not None:  # a hook of Triton's can forbid a compilation
            _compiled[key] = _remember(kernel, launched, args, constants)
        return
    width, height, depth = (*grid, 1, 1)[:3]
    if width and height and depth:
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(
            width, height, depth, stream, compiled.function, compiled.metadata, None, None, None,
            *args, *compiled.constants,
        )  # fmt: skip


def _remember(kernel: JITFunction, compiled: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> _Compiled:
    """What a launch needs of a kernel that Triton has just compiled and launched."""
    rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
    return _Compiled(compiled.run, compiled.function, compiled.packed_metadata, rest)


def _kinds(kernel: JITFunction, args: tuple[Any, ...]) -> list[Any]:
    """What compilation depends on, argument by argument."""
    return [
        argument.dtype
        if isinstance(argument, Tensor)
        else argument > _INT32_MAX
        if counts and argument is not None
        else argument
        for argument, counts in zip(args, _counts(kernel), strict=False)
    ]


@functools.cache
def _counts(kernel: JITFunction) -> tuple[bool, ...]:
    """Which arguments are numbers that are known at run time only."""
    return tuple(not parameter.is_constexpr and bool(parameter.do_not_specialize) for parameter in kernel.params)


def _is_observed(kernel: JITFunction) -> bool:
    """Whether somebody wants to hear of launches through Triton's hooks: a profiler, say."""
    hooks = knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls or kernel.pre_run_hooks)
