"""The junction of other recipes beside that of the Sinkhorn recipe: how long, and how near to bytes of their own.

Recipes take turns in one run, forward, backward and both; times are those of junction.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mhckit import Recipe
from mhckit.testing import Call

from .budgets import DIRECTIONS, beside_floor, junction_bytes
from .cases import RECIPE, Case, compared_recipes
from .correctness import check_own
from .launches import device_events
from .results import refusal
from .step import Step, mhckit_outputs
from .timing import interleaved_graph_microseconds


def measure_recipes(case: Case, ceiling: float, rep: int) -> list[dict[str, Any]]:
    """A line per recipe and direction; a recipe whose results are wrong is refused, the others are timed."""
    recipes, refused = _right_ones(case)
    calls = {name: case.call("junction", recipe=recipe) for name, recipe in recipes.items()}
    lines = []
    for direction in DIRECTIONS:
        prepared = {name: partial(_direction, call, direction) for name, call in calls.items()}
        times = interleaved_graph_microseconds(prepared, rep)
        for name, recipe in recipes.items():
            lines.append(
                {"kind": "recipe", **case.facts(), "recipe": name, "fields": recipe.key, "direction": direction}
                | beside_floor(times[name], junction_bytes(direction, case, recipe), ceiling)
                | {"of_sinkhorn": round(times[name] / times[RECIPE], 3)}
                | {"launches": len(device_events(prepared[name]()))}
            )
    return lines + refused


def _right_ones(case: Case) -> tuple[dict[str, Recipe], list[dict[str, Any]]]:
    """Recipes that may be timed, and lines of those that may not. Without the first there is nothing to be beside."""
    right, refused = {}, []
    for name, recipe in compared_recipes().items():
        try:
            check_own(case, "junction", recipe)
        except Exception as error:
            if name == RECIPE:
                raise
            refused.append(refusal(f"recipe {name}, {case}", error))
        else:
            right[name] = recipe
    return right, refused


def _direction(call: Call, direction: str) -> Any:
    return Step(mhckit_outputs, call).directions()[direction]
