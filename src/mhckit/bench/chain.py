"""Junctions one after the other, as a model has them, without the sublayers between them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import mhckit
from mhckit import Mix
from mhckit.testing import Call

Junction = Callable[..., tuple[Tensor, Tensor, Mix]]  # arguments as of mhckit.junction


class Chain:
    """So many junctions like a call, each with what the one before returned and with parameters of its own.

    What a junction reads for a sublayer it takes for what the sublayer returned.
    """

    def __init__(self, call: Call, links: int) -> None:
        tensors, self.recipe = call.tensors, call.recipe
        self.streams, self.f = tensors["x"], tensors["f"]
        self.mix = Mix(tensors["mix_pre"], tensors["mix_post"], tensors["mix_res"])
        self.parameters = [[_own(tensors[name]) for name in ("phi", "scale", "bias")] for _ in range(links)]

    def run(self, junction: Junction = mhckit.junction, links: int | None = None) -> tuple[Tensor, Tensor, Mix]:
        """What the last one returns, or of so many links the last."""
        streams, f, mix = self.streams, self.f, self.mix
        for parameters in self.parameters[:links]:
            streams, f, mix = junction(streams, f, mix, *parameters, recipe=self.recipe)
        return streams, f, mix


def _own(parameter: Tensor) -> Tensor:
    return parameter.detach().clone().requires_grad_(parameter.requires_grad)
