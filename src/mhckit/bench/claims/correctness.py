"""No time for a wrong result: both computations against the naive one in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from mhckit.bench.correctness import WrongResult
from mhckit.testing import relative_error

from .cases import Case, Compute, Tensors
from .data import Shape
from .passes import Run, normal_like

CHECKED_TOKENS = 32
# As in the tests of the kernels: twice the error of torch, and a rounding; float32 goes through tensor cores.
SLACK = 2.0
FLOAT32_FLOOR = 1e-4


def refuse_wrong(case: Case, channels: int, device: torch.device | str = "cuda") -> None:
    """Raise WrongResult unless mhckit is right at this width; the number of tokens decides nothing in a kernel."""
    tensors = case.tensors(Shape(1, CHECKED_TOKENS, channels), device)
    gradients = normal_like(case.ours(tensors))
    exact_tensors = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    exact = _results(case, case.naive, exact_tensors, [gradient.double() for gradient in gradients])
    ours = _results(case, case.ours, tensors, gradients)
    naive = _results(case, case.naive, tensors, gradients)
    for index, (got, plain, wanted) in enumerate(zip(ours, naive, exact, strict=True)):
        allowed = SLACK * relative_error(plain, wanted) + _rounding(case, got)
        error = relative_error(got, wanted)
        if not error <= allowed:
            raise WrongResult(f"result {index} has a relative error of {error:.1e}, {allowed:.1e} is allowed")


def _rounding(case: Case, got: Tensor) -> float:
    return max(torch.finfo(case.dtype if case.judged_whole else got.dtype).eps, FLOAT32_FLOOR)


def _results(case: Case, compute: Compute, tensors: Tensors, gradients: list[Tensor]) -> tuple[Tensor, ...]:
    results = Run(compute, tensors, "both", gradients)()
    if not case.judged_whole:
        return results
    outputs, rest = results[: len(gradients)], results[len(gradients) :]
    return (*outputs, torch.cat([gradient.double().flatten() for gradient in rest]))
