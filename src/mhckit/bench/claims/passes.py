"""A computation made ready to be repeated: its forward, its backward or both, by launches or as a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mhckit.bench.timing import captured, median_microseconds

from .cases import Compute, Tensors
from .data import Passes

REPEAT_MILLISECONDS = 20
FEWEST_REPEATS = 5


class Run:
    """Runs the passes of a computation on leaves of its own; nothing is accumulated.

    The backward alone repeats on the graph of one forward. ``gradients`` are those of the results.
    """

    def __init__(self, compute: Compute, tensors: Tensors, passes: Passes, gradients: Sequence[Tensor] | None = None):
        self.compute, self.passes = compute, passes
        self.tensors = {name: _leaf(tensor) for name, tensor in tensors.items()}
        self.inputs = [tensor for tensor in self.tensors.values() if tensor.requires_grad]
        outputs = compute(self.tensors)
        self.gradients = normal_like(outputs) if gradients is None else gradients
        self.outputs = outputs if passes == "backward" else None

    def __call__(self) -> tuple[Tensor, ...]:
        """The results, and for a backward the gradients of the inputs."""
        if self.outputs is not None:
            return torch.autograd.grad(self.outputs, self.inputs, self.gradients, retain_graph=True)
        outputs = self.compute(self.tensors)
        if self.passes == "forward":
            return outputs
        return (*outputs, *torch.autograd.grad(outputs, self.inputs, self.gradients))

    @property
    def held_bytes(self) -> int:
        """What exists before a call: inputs and incoming gradients."""
        return _bytes(self.tensors.values()) + _bytes(self.gradients)

    @property
    def minimum_bytes(self) -> int:
        """A forward reads its inputs and writes its results once; a backward reads its inputs and incoming gradients
        and writes their gradients once."""
        forward = self.held_bytes
        backward = self.held_bytes + _bytes(self.inputs)
        return {"forward": forward, "backward": backward, "both": forward + backward}[self.passes]


def launched_microseconds(run: Run) -> float:
    """Time as a program sees it: of short calls, mostly that of the host."""
    return _median(run)


def gpu_microseconds(compute: Compute, tensors: Tensors, passes: Passes) -> float:
    """Time of the GPU's work alone."""
    return _median(captured(lambda: Run(compute, tensors, passes)))


def _median(run: Callable[[], object]) -> float:
    """Long calls are repeated a few times all the same."""
    microseconds = median_microseconds(run, rep=REPEAT_MILLISECONDS)
    milliseconds = math.ceil(FEWEST_REPEATS * microseconds * 1e-3)
    return microseconds if milliseconds <= REPEAT_MILLISECONDS else median_microseconds(run, rep=milliseconds)


def normal_like(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Seeded values for the gradients of results."""
    outputs = tuple(outputs)
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    return [
        torch.randn(output.shape, generator=generator, device=output.device, dtype=output.dtype) for output in outputs
    ]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
