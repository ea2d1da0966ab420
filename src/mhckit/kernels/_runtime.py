"""Whether the kernels can run here: Triton's version, and the device."""

from __future__ import annotations

import torch
import triton

OLDEST_TRITON = (3, 6)
OLDEST_CAPABILITY = (8, 0)


def check(device: torch.device) -> None:
    """Raise where the kernels cannot run, with what to do about it."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        raise RuntimeError(
            f"mhckit's kernels need Triton {'.'.join(map(str, OLDEST_TRITON))} or newer (torch 2.10 or newer brings "
            f"it), got {triton.__version__}; use mhckit.backend('reference')"
        )
    if device.type != "cuda":
        if not triton.knobs.runtime.interpret:
            raise RuntimeError(
                f"backend 'triton' needs CUDA tensors, got tensors on {device.type!r}; use mhckit.backend('auto')"
            )
    elif torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        raise RuntimeError(
            f"mhckit's kernels need compute capability {'.'.join(map(str, OLDEST_CAPABILITY))} or newer (Ampere), "
            f"got {torch.cuda.get_device_name(device)}; use mhckit.backend('reference')"
        )
