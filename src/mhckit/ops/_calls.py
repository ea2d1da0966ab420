"""Eager calls of an operator that are repeated in C++ (mhckit.native), autograd's share of them included.

What a call does is not written down a second time. A call like an earlier one that Python has repeated is watched once
more: which plan ran, with which of the arguments, what became results, and what was saved for backward. From then on
C++ repeats calls of this kind. Its node in autograd's graph asks Python for the first backward of a kind, which is
watched likewise. Whatever is not recognised is done in Python, as ever.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ._known import is_eager


class Repeated(NamedTuple):
    """A kernel's call that Python has repeated."""

    tensors: tuple[Tensor | None, ...]
    plan: Any
    results: Any


class _Watched:
    """What an operator's call did: the kernel's calls that were repeated, and what forward made of their results."""

    def __init__(self) -> None:
        self.repeated: list[Repeated] = []
        self.outputs: Any = None


class _Watching(threading.local):
    now: _Watched | None = None


_watching = _Watching()


def note_repeated(tensors: tuple[Tensor | None, ...], plan: Any, results: Any) -> None:
    """Say that a plan was repeated."""
    if _watching.now is not None:
        _watching.now.repeated.append(Repeated(tensors, plan, results))


def note_outputs(outputs: Any) -> None:
    """Say what an operator's forward returned."""
    if _watching.now is not None:
        _watching.now.outputs = outputs


@contextlib.contextmanager
def _watched() -> Iterator[_Watched]:
    outer = _watching.now
    _watching.now = watched = _Watched()
    try:
        yield watched
    finally:
        _watching.now = outer


class Context:
    """What an operator's ``save`` and ``backward`` use of autograd's ctx."""

    def __init__(self) -> None:
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.needs_input_grad: tuple[bool, ...] = ()
        self.materializes = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materializes = value


class Calls:
    """Calls of an operator whose first so many arguments are tensors or None; in_python makes one."""

    def __init__(
        self,
        name: str,
        tensors: int,
        results: int | None,
        in_python: Callable[..., Any],
        save: Callable[[Any, tuple[Any, ...], Any], None],
        backward: Callable[..., tuple[Tensor | None, ...]],
    ) -> None:
        self._name = name
        self._tensors = tensors
        self._results = results
        self._in_python = in_python
        self._save = save
        self._backward = backward
        self._native: Any = None
        self._known: Any = None
        self._goes_straight: Callable[[], bool] = lambda: False

    def __call__(self, *args: Any) -> Any:
        if self._known is not None and self._ready():
            results = self._native.call(self._known, args)
            if results is not None:
                return results
        with _watched() as watched:
            results = self._in_python(*args)
        # Where forward returns something else than its kernel's results, only Python knows what.
        if len(watched.repeated) == 1 and watched.repeated[0].results is watched.outputs:
            self._keep(args, watched.repeated[0])
        return results

    def _ready(self) -> bool:
        """Whether nobody wants to see what is called and launched."""
        return is_eager() and self._goes_straight() and not _autograd_is_compiled()

    def _keep(self, args: tuple[Any, ...], call: Repeated) -> None:
        native = call.plan.native()
        takes = _positions([tensor for tensor in call.tensors if tensor is not None], args[: self._tensors])
        if native is None or takes is None:
            return
        module, plan = native
        outputs = (call.results,) if call.plan.alone else call.results
        context = Context()
        self._save(context, args, call.results)
        saved = tuple([None if tensor is None else _origin(tensor, args, outputs) for tensor in context.saved_tensors])
        context.saved_tensors = ()
        if _ELSEWHERE in saved:
            return
        gives = tuple([which if isinstance(which, int) else -1 for which in call.plan.returned])
        if self._known is None:
            self._goes_straight = call.plan.goes_straight
            self._native, self._known = module, module.calls(self._tensors, self._name, self._ready)
        visible = len(outputs) if self._results is None else self._results
        how = (visible, call.plan.alone, context.materializes)
        backward = functools.partial(self._run_backward, context, len(args) - self._tensors)
        module.keep(self._known, args, (plan, takes, gives), *how, saved, backward)

    def _run_backward(
        self,
        context: Context,
        constants: int,
        gradients: tuple[Tensor | None, ...],
        saved: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """Gradients of the arguments; and how C++ can repeat that, or None."""
        context = copy.copy(context)
        context.saved_tensors, context.needs_input_grad = saved, (*needs, *(False,) * constants)
        with _watched() as watched:
            results = self._backward(context, *gradients)
        if len(watched.repeated) != 1:
            return results, None
        return results, _how_to_repeat(watched.repeated[0], (*gradients, *saved), results[: self._tensors])


def _how_to_repeat(call: Repeated, values: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> Any:
    native = call.plan.native()
    takes = _positions([tensor for tensor in call.tensors if tensor is not None], values)
    outputs = (call.results,) if call.plan.alone else call.results
    gives = _positions([gradient for gradient in wanted if gradient is not None], outputs)
    if native is None or takes is None or gives is None:
        return None
    numbers = iter([call.plan.returned[position] for position in gives])
    return native[1], takes, tuple([-1 if gradient is None else next(numbers) for gradient in wanted])


def _positions(tensors: Sequence[Tensor], among: Sequence[Any]) -> tuple[int, ...] | None:
    """Where each of these very objects is; None if one is not there."""
    places = {id(value): position for position, value in enumerate(among) if value is not None}
    found = [places.get(id(tensor), -1) for tensor in tensors]
    return None if -1 in found else tuple(found)


_ELSEWHERE = ("elsewhere", 0)


def _origin(tensor: Tensor, args: Sequence[Any], outputs: Sequence[Any]) -> tuple[str, int]:
    """Of what was saved: an argument, or an output; or only Python knows."""
    for kind, values in (("input", args), ("output", outputs)):
        for position, value in enumerate(values):
            if value is tensor:
                return kind, position
    return _ELSEWHERE


def _autograd_is_compiled() -> bool:
    """Compiled autograd traces Python's nodes, and C++'s only where they say how."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and bool(getattr(compiled, "compiled_autograd_enabled", False))
