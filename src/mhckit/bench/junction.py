"""The whole sublayer as one operator: time beside its byte budget, launches, and memory.

Times cover all launches of a call on the device, as a replayed CUDA graph: in a model the host runs ahead of the
device, here it would be the first to be waited for. Its own time is measured in host.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .budgets import DIRECTIONS, beside_floor, junction_bytes
from .cases import Case
from .correctness import check_own
from .launches import device_events
from .step import Step, mhckit_outputs
from .timing import graph_microseconds, peak_extra_bytes


def measure_junction(case: Case, ceiling: float, rep: int) -> list[dict[str, Any]]:
    check_own(case, "junction")
    step = Step(mhckit_outputs, case.call("junction"))
    return [*_times(step, case, ceiling, rep), _memory(step, case), *_trace(step, case)]


def _times(step: Step, case: Case, ceiling: float, rep: int) -> list[dict[str, Any]]:
    lines = []
    for direction in DIRECTIONS:
        microseconds = graph_microseconds(lambda d=direction: Step(mhckit_outputs, step.call).directions()[d], rep)
        floor = beside_floor(microseconds, junction_bytes(direction, case), ceiling)
        launches = len(device_events(step.directions()[direction]))
        lines.append({"kind": "junction", **case.facts(), "direction": direction, **floor, "launches": launches})
    return lines


def _memory(step: Step, case: Case) -> dict[str, Any]:
    """Workspace is what is allocated at the worst moment beyond inputs, outputs, saved tensors and gradients."""
    whole = peak_extra_bytes(step.both)
    forward_peak = peak_extra_bytes(step.forward)
    before = torch.cuda.memory_allocated()
    outputs = step.forward()
    kept = torch.cuda.memory_allocated() - before
    backward_peak = peak_extra_bytes(lambda: step.backward(outputs))
    gradients = sum(gradient.nbytes for gradient in step.backward(outputs) if gradient is not None)
    workspace = max(forward_peak - kept, backward_peak - gradients)
    x: Tensor = step.call.tensors["x"]
    return {
        "kind": "memory",
        **case.facts(),
        "peak_extra_bytes": whole,
        "kept_bytes": kept,
        "gradient_bytes": gradients,
        "workspace_bytes": workspace,
        "workspace_of_x": round(workspace / x.nbytes, 4),
    }


def _trace(step: Step, case: Case) -> list[dict[str, Any]]:
    """Everything on the device in one forward and backward, in order; foreign: no kernel of ours."""
    return [
        {"kind": "trace", **case.facts(), "position": position, "kernel": event.name}
        | {"microseconds": round(event.microseconds, 2), "foreign": event.foreign}
        for position, event in enumerate(device_events(step.both))
    ]
