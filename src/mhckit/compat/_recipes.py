"""Recipes for functions that get their settings with every call."""

from __future__ import annotations

from typing import Any

from mhckit.recipe import Recipe

# A plain dict: torch.compile can look into one, but neither into lru_cache nor into the making of a Recipe. So a
# function compiles as one graph once it was called, outside of compilation, with the same settings.
_made: dict[tuple[Any, ...], Recipe] = {}


def recipe_of(preset: str, names: str = "", **fields: Any) -> Recipe:
    """``Recipe.preset``, made once. names: what an error says about how the caller's arguments are called there."""
    key = (preset, *fields.items())
    recipe = _made.get(key)
    if recipe is None:
        recipe = _made[key] = _make(preset, names, fields)
    return recipe


def _make(preset: str, names: str, fields: dict[str, Any]) -> Recipe:
    try:
        return Recipe.preset(preset, **fields)
    except ValueError as error:
        if not names:
            raise
        raise ValueError(f"{error} (of a mhckit.Recipe, where {names})") from None
