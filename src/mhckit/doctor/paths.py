"""Which implementation each operator takes, and why."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import mhckit
from mhckit.ops import _backend
from mhckit.testing import OPERATORS

from .findings import Finding
from .gpu import Gpu
from .triton_here import is_interpreted

REFERENCE, KERNELS, INTERPRETER, RAISES = "torch reference", "Triton kernels", "Triton's interpreter", "raises"
STREAMS = 4


def path_findings(gpu: Gpu | None) -> Iterator[Finding]:
    if gpu is None:
        yield Finding("CUDA tensors", "skipped", "there is no GPU")
    else:
        yield path_finding("CUDA tensors", torch.empty(1, STREAMS, 8, dtype=torch.bfloat16, device="cuda"))
    yield path_finding("CPU tensors", torch.empty(1, STREAMS, 8, dtype=torch.bfloat16))


def path_finding(name: str, x: Tensor) -> Finding:
    """The paths of all operators on streams like x."""
    paths = {operator: path_of(operator, x) for operator in OPERATORS}
    reason = mhckit.explain(x).split(": ", 1)[1]
    taken = dict.fromkeys(paths.values())
    parts = [f"{path} for {_names([each for each in paths if paths[each] == path])}" for path in taken]
    seen = f"{'; '.join(parts)}: {reason}"
    if RAISES in taken:
        return Finding(name, "failed", seen, "put right what it names, or use mhckit.backend('reference')", paths)
    return Finding(name, "ok", seen, values=paths)


def path_of(operator: str, x: Tensor) -> str:
    """What a call of the operator does on streams like x."""
    try:
        chosen = _backend.choose(operator, x, STREAMS)
    except (TypeError, ValueError):
        return RAISES
    if chosen == "reference":
        return REFERENCE
    if mhckit.explain(x).startswith(RAISES):
        return RAISES
    return INTERPRETER if is_interpreted() else KERNELS


def _names(operators: list[str]) -> str:
    return f"all {len(operators)} operators" if len(operators) == len(OPERATORS) else ", ".join(operators)
