"""A differentiable call as training makes it: forward that keeps a graph, backward to every input, or both.

Every implementation of a junction returns what a chain of them uses: y, x_in, post and res. pre has done its work in
x_in and gets no gradient of its own, except in a shifted recipe, whose next read it serves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mhckit import Recipe
from mhckit.testing import Call

Implementation = Callable[[Call], tuple[Tensor, ...]]


def mhckit_outputs(call: Call) -> tuple[Tensor, ...]:
    """mhckit's own implementation, of any operator."""
    return used_outputs(call(), call.recipe)


def used_outputs(outputs: tuple[Tensor, ...], recipe: Recipe) -> tuple[Tensor, ...]:
    """Of all that a junction returns."""
    return outputs if recipe.shifted else (*outputs[:2], *outputs[3:])


class Step:
    """One call with its inputs as leaves, and seeded gradients of its outputs, the same ones in every dtype."""

    def __init__(self, implementation: Implementation, call: Call) -> None:
        self.call = call.requires_grad()
        self.implementation = implementation
        device = next(iter(call.tensors.values())).device
        generator = torch.Generator(device).manual_seed(1)
        self.gradients = [
            torch.randn(output.shape, generator=generator, device=device).bfloat16().to(output.dtype)
            for output in self.forward()
        ]

    def forward(self) -> tuple[Tensor, ...]:
        return self.implementation(self.call)

    def backward(self, outputs: tuple[Tensor, ...], retain_graph: bool = True) -> tuple[Tensor | None, ...]:
        """Gradients of all inputs, None for one that the outputs do not depend on."""
        inputs = tuple(self.call.tensors.values())
        return torch.autograd.grad(outputs, inputs, self.gradients, retain_graph=retain_graph, allow_unused=True)

    def both(self) -> tuple[Tensor | None, ...]:
        return self.backward(self.forward(), retain_graph=False)

    def directions(self) -> dict[str, Callable[[], object]]:
        """What there is to time; the outputs that backward starts from are computed here, once."""
        outputs = self.forward()
        return {"forward": self.forward, "backward": lambda: self.backward(outputs), "both": self.both}
