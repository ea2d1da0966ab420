"""What an operator launches: Triton's launches as they are made, and everything on the device by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton.runtime.jit import JITFunction

# In the names of what a fused operator should not need: fills, copies, casts and other kernels of torch.
FOREIGN = ("memset", "memcpy", "at::native")


class Launch(NamedTuple):
    kernel: JITFunction
    args: tuple[Any, ...]
    options: dict[str, Any]
    compiled: bool  # this launch compiled the kernel, or loaded it, once more

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def repeat(self) -> None:
        self.kernel.run(*self.args, **self.options)

    def bytes(self) -> int:
        """The tensors that the kernel is given, each counted once."""
        tensors = tensors_in((*self.args, *self.options.values()))
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


class DeviceEvent(NamedTuple):
    name: str
    microseconds: float

    @property
    def foreign(self) -> bool:
        return any(part in self.name.lower() for part in FOREIGN)


def recorded_launches(run: Callable[[], object]) -> list[Launch]:
    """The Triton launches of a call, in order."""
    launches: list[Launch] = []
    original = JITFunction.run

    def record(self: JITFunction, *args: Any, **options: Any) -> Any:
        variants = self.device_caches[torch.cuda.current_device()][0]
        before = len(variants)
        result = original(self, *args, **options)
        launches.append(Launch(self, args, options, compiled=len(variants) > before))
        return result

    JITFunction.run = record
    try:
        run()
    finally:
        JITFunction.run = original
    if not launches:
        raise RuntimeError("no Triton launch was recorded")
    return launches


def device_events(run: Callable[[], object]) -> list[DeviceEvent]:
    """Everything a call does on the device, in order, by torch's profiler."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [
        event for event in profiler.events() or () if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    if not events:
        raise RuntimeError("the profiler saw nothing on the device")
    events.sort(key=lambda event: event.time_range.start)
    return [DeviceEvent(event.name, event.time_range.elapsed_us()) for event in events]


def tensors_in(argument: Any) -> list[Tensor]:
    """Tensors in a kernel's argument: itself, the members of a tuple, or what a tensor descriptor describes."""
    if isinstance(argument, Tensor):
        return [argument]
    if isinstance(argument, (tuple, list)):
        return [tensor for member in argument for tensor in tensors_in(member)]
    return tensors_in(argument.base) if hasattr(argument, "base") else []
