"""Launching kernels without asking Triton each time what it found out the first time.

``kernel[grid](...)`` binds, specialises and hashes some forty arguments in Python on every launch: a hundred
microseconds and more, longer than many of the kernels run. What a launch depends on is small: the dtypes of the
tensors, which of them are absent, the constants, and whether a count needs 64 bits. Pointers are always aligned here
(`_plan` sees to it). The first launch with such a key goes through Triton, the others straight to the driver.
On AMD a launch also depends on whether a tensor exceeds 2 GB: there each goes through Triton.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from . import _autotune
from ._compilers import Launch, compile_together, longest_first
from ._descriptors import Tiles, described, describing, tiled_arguments

_INT32_MAX = 2**31 - 1

# How a kernel is handed its arguments is known of one version of Triton.
KNOWS_LAUNCHES = triton.__version__.startswith("3.6.")

# Tools that look at launches put a function here; it gets (kernel, grid, args, constants) in place of the launch.
observer: Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None] | None = None


class Binary(NamedTuple):
    """A kernel as the driver itself takes it."""

    function: int
    settings: tuple[int, int, bool]  # threads; bytes of shared memory; may begin while the launch before it ends
    types: tuple[str, ...]  # Triton's, of all arguments
    maps: tuple[dict[str, Any], ...]  # what Triton knows of those among them that are described
    tiles_of: Callable[[tuple[Any, ...]], dict[int, Tiles]]  # from the arguments of a launch


class Compiled(NamedTuple):
    """A kernel as Triton's launcher takes it: ``run(*grid, stream, *settings, *args, *constants)``."""

    run: Callable[..., None]
    settings: tuple[Any, ...]
    constants: tuple[Any, ...]
    binary: Binary | None = None  # where it can be launched without Triton


class Recorded(NamedTuple):
    """A launch that was made, with its arguments but for the constants."""

    kernel: Compiled
    grid: tuple[int, int, int]
    args: tuple[Any, ...]


class NotCompiled(Exception):
    """A call that is watched needs kernels that were not launched before."""


class Form(NamedTuple):
    """A kernel and constants that do what others do with the same arguments."""

    kernel: Any
    constants: dict[str, Any]


# Kernels, by name, of which another form is launched with another number of tokens: from the arguments and the
# constants of a launch, the other forms. They are compiled together, so that a new number of tokens compiles nothing;
# but not where launches go through Triton (AMD, hooks), and a search for launch parameters may find others for the
# other form.
other_forms: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], list[Form]]] = {}


class _Watching(threading.local):
    """What a thread does with its launches besides making them: ``kept``, they are not made."""

    launches: list[Recorded | None] | None = None
    compiled_only: bool = False
    kept: list[Launch] | None = None


