"""The bytes that must cross memory, by formula, and times beside them.

Every kernel is counted in passes: how often the streams [N, C] of a token are read or written, and how often a vector
[C] of it. Coefficients and partial sums, a few floats per token, are left out: a budget is what no kernel can avoid.

    F1   writes back and projects: reads x, f, writes y            B   reads d, y for the gradient of the logits
    F2   collapses: reads y, writes x_in                           J   reads g, d, x, f, writes dx, df
                                                                   P   reads y for the gradient of phi

y is the new streams, g its gradient, d the gradient of x_in. A fused norm makes P read d as well.

Which residual map there is makes no difference, whether it is computed per token and read with does:

    shifted   read weights are known before y is written: F1 writes x_in as well, J sums their gradient, and neither F2
              nor B meets the streams. Not with a norm, which wants a whole row of x_in first.
    static    nothing is projected: without a norm, whose weight has a gradient too, there is no P.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mhckit import Recipe
from mhckit.recipe import as_recipe

from .cases import DTYPE, RECIPE, Case

# Names of the kernels in the design; a kernel that is not here appears under its own name.
ROLES = {
    "write_project_kernel": "F1",
    "write_project_hopper_kernel": "F1",
    "write_project_eight_kernel": "F1",
    "read_kernel": "F2",
    "read_bwd_kernel": "B",
    "streams_bwd_kernel": "J",
    "streams_bwd_hopper_kernel": "J",
    "streams_bwd_eight_kernel": "J",
    "chunk_sums_kernel": "P",
}
FORWARD, BACKWARD = ("F1", "F2"), ("B", "J", "P")
DIRECTIONS = {"forward": FORWARD, "backward": BACKWARD, "both": FORWARD + BACKWARD}


class Passes(NamedTuple):
    streams: int
    vectors: int

    def bytes(self, case: Case) -> int:
        elements = self.streams * case.streams + self.vectors
        return elements * case.tokens * case.channels * DTYPE.itemsize


_WRITE = {"F1": Passes(2, 1), "J": Passes(3, 2)}
PASSES: dict[str, dict[str, Passes]] = {
    "junction": {"F1": Passes(2, 1), "F2": Passes(1, 1), "B": Passes(1, 1), "J": Passes(3, 3), "P": Passes(1, 0)},
    "enter": {"F1": Passes(1, 0), "F2": Passes(1, 1), "B": Passes(1, 1), "J": Passes(3, 1), "P": Passes(1, 0)},
    "head": {"F1": Passes(1, 0), "F2": Passes(1, 1), "B": Passes(1, 1), "J": Passes(2, 1), "P": Passes(1, 0)},
    "leave": _WRITE,
    "post": _WRITE,
}
_SINGLE_PASS = {"F1": Passes(2, 2), "J": Passes(3, 3), "P": Passes(1, 0)}


def _junction_passes(recipe: Recipe, out_norm: bool) -> dict[str, Passes]:
    passes = _SINGLE_PASS if recipe.shifted and not out_norm else PASSES["junction"]
    return {role: each for role, each in passes.items() if role != "P" or recipe.dynamic or out_norm}


def kernel_bytes(operator: str, role: str, case: Case, recipe: Recipe | str = RECIPE) -> int | None:
    """The budget of one kernel in an operator; None for a kernel that the design does not count. The recipe is looked
    at in a junction alone.
    """
    of_operator = PASSES[operator] if operator != "junction" else _junction_passes(as_recipe(recipe), case.out_norm)
    passes = of_operator.get(role)
    if passes is None:
        return None
    reads_gradient_again = role == "P" and case.out_norm
    return Passes(passes.streams, passes.vectors + reads_gradient_again).bytes(case)


def junction_bytes(direction: str, case: Case, recipe: Recipe | str = RECIPE) -> int:
    """The budget of a whole sublayer, per token for 4 streams of 2 bytes: 28C forward and 48C backward; 20C and 38C if
    the recipe is shifted, 28C and 40C if it is static.
    """
    return sum(kernel_bytes("junction", role, case, recipe) or 0 for role in DIRECTIONS[direction])


def beside_floor(microseconds: float, moved: int, ceiling: float) -> dict[str, Any]:
    """A time, the bytes, what they take at the ceiling (bytes per second), and that as a part of the time."""
    floor = moved / ceiling * 1e6
    return {
        "microseconds": round(microseconds, 2),
        "bytes": moved,
        "floor_microseconds": round(floor, 2),
        "of_ceiling": round(floor / microseconds, 3),
    }
