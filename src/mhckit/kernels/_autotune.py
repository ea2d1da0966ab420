"""A search for the launch parameters that no result depends on: opt-in, by ``MHCKIT_AUTOTUNE=1``.

The heuristics of `_launch` come from one GPU. On another, the number of loop steps in flight may be worth a search: it
changes neither the tiles nor the order of sums, so results keep their bits. The first launch of a kernel then times
each candidate on its own arguments, and what was found is kept on disk, beside Triton's compiled kernels, where that
can be written.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.testing import do_bench

from . import shipped

CANDIDATES = (1, 2, 3, 4)
_FILE = "mhckit-autotune.json"


def is_enabled() -> bool:
    return os.environ.get("MHCKIT_AUTOTUNE") == "1" and not torch.cuda.is_current_stream_capturing()


def candidates(constants: dict[str, Any]) -> tuple[int, ...]:
    """Steps in flight to choose from. Where there are several, other constants may count on it: never one alone."""
    return CANDIDATES if constants["STAGES"] == 1 else CANDIDATES[1:]


def tuned(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> dict[str, Any]:
    """constants, with STAGES the fastest of the candidates that the device can run."""
    if "STAGES" not in constants:
        return constants
    key = _describe(kernel, args, constants)
    found = _load()
    if key not in found:
        times = {stages: _time(kernel, grid, args, constants | {"STAGES": stages}) for stages in candidates(constants)}
        best = min(times, key=times.__getitem__)
        if times[best] == float("inf"):
            raise RuntimeError(f"{kernel.__name__} fits this device with none of {tuple(times)} loop steps in flight")
        found = _load() | {key: best}
        _save(found)
    return constants | {"STAGES": found[key]}


def _time(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> float:
    """Milliseconds; infinite where the candidate needs more shared memory than there is."""
    try:
        return do_bench(lambda: kernel[grid](*args, **constants), warmup=5, rep=20, return_mode="median")
    except triton.runtime.errors.OutOfResources:
        return float("inf")


def _describe(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> str:
    """What the choice may depend on, the number of tokens not among it."""
    kinds = [str(arg.dtype) if isinstance(arg, torch.Tensor) else str(arg is None) for arg in args]
    fixed = [
        f"{name}={value}" for name, value in zip(kernel.arg_names, args, strict=False) if name in ("C", "P", "span")
    ]
    rest = [f"{name}={value}" for name, value in constants.items() if name != "STAGES"]
    return " ".join([torch.cuda.get_device_name(), triton.__version__, kernel.__name__, *kinds, *fixed, *rest])


def _load() -> dict[str, int]:
    """What was found before, here or where kernels were shipped from."""
    found: dict[str, int] = {}
    for folder in (shipped.folder(), Path(knobs.cache.dir)):
        if folder is not None:
            found |= _read(folder / _FILE)
    return found


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _save(found: dict[str, int]) -> None:
    """Replaced in one step: another process sees the old file or the new one. A read-only folder stays as it is, and
    the next process searches again.
    """
    folder = Path(knobs.cache.dir)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            json.dump(found, file, indent=1)
        Path(file.name).replace(folder / _FILE)
