"""How much memory a step takes, and a picture of who takes it. Nothing here waits for the device."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

STEPS_IN_SNAPSHOT = 3
EVENTS_IN_SNAPSHOT = 200_000


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU the most allocated since the reset; on a CPU the most that the process ever had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_details(device: torch.device) -> dict[str, float]:
    """For the memory log; empty on a CPU."""
    if device.type != "cuda":
        return {}
    statistics = torch.cuda.memory_stats(device)
    return {
        "memory/allocated_bytes": statistics.get("allocated_bytes.all.current", 0),
        "memory/reserved_bytes": statistics.get("reserved_bytes.all.current", 0),
        "memory/reserved_peak_bytes": statistics.get("reserved_bytes.all.peak", 0),
        "memory/retries": statistics.get("num_alloc_retries", 0),
    }


class MemorySnapshot:
    """The allocations of the first steps, in a file that the viewer of PyTorch shows.

    Args:
        path: of the file; None takes no snapshot.
        device: must be a GPU if one is taken.
    """

    def __init__(self, path: Path | None, device: torch.device) -> None:
        if path is not None and device.type != "cuda":
            raise ValueError(f"memory_snapshot needs a CUDA GPU, got device {device}")
        self._path, self._steps = path, 0
        if path is not None:
            torch.cuda.memory._record_memory_history(max_entries=EVENTS_IN_SNAPSHOT)

    def after_step(self) -> None:
        self._steps += 1
        if self._path is not None and self._steps == STEPS_IN_SNAPSHOT:
            self.close()

    def close(self) -> None:
        """Write what there is, once."""
        if self._path is not None:
            torch.cuda.memory._dump_snapshot(str(self._path))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._path = None
