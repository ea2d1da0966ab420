"""Recognising a call like an earlier one, so that what was worked out for that one is not worked out again.

Calls are alike if their constants are equal and their tensors agree in everything but values: type, dtype, device,
shape, strides, whether they require a gradient, and whatever else torch's dispatcher goes by, modes like autocast
included. Torch compares all that for all tensors at once, in the time that Python takes to read a few of their shapes:
`TensorGuards`, by which compiled code recognises its inputs. It keeps no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a private name
    TensorGuards: Any = None

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_KNOWABLE = frozenset((*PLAIN_TENSORS, type(None)))

# Beyond so many kinds of calls, as with a new number of tokens in every batch, all are forgotten.
MAX_KINDS = 512
# Calls that differ in neither types, constants nor the shape of the first tensor: a variant per dtype, mode, or set of
# frozen parameters.
MAX_VARIANTS = 8


def is_eager() -> bool:
    """Whether nobody traces, transforms or watches what is called."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or _profiler_enabled()
    )


class Known:
    """Kinds of calls, and what was worked out for each. Threads may share it: at worst one forgets for another."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Any, ...], tuple[tuple[Any, Any], ...]] = {}

    def find(self, tensors: Sequence[Tensor | None], constants: tuple[Any, ...]) -> Any:
        """What was kept for a call like this one, or None.

        No tensor may be nested: TensorGuards ends the process where it meets one.
        """
        if not _KNOWABLE.issuperset(map(type, tensors)):
            return None
        given = [tensor for tensor in tensors if tensor is not None]
        for guards, value in self._kinds.get(_kind(tensors, given, constants), ()):
            if guards.check(*given):
                return value
        return None

    def keep(self, tensors: Sequence[Tensor | None], constants: tuple[Any, ...], value: Any) -> None:
        """Keep a value for calls like this one, unless there is one; if its tensors are plain ones, each given once."""
        if not _KNOWABLE.issuperset(map(type, tensors)) or self.find(tensors, constants) is not None:
            return
        given = [tensor for tensor in tensors if tensor is not None]
        guards = _guards(given)
        if guards is not None and guards.check(*given):
            kind = _kind(tensors, given, constants)
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            self._kinds[kind] = ((guards, value), *self._kinds.get(kind, ()))[:MAX_VARIANTS]


def _guards(tensors: Sequence[Tensor]) -> Any:
    """None where this torch has no TensorGuards, or others: then every call is taken for a new one."""
    try:
        return (
            None if TensorGuards is None else TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        )
    except TypeError:
        return None


def _kind(tensors: Sequence[Tensor | None], given: Sequence[Tensor], constants: tuple[Any, ...]) -> tuple[Any, ...]:
    """What all variants have in common; the types say which tensors are None."""
    return *map(type, tensors), *constants, given[0].shape if given else None
