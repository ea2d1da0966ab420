"""Correctness first: nothing is timed that is not right.

Outputs and gradients are compared with the reference in float64, as norms. An implementation may be twice as far from
it as the reference at the same dtype, plus a tolerance: small for the kernels of mhckit, which round once, larger for
others, which may round where they like.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mhckit
from mhckit.testing import Call, relative_error

from .step import Implementation, Step, mhckit_outputs

CHECKED_TOKENS = 257
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 1e-4}
TOLERANCE_OF_OTHERS = {torch.bfloat16: 2e-2, torch.float32: 2e-2}


class WrongResult(RuntimeError):
    """An implementation that must not be timed."""


def check(implementation: Implementation, call: Call, tolerance: dict[torch.dtype, float] = TOLERANCE) -> None:
    """Raise WrongResult, naming the first output or gradient that is too far from float64."""
    exact = _reference(call.to(lambda tensor: tensor.double()))
    rounded = _reference(call)
    for name, value in _results(implementation, call).items():
        error = relative_error(value, exact[name])
        allowed = 2 * relative_error(rounded[name], exact[name]) + tolerance[rounded[name].dtype]
        if not error <= allowed:
            raise WrongResult(f"{name}: relative error {error:.2g} against float64, {allowed:.2g} allowed")


def _reference(call: Call) -> dict[str, Tensor]:
    with mhckit.backend("reference"):
        return _results(mhckit_outputs, call)


def _results(implementation: Implementation, call: Call) -> dict[str, Tensor]:
    step = Step(implementation, call)
    outputs = step.forward()
    gradients = zip(step.call.tensors, step.backward(outputs), strict=True)
    return {f"output {index}": output.detach() for index, output in enumerate(outputs)} | {
        f"gradient of {name}": gradient for name, gradient in gradients if gradient is not None
    }
