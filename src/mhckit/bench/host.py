"""What a call costs the host: the time until it returns, nothing waited for.

Of a chain of junctions, as a model has them, each link's share: what starting a backward costs is shared by all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mhckit
from mhckit import Mix
from mhckit.testing import Call

from .cases import Case
from .step import Step, mhckit_outputs
from .timing import host_microseconds

LINKS = 8


def measure_host(operator: str, case: Case) -> list[dict[str, Any]]:
    call = case.call(operator)
    runs = _chain(call) if operator == "junction" else _single(call)
    links = LINKS if operator == "junction" else 1
    return [
        {"kind": "host", "operator": operator, **case.facts(), "direction": direction, "links": links}
        | {"microseconds": round(host_microseconds(run) / links, 2)}
        for direction, run in runs.items()
    ]


def _single(call: Call) -> dict[str, Callable[[], object]]:
    step = Step(mhckit_outputs, call)
    return {"inference": _without_gradients(step.forward), **step.directions()}


def _chain(call: Call) -> dict[str, Callable[[], object]]:
    """Junctions that each take what the one before returned, with parameters of their own."""
    leaves = call.requires_grad().tensors
    parameters = [
        [leaves[name].detach().clone().requires_grad_() for name in ("phi", "scale", "bias")] for _ in range(LINKS)
    ]
    streams = [leaves[name] for name in ("x", "f", "mix_post", "mix_res")]
    inputs = [*streams, *(parameter for each in parameters for parameter in each)]

    def forward() -> tuple[Tensor, Tensor]:
        x, f, mix = leaves["x"], leaves["f"], Mix(leaves["mix_pre"], leaves["mix_post"], leaves["mix_res"])
        for phi, scale, bias in parameters:
            x, f, mix = mhckit.junction(x, f, mix, phi, scale, bias, recipe=call.recipe)
        return x, f

    def backward() -> None:
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)

    outputs = forward()
    gradients = [torch.ones_like(output) for output in outputs]
    return {"inference": _without_gradients(forward), "forward": forward, "backward": backward}


def _without_gradients(run: Callable[[], object]) -> Callable[[], None]:
    def inference() -> None:
        with torch.no_grad():
            run()

    return inference
