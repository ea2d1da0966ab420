"""compute-sanitizer finds no access out of bounds and no hazard in shared memory, in any kernel of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from races import unknown_races


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
        unknown = unknown_races(output)
        assert not unknown, "".join(unknown)[:3000]
    else:
        assert result.returncode == 0 and "ERROR SUMMARY: 0 errors" in output, output[-3000:]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc, which compiles the program, is not installed")
@pytest.mark.parametrize(("arrives", "reported"), [("each", 0), ("one", 1)])
def test_racecheck_does_not_follow_who_has_met(arrives: str, reported: int, tmp_path: Path) -> None:
    """Why known races are let pass: of two programs that are right, racecheck reports one."""
    program = tmp_path / "handed_on"
    source = Path(__file__).with_name("handed_on.cu")
    subprocess.run(["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-o", program, source], check=True)
    command = ["compute-sanitizer", "--tool", "racecheck", program, arrives]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    output = result.stdout + result.stderr
    assert f"no error, sum {sum(range(1, 129))}" in output
    assert f"RACECHECK SUMMARY: {reported} hazard" in output, output
