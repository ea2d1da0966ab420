"""Byte budgets by formula: the design's table for 4 streams, and what other numbers of streams make of it."""

from __future__ import annotations

import pytest

from mhckit.bench.budgets import ROLES, beside_floor, junction_bytes, kernel_bytes
from mhckit.bench.cases import CASES, Case

# In multiples of C bytes per token.
DESIGN = {"F1": 18, "F2": 10, "B": 10, "J": 30, "P": 8}


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
