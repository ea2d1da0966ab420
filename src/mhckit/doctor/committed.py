"""The speed that was measured on each kind of GPU, as the package carries it: written from the committed results."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from mhckit.bench.cases import CASES
from mhckit.bench.results import of_kind, read_lines

CASE = CASES[0]
FILE = "committed.json"
_KEPT = ("commit", "date", "copy_terabytes_per_second", "microseconds", "of_ceiling")


def committed_speed(device: str) -> dict[str, Any] | None:
    """The newest result of a kind of GPU, by its name; None where there is none."""
    return json.loads(resources.files("mhckit.doctor").joinpath(FILE).read_text()).get(device)


def speeds_of(results: Path) -> str:
    """The text of the file: for every GPU the junction that was measured last, forward and backward."""
    lines = of_kind(read_lines(results), "junction", direction="both", **CASE.facts())
    speeds = {line["device"]: {name: line[name] for name in _KEPT} for line in lines}
    return json.dumps(speeds, indent=2) + "\n"
