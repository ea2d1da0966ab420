"""compute-sanitizer finds no access out of bounds and no hazard in shared memory, in any kernel of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mhckit.kernels

FOLDER = Path(mhckit.kernels.__file__).parent
HOPPER = sorted([*FOLDER.glob("*_hopper.py"), *FOLDER.glob("*_eight.py")])


def _hand_over() -> set[str]:
    """Lines for which Triton itself makes code: groups of warps are told, in shared memory, what to run and with which
    values. racecheck sees no barrier between that and their reading it.
    """
    return {
        f"{file.name}:{number}"
        for file in HOPPER
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if line.lstrip().startswith("gl.warp_specialize(")
        or (line.startswith("def ") and line.endswith(("_hopper_kernel(", "_eight_kernel(")))
    }


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
    accesses = re.findall(r"access at \S+ in (\S+:\d+)", output)
    if tool == "racecheck" and accesses and set(accesses) <= _hand_over():
        assert len(accesses) == output.count(" access at "), "all of them are of known lines"
        assert "all of it ran" in output
        return
    assert result.returncode == 0 and "all of it ran" in output, output[-3000:]
    clean = "RACECHECK SUMMARY: 0 hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    assert clean in output, output[-3000:]