_compiled: dict[tuple[Any, ...], Compiled] = {}
_watching = _Watching()


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)``; constants are compile-time ones, in any order but always the same."""
    if observer is not None:
        observer(kernel, grid, args, constants)
    elif _watching.kept is not None:
        _watching.kept.append((kernel, grid, args, constants))
    else:
        run_now(kernel, grid, args, constants)


def run_now(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    if 0 in grid:
        return
    launches = _watching.launches
    if not isinstance(kernel, JITFunction) or not goes_straight():
        kernel[grid](*described(kernel, args, constants), **constants)
        if launches is not None:
            launches.append(None)
        return
    key = _key(kernel, args, constants)
    whole_grid = (*grid, 1, 1)[:3]
    compiled = _compiled.get(key)
    if compiled is not None:
        repeat([(compiled, whole_grid, args)])
    else:
        if _autotune.is_enabled():
            constants = _autotune.tuned(kernel, grid, args, constants)
        elif _watching.compiled_only and not torch.cuda.is_current_stream_capturing():
            raise NotCompiled
        all_forms = forms(kernel, args, constants)
        if len(all_forms) > 1:
            wanted = [(form.kernel, grid, args, form.constants) for form in all_forms]
            compile_together(wanted, torch.device("cuda", torch.cuda.current_device()), raises=False)
        launched = kernel[grid](*described(kernel, args, constants), **constants)
        if launched is not None:  # a hook of Triton's can forbid a compilation
            compiled = _compiled[key] = _remember(kernel, launched, args, constants)
    if launches is not None:
        launches.append(None if compiled is None else Recorded(compiled, whole_grid, args))


def forms(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> list[Form]:
    """What a launch is made of, then its other forms."""
    others = other_forms.get(kernel.__name__)
    return [Form(kernel, constants), *([] if others is None else others(args, constants))]


def compile_call(call: Callable[[], object]) -> None:
    """Compile the kernels that a call launches side by side; it is made, its launches are not. What fails to compile
    will say so when it is launched.
    """
    _watching.kept = kept = []
    try:
        call()
    finally:
        _watching.kept = None
    missing = [launch for launch in kept if _key(launch[0], *launch[2:]) not in _compiled and 0 not in launch[1]]
    wanted = [
        (form.kernel, grid, args, form.constants)
        for kernel, grid, args, constants in missing
        for form in forms(kernel, args, constants)
    ]
    compile_together(longest_first(wanted), torch.device("cuda", torch.cuda.current_device()), raises=False)


def repeat(launches: list[tuple[Compiled, tuple[int, int, int], tuple[Any, ...]]]) -> None:
    """Launch compiled kernels, one after the other, each with its arguments but for the constants: tensors or
    pointers, numbers and None.
    """
    stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    for (run, settings, constants, _binary), grid, args in launches:
        run(*grid, stream, *settings, *args, *constants)


def goes_straight() -> bool:
    """Whether launches may bypass Triton: nobody listens to its hooks or to ours, and there is nothing else to ask."""
    hooks = knobs.runtime
    return not (
        hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls or observer is not None or torch.version.hip
    )


@contextlib.contextmanager
def recorded(*, compiled_only: bool) -> Iterator[list[Recorded | None]]:
    """The launches that this thread makes; None for one that went through Triton and cannot be repeated.

    compiled_only: a launch of a kernel that is not compiled yet raises NotCompiled instead; unless a graph is captured,
    which would keep what was launched before it.
    """
    _watching.launches = launches = []
    _watching.compiled_only = compiled_only
    try:
        yield launches
    finally:
        _watching.launches, _watching.compiled_only = None, False


def _remember(kernel: JITFunction, compiled: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Compiled:
    """What a launch needs of a kernel that Triton has just compiled and launched."""
    rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
    launcher, function = compiled.run, compiled.function
    metadata_and_hooks = (compiled.packed_metadata, None, None, None)
    if not KNOWS_LAUNCHES or launcher.global_scratch_size or launcher.profile_scratch_size:
        settings = (function, *metadata_and_hooks)
        return Compiled(describing(launcher, kernel, len(settings), constants), settings, rest)
    # All that Triton 3.6 does in Python here is to allocate scratch memory, which this kernel does not need.
    scratch = (None, None)
    settings = (function, launcher.launch_cooperative_grid, launcher.launch_pdl, *scratch, *metadata_and_hooks)
    run = describing(launcher.launch, kernel, len(settings), constants)
    return Compiled(run, settings, rest, _binary(kernel, compiled, constants))


def _binary(kernel: JITFunction, compiled: Any, constants: dict[str, Any]) -> Binary | None:
    warps, blocks_of_a_cluster, shared_bytes = compiled.packed_metadata
    if blocks_of_a_cluster != 1 or compiled.run.launch_cooperative_grid:
        return None
    types = tuple(compiled.src.signature.values())
    maps = tuple(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    if len(maps) != sum(kind.startswith("tensordesc") for kind in types):
        return None
    tiles_of = tiled_arguments.get(kernel.__name__, lambda args, constants: {})
    settings = (32 * warps, shared_bytes, bool(compiled.run.launch_pdl))
    return Binary(compiled.function, settings, types, maps, lambda args: tiles_of(args, constants))


def _key(kernel: JITFunction, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    return (kernel, torch.cuda.current_device(), *_kinds(kernel, args), *constants.values())


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
