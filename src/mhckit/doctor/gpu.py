"""The GPU that torch would use."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import torch

from .findings import Finding

GIB = 1 << 30
# The speed check copies 2 GiB to another 2, and then runs a junction of 256 MiB of streams.
WANTED_MEMORY = 8 * GIB


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    free: int
    total: int
    count: int = 1
    amd: bool = False

    @property
    def has_room(self) -> bool:
        return self.free >= WANTED_MEMORY


def current_gpu() -> Gpu | None:
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return Gpu(
        torch.cuda.get_device_name(),
        torch.cuda.get_device_capability(),
        free,
        total,
        torch.cuda.device_count(),
        amd=torch.version.hip is not None,
    )


def gpu_finding(gpu: Gpu | None) -> Finding:
    """Whether there is one that can be used; if the kernels can run on it is said by the path of CUDA tensors."""
    if gpu is None:
        return _no_gpu()
    seen = (
        f"{gpu.name}{f' (one of {gpu.count})' if gpu.count > 1 else ''}, compute capability "
        f"{'.'.join(map(str, gpu.capability))}, {gpu.free / GIB:.0f} of {gpu.total / GIB:.0f} GiB free"
    )
    values = {"name": gpu.name, "capability": list(gpu.capability), "free_bytes": gpu.free, "total_bytes": gpu.total}
    if not gpu.has_room:
        advice = f"less than {WANTED_MEMORY // GIB} GiB are free: nvidia-smi shows who uses the memory"
        return Finding("GPU", "warning", seen, advice, values)
    if gpu.amd:
        return Finding("GPU", "warning", seen, "on AMD the kernels compile, but were never run: trust no speed", values)
    return Finding("GPU", "ok", seen, values=values)


def _no_gpu() -> Finding:
    seen = "none: torch.cuda.is_available() is False"
    if shutil.which("nvidia-smi") is None:
        return Finding("GPU", "skipped", seen)
    if torch.version.cuda is None:
        return Finding("GPU", "warning", f"{seen}, but there is nvidia-smi", "install a build of torch with CUDA")
    advice = "see whether nvidia-smi lists a GPU, and whether its driver is new enough for CUDA " + torch.version.cuda
    return Finding("GPU", "warning", f"{seen}, but there is nvidia-smi", advice)
