"""Calls like an earlier one are repeated without working out again what to allocate and launch.

Both depend on the shapes, the dtypes and the constants among an operator's arguments alone. So the first call of a kind
is watched, its allocations with `empty` and its launches in `_launcher`, and the next ones allocate the results, one
buffer for everything between them, and launch: a fraction of the time that the Python in this package takes. What did
anything else on the way (a fill, a copy) is not repeated but called as before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhckit.ops._register import allocations

from . import _launcher

# Beyond so many kinds of calls, as with a new number of tokens in every batch, all are forgotten.
MAX_PLANS = 512
# Bytes; what the caching allocator aligns its blocks to is more.
_ALIGNMENT = 256


class _Launch(NamedTuple):
    """A compiled kernel, and which of a call's values are its arguments."""

    kernel: _launcher.Compiled
    grid: tuple[int, int, int]
    pick: Callable[[list[Any]], tuple[Any, ...]]


class _Plan(NamedTuple):
    """The values of a call are, in this order: pointers to its tensors, to the results, into the buffer; constants."""

    results: tuple[tuple[int, torch.Size, torch.dtype], ...]  # and which tensor of the call is just like it, or -1
    returned: tuple[int | torch.dtype, ...]  # a result's number, or the dtype of one that is absent
    alone: bool  # one result, not a tuple of them
    buffer: int
    offsets: tuple[int, ...]
    constants: tuple[Any, ...]
    launches: tuple[_Launch, ...]

    def repeat(self, tensors: list[Tensor], pointers: list[int], none_for_absent: bool) -> Any:
        like = tensors[0]
        results = [
            torch.empty_like(tensors[model]) if model >= 0 else like.new_empty(shape, dtype=dtype)
            for model, shape, dtype in self.results
        ]
        values: list[Any] = pointers + [result.data_ptr() for result in results]
        if self.buffer:
            buffer = like.new_empty(self.buffer, dtype=torch.uint8)
            start = buffer.data_ptr()
            values += [start + offset for offset in self.offsets]
        values += self.constants
        _launcher.repeat([(kernel, grid, pick(values)) for kernel, grid, pick in self.launches])
        if self.alone:
            return results[0]
        if none_for_absent:
            return tuple([results[which] if isinstance(which, int) else None for which in self.returned])
        return tuple(
            [results[which] if isinstance(which, int) else like.new_empty(0, dtype=which) for which in self.returned]
        )


_UNSEEN: Any = object()


class Planned:
    """A kernel's host function that remembers its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.plans: dict[tuple[Any, ...], _Plan | None] = {}

    def __call__(self, args: Sequence[Any], *, none_for_absent: bool) -> Any:
        """Results of the function, the absent ones as they are or, where the call is repeated and asked to, None."""
        args = list(args)
        kind: list[Any] = []
        tensors: list[Tensor] = []
        pointers: list[int] = []
        for position, argument in enumerate(args):
            if isinstance(argument, Tensor):
                if argument.data_ptr() % 16 or not argument.is_contiguous():
                    argument = args[position] = _aligned(argument)
                tensors.append(argument)
                pointers.append(argument.data_ptr())
                kind += (argument.shape, argument.dtype, argument.device)
            else:
                kind.append(argument)
        if not _may_repeat(tensors[0]):
            return self.function(*args)
        key = tuple(kind)
        plan = self.plans.get(key, _UNSEEN)
        if plan is _UNSEEN:
            return self._watched(key, args, tensors, pointers)
        if plan is None:
            return self.function(*args)
        return plan.repeat(tensors, pointers, none_for_absent)

    def _watched(self, key: tuple[Any, ...], args: Sequence[Any], tensors: list[Tensor], pointers: list[int]) -> Any:
        if len(set(pointers)) < len(pointers) or 0 in pointers:
            return self.function(*args)  # the same tensor twice, or no elements: not what most calls look like
        # Inference tensors do not count what is written into them.
        with torch.inference_mode(False), torch.no_grad(), allocations() as allocated, _launcher.recorded() as launches:
            result = self.function(*args)
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        self.plans[key] = _plan(result, tensors, pointers, allocated, launches)
        return result


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, and a view that starts between 16-byte boundaries is copied.

    Triton compiles another kernel for it, with narrow loads and other orders of summation: slow, and a token would not
    get the same bits alone, as a slice of its batch, and inside it.
    """
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _may_repeat(tensor: Tensor) -> bool:
    return tensor.is_cuda and _launcher.goes_straight()


def _plan(
    result: Any,
    tensors: list[Tensor],
    pointers: list[int],
    allocations: list[tuple[Tensor, int]],
    launches: list[_launcher.Recorded | None],
) -> _Plan | None:
    """How to repeat a call, or None where more happened than allocations and launches: a tensor came from elsewhere, or
    torch wrote into one (which it counts).
    """
    alone = isinstance(result, Tensor)
    returned: tuple[Tensor, ...] = (result,) if alone else tuple(result)
    allocated = [tensor for tensor, _version in allocations]
    kept = [tensor for tensor in returned if tensor.numel()]
    inner = [tensor for tensor in allocated if tensor.numel() and not _among(tensor, kept)]
    written = any(tensor._version > version for tensor, version in allocations)
    if written or not all(_among(tensor, allocated) for tensor in kept):
        return None
    all_pointers = [*pointers, *(tensor.data_ptr() for tensor in kept + inner)]
    slots = {pointer: slot for slot, pointer in enumerate(all_pointers)}
    if len(slots) < len(all_pointers):
        return None
    offsets, end = [], 0
    for tensor in inner:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    constants: list[Any] = []
    picks = []
    for launch in launches:
        if launch is None:
            return None
        chosen = []
        for argument in launch.args:
            if isinstance(argument, Tensor) and argument.numel():
                if argument.data_ptr() not in slots:
                    return None
                chosen.append(slots[argument.data_ptr()])
            else:
                constants.append(0 if isinstance(argument, Tensor) else argument)
                chosen.append(len(slots) + len(constants) - 1)
        picks.append(_Launch(launch.kernel, launch.grid, _picker(chosen)))
    index = {id(tensor): position for position, tensor in enumerate(kept)}
    return _Plan(
        tuple((_model(tensor, tensors), tensor.shape, tensor.dtype) for tensor in kept),
        tuple(index.get(id(tensor), tensor.dtype) for tensor in returned),
        alone,
        end,
        tuple(offsets),
        tuple(constants),
        tuple(picks),
    )


def _picker(chosen: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(chosen) > 1:
        return operator.itemgetter(*chosen)
    return lambda values: tuple(values[index] for index in chosen)


def _among(tensor: Tensor, tensors: list[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _model(result: Tensor, tensors: list[Tensor]) -> int:
    """A tensor of the call with this shape and dtype: allocating like it takes half the time. -1 if there is none."""
    matches = (i for i, t in enumerate(tensors) if t.shape == result.shape and t.dtype == result.dtype)
    return next(matches, -1)
