"""What is measured, as data: one line per shape, or recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mhckit import Recipe
from mhckit.recipe import as_recipe
from mhckit.testing import Call, make_call

DTYPE = torch.bfloat16
RECIPE = "deepseek_v4"
# The sublayer is the junction; the others stand at the ends of a chain, or alone.
OPERATORS: tuple[str, ...] = ("junction", "enter", "leave", "head", "post")
_OPTIONAL = ("f_bias", "norm_weight", "out_norm_weight")


@dataclass(frozen=True)
class Case:
    """Streams of one shape; ``compiled`` asks for torch.compile too, which takes its time for every shape."""

    tokens: int
    channels: int
    streams: int = 4
    out_norm: bool = False
    compiled: bool = False

    def call(
        self,
        operator: str,
        *,
        recipe: Recipe | str = RECIPE,
        tokens: int | None = None,
        device: torch.device | str = "cuda",
    ) -> Call:
        """A call of the operator on this shape, with ``tokens`` tokens instead of its own if given."""
        call = make_call(
            operator,
            as_recipe(recipe).replace(streams=self.streams),
            lead=(self.tokens if tokens is None else tokens,),
            channels=self.channels,
            dtype=DTYPE,
            device=device,
            draw_on=device,
        )
        left_out = [name for name in _OPTIONAL if name != "out_norm_weight" or not self.out_norm]
        tensors = {name: tensor for name, tensor in call.tensors.items() if name not in left_out}
        return Call(operator, call.recipe, tensors)

    @property
    def operators(self) -> tuple[str, ...]:
        """What is timed kernel by kernel: all operators for the first shape, else the sublayer alone."""
        return OPERATORS if self == CASES[0] else OPERATORS[:1]

    def facts(self) -> dict[str, Any]:
        """What identifies the case in a line of results."""
        return {"tokens": self.tokens, "channels": self.channels, "streams": self.streams, "out_norm": self.out_norm}

    def __str__(self) -> str:
        return f"{self.tokens} x {self.channels}, N = {self.streams}{', norm' if self.out_norm else ''}"


CASES = (
    Case(8192, 4096, compiled=True),
    Case(16384, 2560),
    Case(4096, 7168),
    Case(32768, 2048),
    Case(2048, 12288),
    Case(4097, 5129),
    Case(8192, 4096, streams=2),
    Case(8192, 4096, streams=8),
    Case(8192, 4096, out_norm=True),
)
QUICK_CASES = CASES[:1]
# Host time does not depend on the size: a small one keeps the device ahead of the host.
HOST_CASE = Case(128, 4096)
COLD_CASE = HOST_CASE
TOKEN_COUNTS = (1, 7, 128, 4097, 65536)

RECIPE_CASES = (Case(8192, 4096), Case(16384, 2560))

DECODE_RECIPES = ("deepseek_v4", "deepseek_v41")
# Microseconds that a junction of so many tokens should take at most.
DECODE_TARGETS = {1: 12.0, 64: 20.0}
DECODE_CASES = tuple(
    Case(tokens, channels, compiled=tokens in DECODE_TARGETS)
    for channels in (4096, 7168)
    for tokens in (1, 2, 8, 32, 64, 128)
)
QUICK_DECODE_CASES = (Case(1, 4096), Case(64, 4096))
# A token must get the same bits alone as among so many.
DECODE_BATCH = 16384


def compared_recipes() -> dict[str, Recipe]:
    """Recipes to time side by side, by name; the first is the one that the others are compared with."""
    recipes = {name: Recipe.preset(name) for name in (RECIPE, "deepseek_v41", "mhc_lite", "hy_v4")}
    recipes["static"] = Recipe.preset(RECIPE, dynamic=False)
    recipes["projection"] = Recipe.preset(RECIPE, residual="projection")
    return recipes
