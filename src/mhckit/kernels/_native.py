"""Kernels as mhckit.native launches them: Triton's launchers do the same, and read every argument from Python first."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from mhckit.native import Library

from . import shipped
from ._launcher import KNOWS_LAUNCHES, Recorded

# Numbers in C, by Triton's types; each takes eight bytes, of which a kernel reads its own, the first.
_NUMBERS: dict[str, Any] = {
    "i1": ctypes.c_bool,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
# Types of elements are counted differently where a kernel is compiled and where the driver describes a tensor.
_HOST_TYPES = {8: 10, 9: 8, 10: 9}


def module(device: torch.device, *, wait: bool = False) -> ModuleType | None:
    """mhckit.native's C++; None where it is not wanted, and, unless waited for, until it is compiled: this begins."""
    return library().module(wait=wait) if is_wanted(device) else None


def is_wanted(device: torch.device) -> bool:
    """``MHCKIT_NATIVE=0`` does without; what C++ has been told of already it goes on doing."""
    is_ours = device.type == "cuda" and not torch.version.hip and KNOWS_LAUNCHES
    return is_ours and os.environ.get("MHCKIT_NATIVE") != "0"


@functools.cache
def library() -> Library:
    """In the folder of compiled kernels that was shipped, if there is one, or in Triton's own."""
    own, given = Path(triton.knobs.cache.dir), shipped.folder()
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    return Library([own] if given is None else [given, own], include, set_up)


def set_up(found: ModuleType) -> None:
    """Tell it where the functions are that it calls, if there is a GPU to call them for."""
    if not torch.cuda.is_available():
        return
    driver = ctypes.CDLL("libcuda.so.1")
    torch_cuda = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cuda.so"))
    functions = (
        driver.cuLaunchKernelEx,
        driver.cuTensorMapEncodeTiled,
        driver.cuGetErrorString,
        driver.cuCtxGetCurrent,
        driver.cuCtxSetCurrent,
        driver.cuDevicePrimaryCtxRetain,
        torch_cuda.aoti_torch_get_current_cuda_stream,
    )
    found.setup(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))


def parameters(launch: Recorded, chosen: Sequence[int], pointers: int) -> tuple[Any, ...] | None:
    """What a recorded launch hands to the kernel, in order: ``chosen`` says which of a call's values, so many of them
    pointers, its arguments are. None where the kernel cannot be launched from C++.
    """
    binary = launch.kernel.binary
    if binary is None:
        return None
    handed: list[tuple[Any, ...]] = []
    tiles, maps = binary.tiles_of(launch.args), iter(binary.maps)
    for position, (argument, slot, kind) in enumerate(zip(launch.args, chosen, binary.types, strict=False)):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            handed += _map(slot, tiles[position].shape, next(maps))
        elif kind.startswith("*"):
            handed.append(("pointer", slot) if slot < pointers else ("constant", 0))
        elif kind in _NUMBERS and not isinstance(argument, Tensor):
            handed.append(_constant(kind, argument))
        else:
            return None
    return tuple(handed)


def _constant(kind: str, value: Any) -> tuple[str, int]:
    return "constant", int.from_bytes(bytes(_NUMBERS[kind](value)), "little")


def _map(slot: int, shape: tuple[int, int], known: dict[str, Any]) -> list[tuple[Any, ...]]:
    """A description of a tensor, and what Triton hands over behind it: its shape and strides."""
    kind = _HOST_TYPES.get(known["elem_type"], known["elem_type"])
    described = ("map", slot, kind, known["swizzle"], known["elem_size"], shape, tuple(known["block_size"]))
    sizes = [_constant("i32", size) for size in shape]
    return [described, *sizes, _constant("i64", shape[1]), _constant("i64", 1)]
