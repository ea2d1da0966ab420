"""compute-sanitizer finds no access out of bounds and no hazard in shared memory, in any kernel of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mhckit.kernels

FOLDER = Path(mhckit.kernels.__file__).parent
HOPPER = sorted([*FOLDER.glob("*_hopper*.py"), *FOLDER.glob("*_eight.py")])


def _hand_over(lines: list[str], number: int, _file: str) -> bool:
    """Triton itself makes code for it: groups of warps are told, in shared memory, what to run and with which values.
    racecheck sees no barrier between that and their reading it. A condition around it may be its place.
    """
    line = lines[number]
    if line.endswith(("_hopper_kernel(", "_eight_kernel(")):
        return line.startswith("def ")
    around = line.lstrip().startswith("if ") and number + 1 < len(lines)
    return lines[number + around].lstrip().startswith("gl.warp_specialize(")


# What a group of warps reads that another has stored, or stores where another has read: those of a group meet, and one
# of them arrives at a barrier for all. racecheck does not pass on that it has heard of the others. The emulated GPU
# (tests/kernels/emulator) does, and names the same lines where the warps of a group do not meet (test_emulated.py).
HANDED_ON = {
    "_hopper_rows.py": ("async_copy.async_copy_global_to_shared(tile", "tile.load(STORED)"),
    "_hopper_late.py": ("here.load(layout), following.load(layout)",),
    "_write_project_hopper.py": ("tiles.store(",),
    "_streams_bwd_hopper.py": (".store(narrow)",),
    "_streams_bwd_eight.py": ("exchanged.store(", "exchanged.load("),
}


def _handed_on(lines: list[str], number: int, file: str) -> bool:
    return any(text in lines[number] for text in HANDED_ON.get(file, ()))


def _places(kind: Callable[[list[str], int, str], bool]) -> set[str]:
    found = set()
    for file in HOPPER:
        lines = file.read_text().splitlines()
        found |= {f"{file.name}:{number + 1}" for number in range(len(lines)) if kind(lines, number, file.name)}
    return found


def _unknown_races(output: str) -> list[str]:
    """Races that racecheck reports, but for those within one of the kinds that it does not understand."""
    kinds = [_places(_hand_over), _places(_handed_on)]
    races = [f"Race reported{race}" for race in output.split("Race reported")[1:]]
    accesses = [re.findall(r"access at \S+ in (\S+:\d+)", race) for race in races]
    return [
        race
        for race, places in zip(races, accesses, strict=True)
        if len(places) != race.count(" access at ") or not any(set(places) <= kind for kind in kinds)
    ]


@pytest.mark.parametrize("what", ["every_operator", "forms_for_hopper"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str, what: str) -> None:
    """Allocations go straight to the driver: inside torch's cached blocks, nothing is out of bounds."""
    script = Path(__file__).with_name("sanitized.py")
    result = subprocess.run(
        [
            "compute-sanitizer",
            "--tool",
            tool,
            "--print-limit",
            "10000",
            "--error-exitcode",
            "7",
            sys.executable,
            str(script),
            what,
        ],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    output = result.stdout + result.stderr
    assert "all of it ran" in output, output[-3000:]
    if tool == "racecheck":
        unknown = _unknown_races(output)
        assert not unknown, "".join(unknown)[:3000]
        assert "RACECHECK SUMMARY" in output and ("Race reported" in output or result.returncode == 0), output[-3000:]
    else:
        assert result.returncode == 0 and "ERROR SUMMARY: 0 errors" in output, output[-3000:]
