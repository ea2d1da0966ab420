"""Each kernel of an operator alone: it runs once with its launches recorded, and each launch is then repeated, behind a
flush of the L2 cache that leaves it to be written back, as kernels do, and behind one that leaves it clean.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from .budgets import ROLES, beside_floor, kernel_bytes
from .cases import Case
from .correctness import check_own
from .launches import recorded_launches
from .step import Step, mhckit_outputs
from .timing import clean_cache_microseconds, median_microseconds


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
        floor = beside_floor(median_microseconds(launch.repeat, rep), budget or given, ceiling)
        clean = beside_floor(clean_cache_microseconds(launch.repeat), budget or given, ceiling)
        lines.append(
            {"kind": "kernel", "operator": operator, **case.facts()}
            | {"kernel": role or launch.name, "function": launch.name, "given_bytes": given}
            | floor
            | {"clean_cache_microseconds": clean["microseconds"], "clean_cache_of_ceiling": clean["of_ceiling"]}
        )
    return lines
