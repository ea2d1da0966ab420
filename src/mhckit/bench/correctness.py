"""Correctness first: nothing is timed that is not right.

Outputs and gradients are compared with the reference in float64, as norms. An implementation may be twice as far from
it as the reference at the same dtype, plus a tolerance: small for the kernels of mhckit, which round once, larger for
others, which may round where they like.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import mhckit
from mhckit import Recipe
from mhckit.testing import Call, relative_error

from .cases import RECIPE, Case
from .step import Implementation, Step, mhckit_outputs

CHECKED_TOKENS = 257
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 1e-4}
TOLERANCE_OF_OTHERS = {torch.bfloat16: 2e-2, torch.float32: 2e-2}
_OF_TOKENS = ("x", "f", "pre", "post", "res", "mix_pre", "mix_post", "mix_res")


class WrongResult(RuntimeError):
    """An implementation that must not be timed."""


class Comparison(NamedTuple):
    """One output or gradient: its relative error against float64, torch's at the same dtype, and the tolerance."""

    name: str
    error: float
    error_of_torch: float
    tolerance: float

    @property
    def allowed(self) -> float:
        return 2 * self.error_of_torch + self.tolerance


def check(
    implementation: Implementation,
    call: Call,
    tolerance: dict[torch.dtype, float] = TOLERANCE,
    *,
    gradients: bool = True,
) -> None:
    """Raise WrongResult, naming the first output or, unless it is for inference, gradient too far from float64."""
    for each in compare(implementation, call, tolerance, gradients=gradients):
        if not each.error <= each.allowed:
            raise WrongResult(
                f"{each.name}: relative error {each.error:.2g} against float64, {each.allowed:.2g} allowed"
            )


def check_own(case: Case, operator: str, recipe: Recipe | str = RECIPE) -> None:
    """Raise WrongResult unless mhckit's own operator may be timed: some tokens are right, and get the same bits among
    all that will be timed, which may be another form of a kernel.
    """
    tokens = min(CHECKED_TOKENS, case.tokens)
    check(mhckit_outputs, case.call(operator, recipe=recipe, tokens=tokens))
    with torch.no_grad():
        check_same_bits(case.call(operator, recipe=recipe), tokens)


def check_same_bits(batch: Call, tokens: int) -> None:
    """Raise WrongResult unless so many tokens from inside a batch, called alone, get the bits they get there."""
    size = len(next(iter(batch.tensors.values())))
    first = (size - tokens) // 3  # not where tiles begin
    among = slice(first, first + tokens)
    tensors = {name: tensor[among] if name in _OF_TOKENS else tensor for name, tensor in batch.tensors.items()}
    alone = Call(batch.operator, batch.recipe, tensors)
    for index, (one, all_of_them) in enumerate(zip(alone(), batch(), strict=True)):
        if not torch.equal(one, all_of_them[among]):
            raise WrongResult(f"output {index}: {tokens} tokens alone do not get the bits that they get among {size}")


def compare(
    implementation: Implementation,
    call: Call,
    tolerance: dict[torch.dtype, float] = TOLERANCE,
    reference: Implementation = mhckit_outputs,
    *,
    gradients: bool = True,
) -> list[Comparison]:
    """Every output and gradient beside ``reference``, which returns the same outputs, in float64."""
    exact = _reference(reference, call.to(lambda tensor: tensor.double()), gradients)
    rounded = _reference(reference, call, gradients)
    return [
        Comparison(
            name,
            relative_error(value, exact[name]),
            relative_error(rounded[name], exact[name]),
            tolerance[rounded[name].dtype],
        )
        for name, value in _results(implementation, call, gradients).items()
    ]


def _reference(implementation: Implementation, call: Call, gradients: bool) -> dict[str, Tensor]:
    with mhckit.backend("reference"):
        return _results(implementation, call, gradients)


def _results(implementation: Implementation, call: Call, gradients: bool) -> dict[str, Tensor]:
    if not gradients:
        with torch.no_grad():
            return _named(implementation(call))
    step = Step(implementation, call)
    outputs = step.forward()
    pairs = zip(step.call.tensors, step.backward(outputs), strict=True)
    return _named(outputs) | {f"gradient of {name}": gradient for name, gradient in pairs if gradient is not None}


def _named(outputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {f"output {index}": output.detach() for index, output in enumerate(outputs)}
