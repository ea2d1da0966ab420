"""What a call costs the host: the time until it returns, nothing waited for.

Of a chain of junctions, as a model has them, each link's share: what starting a backward costs is shared by all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mhckit.kernels import _native
from mhckit.testing import Call

from .cases import Case
from .chain import Chain
from .step import Step, mhckit_outputs
from .timing import host_microseconds

LINKS = 8
# From the third call of a kind on C++ repeats it, from the second backward of such calls that, too.
CALLS_BEFORE = 4


def measure_host(operator: str, case: Case) -> list[dict[str, Any]]:
    call = case.call(operator)
    _native.module(torch.device("cuda"), wait=True)
    runs = _chain(call) if operator == "junction" else _single(call)
    links = LINKS if operator == "junction" else 1
    return [
        {"kind": "host", "operator": operator, **case.facts(), "direction": direction, "links": links}
        | {"microseconds": round(host_microseconds(run) / links, 2)}
        for direction, run in runs.items()
    ]


def _single(call: Call) -> dict[str, Callable[[], object]]:
    step = Step(mhckit_outputs, call)
    for _ in range(CALLS_BEFORE):
        step.directions()["both"]()
    return {"inference": _without_gradients(step.forward), **step.directions()}


def _chain(call: Call) -> dict[str, Callable[[], object]]:
    """A backward reaches all parameters, and what the first link was given, except its pre."""
    leaves = call.requires_grad()
    chain = Chain(leaves, LINKS)
    streams = [leaves.tensors[name] for name in ("x", "f", "mix_post", "mix_res")]
    inputs = [*streams, *(parameter for each in chain.parameters for parameter in each)]

    def forward() -> tuple[Tensor, Tensor]:
        streams, f, _mix = chain.run()
        return streams, f

    def backward() -> None:
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)

    for _ in range(CALLS_BEFORE):
        forward()
    outputs = forward()
    gradients = [torch.ones_like(output) for output in outputs]
    return {"inference": _without_gradients(forward), "forward": forward, "backward": backward}


def _without_gradients(run: Callable[[], object]) -> Callable[[], None]:
    def inference() -> None:
        with torch.no_grad():
            run()

    return inference
