"""A step captured once and replayed on the same memory: by a CUDA graph, or by what stands for one without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")
WARM_UPS = 3
# What a graph being captured does not allow: the host would wait for values, or copy its own.
_HOST_TAKES_PART = ("_local_scalar_dense", "nonzero", "lift_fresh")


def captured(step: Callable[[], Result], rewind: Callable[[], None], device: torch.device) -> tuple[Result, Any]:
    """What the step returned, in memory that each call of the second result, the replay, writes anew.

    Steps before the capture, as CUDA graphs need them, and the capture itself move what the step keeps between calls:
    ``rewind`` puts it back.
    """
    if device.type == "cuda":
        return _captured_by_cuda(step, rewind)
    recorder = _Recorder()
    with recorder:
        result = step()
    rewind()
    return result, recorder.replay


def _captured_by_cuda(step: Callable[[], Result], rewind: Callable[[], None]) -> tuple[Result, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
            rewind()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    rewind()
    return result, graph.replay


class _Recorder(TorchDispatchMode):
    """Every operator that is called, with the memory it was called on. Like a graph it knows nothing of the host's
    part: branches taken, lengths, what was assigned to attributes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _HOST_TAKES_PART:
            raise RuntimeError(f"{name}: not possible while a step is captured")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            for memory, value in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(memory, Tensor) and memory.untyped_storage()._cdata != value.untyped_storage()._cdata:
                    memory.copy_(value)
