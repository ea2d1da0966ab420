"""Calls like an earlier one are repeated without working out again what to allocate and launch.

Both depend on the shapes, the dtypes and the constants among an operator's arguments alone. So the first call of a kind
is watched, its allocations with `empty` and its launches in `_launcher`, and the next ones allocate the results, one
buffer for everything between them, and launch: a fraction of the time that the Python in this package takes. What did
anything else on the way (a fill, a copy) is not repeated but called as before. A first call whose kernels are not
compiled stops, and is made once more when all of them are. A plan is run in C++ (mhckit.native) as soon as that is
compiled, and in Python until then.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhckit.ops._register import allocations

from . import _launcher, _native

try:  # as compiled code allocates, in half of the time
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:  # a private name
    _empty_strided_cuda: Any = None

# Beyond so many kinds of calls, as with a new number of tokens in every batch, all are forgotten.
MAX_PLANS = 512
# Bytes; what the caching allocator aligns its blocks to is more.
_ALIGNMENT = 256


class _Launch(NamedTuple):
    """A compiled kernel, and which of a call's values are its arguments."""

    kernel: _launcher.Compiled
    grid: tuple[int, int, int]
    pick: Callable[[list[Any]], tuple[Any, ...]]
    parameters: tuple[Any, ...] | None  # for C++, where it can launch the kernel


