"""What an operator launches: Triton's launches as they are made, and everything on the device by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton.runtime.jit import JITFunction

from mhckit.kernels import _launcher

# In the names of what a fused operator should not need: fills, copies, casts and other kernels of torch.
FOREIGN = ("memset", "memcpy", "at::native")


class Launch(NamedTuple):
    kernel: JITFunction
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    compiled: bool  # this launch compiled the kernel, or loaded it, once more

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def repeat(self) -> None:
        _launcher.run_now(self.kernel, self.grid, self.args, self.constants)

    def bytes(self) -> int:
        """The tensors that the kernel is given, each counted once."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.args if isinstance(tensor, Tensor)}.values())


class DeviceEvent(NamedTuple):
    name: str
    microseconds: float

    @property
    def foreign(self) -> bool:
        return any(part in self.name.lower() for part in FOREIGN)


def recorded_launches(run: Callable[[], object]) -> list[Launch]:
    """The kernel launches of a call, in order."""
    launches: list[Launch] = []

    def observe(kernel: JITFunction, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        variants = kernel.device_caches[torch.cuda.current_device()][0]
        before = len(variants)
        _launcher.run_now(kernel, grid, args, constants)
        launches.append(Launch(kernel, grid, args, constants, compiled=len(variants) > before))

    _launcher.observer = observe
    try:
        run()
    finally:
        _launcher.observer = None
    if not launches:
        raise RuntimeError("no kernel launch was recorded")
    return launches


def device_events(run: Callable[[], object]) -> list[DeviceEvent]:
    """Everything a call does on the device, in order, by torch's profiler."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    events = [
        event for event in profiler.events() or () if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    if not events:
        raise RuntimeError("the profiler saw nothing on the device")
    events.sort(key=lambda event: event.time_range.start)
    return [DeviceEvent(event.name, event.time_range.elapsed_us()) for event in events]
