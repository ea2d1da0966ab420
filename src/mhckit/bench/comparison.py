"""The same junction by others, on the same inputs."""

from __future__ import annotations

from typing import Any

from .baselines import COMPILED, EAGER, PEERS, Baseline
from .cases import Case
from .correctness import CHECKED_TOKENS, TOLERANCE_OF_OTHERS, check
from .launches import device_events
from .step import Step
from .timing import median_microseconds, peak_extra_bytes


def baselines_of(case: Case) -> tuple[Baseline, ...]:
    """Plain PyTorch for every case; the rest where compiling for another shape is asked for."""
    return (EAGER, COMPILED, *PEERS) if case.compiled else (EAGER,)


def measure_baseline(baseline: Baseline, case: Case, rep: int) -> list[dict[str, Any]]:
    """A line per direction; a library that is not installed gets one that says so."""
    facts = {"kind": "baseline", "baseline": baseline.name, **case.facts(), "recipe": baseline.recipe}
    try:
        implementation = baseline.load()
    except ImportError as error:
        return [facts | {"absent": str(error)}]
    # What compiles for every number of tokens is checked at the one that is timed.
    tokens = CHECKED_TOKENS if baseline is EAGER else None
    check(implementation, case.call("junction", recipe=baseline.recipe, tokens=tokens), TOLERANCE_OF_OTHERS)
    step = Step(implementation, case.call("junction", recipe=baseline.recipe))
    lines = []
    for direction, run in step.directions().items():
        measured = {"microseconds": round(median_microseconds(run, rep), 2), "launches": len(device_events(run))}
        lines.append(facts | {"direction": direction} | measured)
    lines[-1]["peak_extra_bytes"] = peak_extra_bytes(step.both)
    return lines
