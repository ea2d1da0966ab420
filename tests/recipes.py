"""The recipes that tests run over."""

from __future__ import annotations

from mhckit import Recipe
from mhckit.recipe import MAX_PERMUTATION_STREAMS

PRESETS = Recipe.presets()
STREAMS = range(1, 9)


def every_recipe() -> dict[str, Recipe]:
    """Each preset, dynamic and static, by a readable name."""
    return {
        f"{name}{'' if dynamic else '-static'}": Recipe.preset(name, dynamic=dynamic)
        for name in PRESETS
        for dynamic in (True, False)
    }


def every_preset_and_width() -> list[tuple[str, int]]:
    """Each preset with 1 to 8 streams, as far as it allows."""
    return [
        (name, streams)
        for name in PRESETS
        for streams in STREAMS
        if Recipe.preset(name).residual != "permutation" or streams <= MAX_PERMUTATION_STREAMS
    ]
