"""compute-sanitizer finds no access out of bounds and no hazard in shared memory, in any kernel of ours."""

from __future__ import annotations

import os
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
