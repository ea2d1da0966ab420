"""Byte budgets by formula: the design's table for 4 streams, and what other numbers of streams make of it."""

from __future__ import annotations

import pytest
import torch

import mhckit
from mhckit import Recipe
from mhckit.bench.budgets import ROLES, beside_floor, junction_bytes, kernel_bytes
from mhckit.bench.cases import CASES, Case, compared_recipes
from mhckit.bench.step import Step, mhckit_outputs
from mhckit.kernels import _warmup

# In multiples of C bytes per token.
DESIGN = {"F1": 18, "F2": 10, "B": 10, "J": 30, "P": 8}
SHIFTED, STATIC = Recipe.preset("deepseek_v41"), Recipe.preset("deepseek_v4", dynamic=False)


@pytest.mark.parametrize(("role", "multiple"), DESIGN.items())
def test_kernels_of_the_junction(role: str, multiple: int) -> None:
    assert kernel_bytes("junction", role, Case(7, 64)) == multiple * 64 * 7


@pytest.mark.parametrize(
    ("case", "forward", "backward"),
    [(Case(7, 64), 28, 48), (Case(7, 64, out_norm=True), 28, 50), (Case(7, 64, streams=2), 16, 28)],
)
def test_the_whole_sublayer(case: Case, forward: int, backward: int) -> None:
    assert junction_bytes("forward", case) == forward * 64 * 7
    assert junction_bytes("backward", case) == backward * 64 * 7
    assert junction_bytes("both", case) == (forward + backward) * 64 * 7


@pytest.mark.parametrize(
    ("recipe", "case", "forward", "backward"),
    [
        ("mhc_lite", Case(7, 64), 28, 48),
        ("hy_v4", Case(7, 64), 28, 48),
        (SHIFTED, Case(7, 64), 20, 38),
        (SHIFTED, Case(7, 64, streams=2), 12, 22),
        (SHIFTED, Case(7, 64, out_norm=True), 28, 50),
        (STATIC, Case(7, 64), 28, 40),
        (STATIC, Case(7, 64, out_norm=True), 28, 50),
        (SHIFTED.replace(dynamic=False), Case(7, 64), 20, 30),
    ],
)
def test_other_recipes(recipe: Recipe | str, case: Case, forward: int, backward: int) -> None:
    assert junction_bytes("forward", case, recipe) == forward * 64 * 7
    assert junction_bytes("backward", case, recipe) == backward * 64 * 7
    assert junction_bytes("both", case, recipe) == (forward + backward) * 64 * 7


def _moved(launches: list[_warmup.Launch], case: Case) -> int:
    """Bytes of the streams and vectors that kernels are given, but for those that collapse nothing: F2 and B then have
    coefficients alone to compute.
    """
    shapes = ((case.tokens, case.streams, case.channels), (case.tokens, case.channels))
    total = 0
    for launch in launches:
        if launch.constants.get("WEIGHTS") != "none":
            tensors = [each for each in launch.args if isinstance(each, torch.Tensor) and each.shape in shapes]
            total += sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    return total


@pytest.mark.parametrize("out_norm", [False, True])
@pytest.mark.parametrize("name", compared_recipes())
def test_kernels_are_given_what_the_budget_says(name: str, out_norm: bool) -> None:
    """Their launches are recorded and not made."""
    case, recipe = Case(5, 40, out_norm=out_norm), compared_recipes()[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps: list[Step] = []
    with mhckit.backend("triton"):
        call = case.call("junction", recipe=recipe, device=device)
        forward = _warmup.recorded(lambda: steps.append(Step(mhckit_outputs, call)))
        both = _warmup.recorded(steps[0].both)
    assert _moved(forward, case) == junction_bytes("forward", case, recipe)
    assert _moved(both, case) == junction_bytes("both", case, recipe)


def test_other_operators_move_less_than_the_junction() -> None:
    for operator in ("enter", "leave", "head", "post"):
        for role in ROLES.values():
            budget = kernel_bytes(operator, role, CASES[0])
            most = kernel_bytes("junction", role, CASES[0])
            assert budget is None or (most is not None and budget <= most)


def test_a_kernel_that_the_design_does_not_count_has_no_budget() -> None:
    assert kernel_bytes("junction", "finish_kernel", CASES[0]) is None


def test_beside_floor() -> None:
    line = beside_floor(20.0, 4_000_000, ceiling=4e11)
    assert (line["floor_microseconds"], line["of_ceiling"]) == (10.0, 0.5)
