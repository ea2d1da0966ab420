"""The recipes that tests run over."""

from __future__ import annotations

from mhckit import Recipe
from mhckit.recipe import MAX_PERMUTATION_STREAMS

PRESETS = Recipe.presets()
STREAMS = range(1, 9)


def every_recipe() -> dict[str, Recipe]:
    """Each preset, dynamic and static, by a readable name, and the residual map that no preset has.

    Its other fields are those of a preset that it must not mind: a start, an order, an eps.
    """
    return {
        f"{name}{'' if dynamic else '-static'}": Recipe.preset(name, dynamic=dynamic)
        for name in PRESETS
        for dynamic in (True, False)
    } | {"projection": Recipe.preset("deepseek_v4", residual="projection")}


def every_preset_and_width() -> list[tuple[str, int]]:
    """Each preset with 1 to 8 streams, as far as it allows."""
    return [
        (name, streams)
        for name in PRESETS
        for streams in STREAMS
        if Recipe.preset(name).residual != "permutation" or streams <= MAX_PERMUTATION_STREAMS
    ]
