"""Each kernel of an operator alone: it runs once with its launches recorded, and each launch is then repeated."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .budgets import ROLES, beside_floor, kernel_bytes
from .cases import Case
from .correctness import check_own
from .launches import recorded_launches
from .step import Step, mhckit_outputs
from .timing import median_microseconds


def measure_kernels(operator: str, case: Case, ceiling: float, rep: int) -> list[dict[str, Any]]:
    """A line per launch; bytes are the budget of the design where it has one, else the tensors the kernel is given."""
    check_own(case, operator)
    launches = recorded_launches(Step(mhckit_outputs, case.call(operator)).both)
    occurrences = Counter(launch.name for launch in launches)
    lines = []
    for launch in launches:
        role = ROLES.get(launch.name)
        budget = kernel_bytes(operator, role, case) if role and occurrences[launch.name] == 1 else None
        given = launch.bytes()
        lines.append(
            {"kind": "kernel", "operator": operator, **case.facts()}
            | {"kernel": role or launch.name, "function": launch.name, "given_bytes": given}
            | beside_floor(median_microseconds(launch.repeat, rep), budget or given, ceiling)
        )
    return lines
