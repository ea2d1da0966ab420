"""Which implementation runs an operator: the torch reference or a Triton kernel.

The choice is made once per call, in the public function, and travels through the operator schema as a string: the
backward of a call uses what its forward used, on whatever thread autograd runs it.
"""

from __future__ import annotations

import importlib
from typing import Literal, get_args

import torch
from torch import Tensor

from ._check import check_streams

Backend = Literal["auto", "reference", "triton"]
BACKENDS: tuple[str, ...] = get_args(Backend)

MAX_KERNEL_STREAMS = 8

# A plain global, not a ContextVar or a thread-local: it is the one form that torch.compile reads and guards.
_active: str = "auto"


class backend:
    """Choose the implementation of every operator called inside a ``with`` block, process-wide.

    ``"auto"`` (the default) takes the Triton kernels for CUDA tensors and the torch reference elsewhere;
    ``"reference"`` and ``"triton"`` insist. What the kernels cannot do raises: nothing falls back by itself. Activation
    checkpointing calls operators again during backward: keep ``loss.backward()`` inside the block, or give modules
    their ``backend`` argument.
    """

    def __init__(self, name: Backend) -> None:
        self.name = check_backend(name)
        self.outer: list[str] = []

    def __enter__(self) -> None:
        global _active
        self.outer.append(_active)
        _active = self.name

    def __exit__(self, *_exception: object) -> None:
        global _active
        _active = self.outer.pop()


def check_backend(name: Backend) -> Backend:
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
    return name


def choose(operator: str, x: Tensor, streams: int) -> str:
    """``"reference"`` or ``"triton"`` for one call of an operator on streams like x."""
    if _wants_reference(x):
        return "reference"
    if x.dtype == torch.float64:
        raise TypeError(f"{_NO_FLOAT64}: {operator!r} got float64; {_INSTEAD}")
    if streams > MAX_KERNEL_STREAMS:
        raise ValueError(f"{_FEW_STREAMS}: {operator!r} got {streams}; {_INSTEAD}")
    return "triton"


def explain(x: Tensor) -> str:
    """Which implementation runs on streams like x [..., N, C], and why, in a sentence.

    Says so too where a call would raise, and what to do about it.
    """
    _, streams, _ = check_streams(x)
    what = f"x is {str(x.dtype).removeprefix('torch.')} on {x.device}"
    if _wants_reference(x):
        return f"torch reference: backend is {_active!r} and {what}"
    try:
        choose("junction", x, streams)
        importlib.import_module("mhckit.kernels._runtime").check(x.device)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        return f"raises: backend is {_active!r} and {what}, but {error}"
    return f"Triton kernels: backend is {_active!r} and {what}"


_NO_FLOAT64 = "the Triton kernels compute in float32"
_FEW_STREAMS = f"the Triton kernels take at most {MAX_KERNEL_STREAMS} streams"
_INSTEAD = "use mhckit.backend('reference')"


def _wants_reference(x: Tensor) -> bool:
    return _active == "reference" or (_active == "auto" and not x.is_cuda)