class _Layout(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass
class Plan:
    """The values of a call are, in this order: pointers to its tensors, to the results, into the buffer; constants."""

    device: torch.device
    layouts: tuple[_Layout, ...]  # of the results and, last, the buffer
    offsets: tuple[int, ...]
    constants: tuple[Any, ...]
    launches: tuple[_Launch, ...]
    returned: tuple[int | torch.dtype, ...]  # a result's number, or the dtype of one that is absent
    alone: bool  # one result, not a tuple of them
    _taken: tuple[Any, ...] | None = None  # what `native` returns; () where C++ cannot take it

    def repeat(self, tensors: Sequence[Tensor | None], *, none_for_absent: bool) -> Any:
        """The results of a call of the same kind, with contiguous tensors. None where it cannot be repeated now: one
        of them is not aligned, another device is the current one, or launches are watched.
        """
        if not _launcher.goes_straight():
            return None
        given = tuple([tensor for tensor in tensors if tensor is not None])
        native = self.native()
        results = self._run(given) if native is None else native[0].run(native[1], given)
        if results is None:
            return None
        if self.alone:
            return results[0]
        if none_for_absent:
            return tuple([results[which] if isinstance(which, int) else None for which in self.returned])
        return tuple([results[which] if isinstance(which, int) else self._absent(which) for which in self.returned])

    def _run(self, tensors: tuple[Tensor, ...]) -> list[Tensor] | None:
        """In Python what mhckit.native does in C++."""
        values: list[Any] = [tensor.data_ptr() for tensor in tensors]
        if functools.reduce(operator.or_, values) % 16 or self.device.index != torch._C._cuda_getDevice():
            return None
        allocated = _allocate(self.layouts, self.device)
        values += [tensor.data_ptr() for tensor in allocated]
        if self.offsets:
            start = values.pop()
            values += [start + offset for offset in self.offsets]
        values += self.constants
        _launcher.repeat([(kernel, grid, pick(values)) for kernel, grid, pick, _ in self.launches])
        return allocated

    def _absent(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype, device=self.device)

    def native(self) -> tuple[Any, ...] | None:
        """mhckit.native's module and this plan as it takes it; None where, or as long as, there is none."""
        if self._taken is None and (module := _native.module(self.device)) is not None:
            plan = self._in_cpp(module)
            self._taken = () if plan is None else (module, plan)
        return self._taken or None

    def _in_cpp(self, module: Any) -> Any:
        launches = []
        for kernel, grid, _pick, parameters in self.launches:
            if kernel.binary is None or parameters is None:
                return None
            launches.append((kernel.binary.function, grid, *kernel.binary.settings, parameters))
        results, buffer = self.layouts, 0
        if self.offsets:
            *results, (size, _stride, _dtype) = self.layouts
            buffer = size[0]
        return module.plan(self.device, tuple(map(tuple, results)), self.offsets, buffer, tuple(launches))

    @staticmethod
    def goes_straight() -> bool:
        return _launcher.goes_straight()


_UNSEEN: Any = object()


class Planned:
    """A kernel's host function that remembers its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.plans: dict[tuple[Any, ...], Plan | None] = {}

    def __call__(self, args: Sequence[Any], *, none_for_absent: bool) -> tuple[Any, Plan | None]:
        """Results of the function, the absent ones as they are or, where the call is repeated and asked to, None; and
        the plan that repeats a call with tensors like these, if there is one.
        """
        ready = [_aligned(argument) if isinstance(argument, Tensor) else argument for argument in args]
        tensors = [argument for argument in ready if isinstance(argument, Tensor)]
        if not _may_repeat(tensors[0]):
            return self.function(*ready), None
        key = tuple(
            (argument.shape, argument.dtype, argument.device) if isinstance(argument, Tensor) else argument
            for argument in ready
        )
        plan = self.plans.get(key, _UNSEEN)
        if plan is _UNSEEN:
            result = self._watched(key, ready, tensors)
            plan = self.plans.get(key)
        else:
            result = None if plan is None else plan.repeat(tensors, none_for_absent=none_for_absent)
            if result is None:
                result = self.function(*ready)
        as_they_came = all(argument is original for argument, original in zip(ready, args, strict=True))
        return result, plan if as_they_came else None

    def _watched(self, key: tuple[Any, ...], args: Sequence[Any], tensors: list[Tensor]) -> Any:
        pointers = [tensor.data_ptr() for tensor in tensors]
        if len(set(pointers)) < len(pointers) or 0 in pointers:
            return self.function(*args)  # the same tensor twice, or no elements: not what most calls look like
        # Inference tensors do not count what is written into them.
        with torch.inference_mode(False), torch.no_grad():
            try:
                recorded = self._recorded(args, compiled_only=True)
            except _launcher.NotCompiled:
                recorded = None  # and what was allocated is free again before it is allocated anew
            if recorded is None:
                _launcher.compile_call(lambda: self.function(*args))
                recorded = self._recorded(args, compiled_only=False)
        result, allocated, launches = recorded
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        if _launcher.observer is None:  # one that came meanwhile made launches of its own
            self.plans[key] = _plan(result, tensors[0].device, pointers, allocated, launches)
        return result

    def _recorded(self, args: Sequence[Any], *, compiled_only: bool) -> tuple[Any, list[Any], list[Any]]:
        with allocations() as allocated, _launcher.recorded(compiled_only=compiled_only) as launches:
            result = self.function(*args)
        return result, allocated, launches


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, and a view that starts between 16-byte boundaries is copied.

    Triton compiles another kernel for it, with narrow loads and other orders of summation: slow, and a token would not
    get the same bits alone, as a slice of its batch, and inside it.
    """
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _may_repeat(tensor: Tensor) -> bool:
    return tensor.is_cuda and _launcher.goes_straight()


def _allocate(layouts: tuple[_Layout, ...], device: torch.device) -> list[Tensor]:
    """On the current device, which is this one."""
    # Deterministic algorithms: torch may fill the memory first.
    if _empty_strided_cuda is None or torch._C._get_deterministic_algorithms():
        return [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in layouts]
    return [_empty_strided_cuda(size, stride, dtype) for size, stride, dtype in layouts]


def _plan(
    result: Any,
    device: torch.device,
    pointers: list[int],
    allocations: list[tuple[Tensor, int]],
    launches: list[_launcher.Recorded | None],
) -> Plan | None:
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
        parameters = _native.parameters(launch, chosen, len(slots))
        picks.append(_Launch(launch.kernel, launch.grid, _picker(chosen), parameters))
    index = {id(tensor): position for position, tensor in enumerate(kept)}
    layouts = [_Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in kept]
    if end:
        layouts.append(_Layout((end,), (1,), torch.uint8))
    return Plan(
        device,
        tuple(layouts),
        tuple(offsets),
        tuple(constants),
        tuple(picks),
        tuple(index.get(id(tensor), tensor.dtype) for tensor in returned),
        alone,
    )


def _picker(chosen: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(chosen) > 1:
        return operator.itemgetter(*chosen)
    return lambda values: tuple(values[index] for index in chosen)


def _among(tensor: Tensor, tensors: list[Tensor]) -> bool:
    return any(tensor is other for other in tensors)
