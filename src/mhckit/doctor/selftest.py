"""Every operator, forward and backward, against the reference in float64, on this machine.

Kernels are judged as before they are timed (`mhckit.bench.correctness`): at most twice torch's own error at that dtype,
plus a tolerance. Where the reference runs, that would judge it by itself: there a bound has to do, which is wider for
bfloat16, since a junction rounds the streams on the way to everything else.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mhckit
from mhckit import Recipe
from mhckit.bench.cases import CASES, RECIPE
from mhckit.bench.cases import OPERATORS as CHAIN
from mhckit.bench.correctness import Comparison, compare
from mhckit.bench.step import Implementation, mhckit_outputs
from mhckit.testing import OPERATORS, Call, make_call

from .findings import Finding, in_a_line
from .gpu import Gpu
from .paths import INTERPRETER, RAISES, REFERENCE, STREAMS, path_of


@dataclass(frozen=True)
class Size:
    """Streams to test with; ``chained``: as in a chain, without optional arguments and without a gradient of pre."""

    tokens: int
    channels: int
    dtype: torch.dtype
    chained: bool = False

    def __str__(self) -> str:
        return f"{self.tokens} x {self.channels} {str(self.dtype).removeprefix('torch.')}"

    def call(self, operator: str, device: str) -> Call:
        return make_call(
            operator,
            Recipe.preset(RECIPE, streams=STREAMS),
            lead=(self.tokens,),
            channels=self.channels,
            dtype=self.dtype,
            device=device,
            optional=not self.chained,
        )

    def outputs(self, operator: str) -> Implementation:
        """What of the operator's results is compared, and differentiated."""
        return mhckit_outputs if self.chained and operator in CHAIN else _all_outputs


# No multiples of a tile. The second on a GPU launches the kernels that the speed check times, and most models do.
SIZES = (Size(257, 77, torch.float32), Size(257, 77, torch.bfloat16))
SIZES_OF_KERNELS = (Size(37, 77, torch.float32), Size(37, CASES[0].channels, torch.bfloat16, chained=True))
BOUND_OF_REFERENCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def self_test(gpu: Gpu | None) -> Iterator[Finding]:
    """A finding per operator; what raises is one, too."""
    if gpu is not None:
        _compile_ahead(SIZES_OF_KERNELS[-1])
    device, sizes = ("cpu", SIZES) if gpu is None else ("cuda", SIZES_OF_KERNELS)
    for operator in OPERATORS:
        yield operator_finding(operator, device, sizes)


def _compile_ahead(size: Size) -> None:
    """Many kernels at a time; what fails to compile will fail again where it is tested, and be reported there."""
    with contextlib.suppress(Exception):
        mhckit.warmup(size.channels, Recipe.preset(RECIPE, streams=STREAMS), dtype=size.dtype)


def operator_finding(operator: str, device: str, sizes: tuple[Size, ...]) -> Finding:
    try:
        path = path_of(operator, torch.empty(1, STREAMS, 8, device=device))
        if path == RAISES:
            return Finding(operator, "skipped", f"{path}, as said above")
        if path == INTERPRETER:
            return Finding(operator, "skipped", f"{path}: no test of this machine")
        worst = {str(size): _worst(operator, device, size, path) for size in sizes}
    except Exception as error:  # OutOfResources, a compiler's error, CUDA's: all of them say what is wrong here
        return Finding(operator, "failed", in_a_line(error), _advice(operator, device))
    return _finding(operator, device, path, worst)


def _advice(operator: str, device: str) -> str:
    if device == "cpu":
        return "torch itself is wrong here: try another build of it"
    return f"use mhckit.backend('reference') for {operator}, and report this with the GPU and the versions"


@dataclass(frozen=True)
class _Judged:
    name: str
    error: float
    allowed: float

    @property
    def part(self) -> float:
        """Of what is allowed; infinite for NaN, which no comparison would find."""
        return math.inf if math.isnan(self.error) else self.error / self.allowed

    def values(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        error = self.error if math.isfinite(self.error) else None
        return {"result": self.name, "error": error, "allowed": self.allowed}

    def __str__(self) -> str:
        return f"error {self.error:.1e}, {self.allowed:.1e} allowed"


def _worst(operator: str, device: str, size: Size, path: str) -> _Judged:
    """Of all outputs and gradients the one that comes closest to what is allowed, or exceeds it most."""
    outputs = size.outputs(operator)
    compared = compare(outputs, size.call(operator, device), reference=outputs)
    return max((_judge(each, path, size) for each in compared), key=lambda judged: judged.part)


def _judge(each: Comparison, path: str, size: Size) -> _Judged:
    allowed = BOUND_OF_REFERENCE[size.dtype] if path == REFERENCE else each.allowed
    return _Judged(each.name, each.error, allowed)


def _finding(operator: str, device: str, path: str, worst: dict[str, _Judged]) -> Finding:
    values = {"path": path, "worst": {size: judged.values() for size, judged in worst.items()}}
    wrong = [f"{judged.name}, {size}: {judged}" for size, judged in worst.items() if judged.part > 1]
    if wrong:
        return Finding(operator, "failed", f"{path}: {'; '.join(wrong)}", _advice(operator, device), values)
    return Finding(operator, "ok", f"{path}: {max(worst.values(), key=lambda judged: judged.part)}", values=values)


def _all_outputs(call: Call) -> tuple[Tensor, ...]:
    return call()
