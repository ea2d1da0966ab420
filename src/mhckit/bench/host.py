"""What a call costs the host: the time until it returns, nothing waited for."""

from __future__ import annotations

from typing import Any

import torch

from .cases import Case
from .step import Step, mhckit_outputs
from .timing import host_microseconds


def measure_host(operator: str, case: Case) -> list[dict[str, Any]]:
    step = Step(mhckit_outputs, case.call(operator))

    def inference() -> None:
        with torch.no_grad():
            step.forward()

    runs = {"inference": inference, **step.directions()}
    return [
        {"kind": "host", "operator": operator, **case.facts(), "direction": direction}
        | {"microseconds": round(host_microseconds(run), 2)}
        for direction, run in runs.items()
    ]
