"""The only user of torch.library: one function that turns a reference into a registered operator.

Each operator is registered twice, ``<name>_fwd`` and ``<name>_bwd``, and joined by a thin autograd.Function. A schema
with ``str recipe`` takes a Recipe as its key, and its implementations get the Recipe back. A key is one readable
constant: twenty scalars cost more to dispatch, dynamic compilation makes graph inputs of the floats among them, and
every new field would change every schema. With ``str out_dtype`` it takes a dtype by its name, and they get the dtype:
what AOTInductor compiles hands on dtypes as other ones before torch 2.12 (pytorch/pytorch#169157), and strings as they
are. The backend that the public function chose comes last.

Contract of an implementation, reference or kernel:
- arguments as in the schema, leading dimensions arbitrary, every tensor contiguous (for a kernel: at a multiple of 16
  bytes, too), no backend argument;
- results contiguous, aliasing neither inputs nor each other; what does not apply (no residual matrix, a gradient
  nobody needs) is ``absent(x)``, an empty tensor, because schemas cannot return None. Where an eager call goes straight
  to a kernel, None may come in its place.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from mhckit.recipe import Recipe

from ._calls import Calls, note_outputs, note_repeated
from ._check import DTYPES
from ._known import PLAIN_TENSORS, Known, is_eager

_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
# Arguments of a schema that stand for something else, and what they are turned into.
_STANDS_FOR: dict[str, Callable[[str], Any]] = {"str recipe": Recipe.from_key, "str out_dtype": _DTYPES.__getitem__}


def register(name: str, schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``mhckit::<name>`` with its implementation for every device and its fake.

    Returns a function that calls it: through torch's dispatcher, or straight where that would only cost time. Then
    None may stand for what is absent.
    """
    qualified = f"mhckit::{name}"
    arguments, returns = schema.split(") -> ")
    meanings = _meanings(arguments)
    kernel = _Kernel(name, arguments.count("Tensor"), meanings)

    def unpack(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _unpacked(args[:-1], meanings)

    def run(*args: Any) -> Any:
        if args[-1] == "triton":
            return kernel.run(args)
        device, rest = _device_of(args), unpack(args)
        # Here, not in Function.backward: torch 2.6's Dynamo mixes up inputs when both sides trace a `contiguous`.
        rest = [arg.contiguous() if isinstance(arg, Tensor) else arg for arg in rest]
        with _without_autocast(device.type):
            return _contiguous(reference(*rest))

    def run_fake(*args: Any) -> Any:
        return fake(*unpack(args))

    torch.library.define(qualified, f"{arguments}, str backend) -> {returns}")
    torch.library.impl(qualified, "CompositeExplicitAutograd", run)
    torch.library.register_fake(qualified, run_fake)
    operator = getattr(torch.ops.mhckit, name).default

    def call(*args: Any) -> Any:
        if args[-1] == "triton" and is_eager():
            result = kernel.run_directly(args)
            if result is not None:
                return result
        return operator(*args)

    return call


def dtype_name(dtype: torch.dtype) -> str:
    """What stands for a dtype in a schema."""
    return _DTYPE_NAMES[dtype]


def absent(like: Tensor) -> Tensor:
    """Stands for a tensor that does not apply."""
    return like.new_empty(0)


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous uninitialised tensor on the device of ``like``; fakes and kernels allocate with it."""
    tensor = like.new_empty(shape, dtype=dtype or like.dtype)
    if _watched.allocated is not None:
        _watched.allocated.append((tensor, tensor._version))
    return tensor


class _Watched(threading.local):
    allocated: list[tuple[Tensor, int]] | None = None


_watched = _Watched()


@contextlib.contextmanager
def allocations() -> Iterator[list[tuple[Tensor, int]]]:
    """What this thread allocates with `empty`, and how often torch had written into each by then."""
    _watched.allocated = allocated = []
    try:
        yield allocated
    finally:
        _watched.allocated = None


def room_for(tensors: Iterable[Tensor | None], *, otherwise: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised gradients of these tensors: contiguous, same shape and dtype; absent where a tensor is None."""
    return tuple(absent(otherwise) if tensor is None else tensor.new_empty(tensor.shape) for tensor in tensors)


def accumulator(x: Tensor) -> torch.dtype:
    """The dtype of coefficients and of every sum: float32, or float64 for float64 streams."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rounded(
    gradients: Iterable[Tensor | None], tensors: Iterable[Tensor | None], *, otherwise: Tensor
) -> tuple[Tensor, ...]:
    """Gradients rounded once to the dtypes of their tensors; absent where either is None."""
    return tuple(
        absent(otherwise) if gradient is None or tensor is None else gradient.to(tensor.dtype)
        for gradient, tensor in zip(gradients, tensors, strict=True)
    )


def pack(tensors: Iterable[Tensor | None], *, otherwise: Tensor) -> tuple[Tensor, ...]:
    """Results in the form a schema can return: absent for None."""
    return tuple(absent(otherwise) if tensor is None else tensor for tensor in tensors)


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple([None if tensor is None else tensor.contiguous() for tensor in tensors])


def needed(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """What backward returns: a gradient per input, None where autograd wants none (then it may be absent)."""
    count = len(gradients)
    return tuple([gradients[i] if need and i < count else None for i, need in enumerate(needs)])


def mark_hidden(ctx: Any, *outputs: Tensor | None) -> None:
    """Outputs that are no results: saved for backward, or absent."""
    ctx.mark_non_differentiable(*(output for output in outputs if output is not None))


def call_backward(op: Any, *args: Any) -> Any:
    """Run a backward operator so that differentiating its results again raises.

    Torch's once_differentiable looks only at the incoming gradients: under a linear loss they are constants, and it
    would return gradients that silently have no derivative. Compiled code refuses second derivatives by itself.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return op(*args)
    return _Backward.call(op, *args)


class Operator(torch.autograd.Function):
    """Base of the autograd.Functions: vmap runs the operator once per element and stacks.

    ``forward`` names every argument: with ``*args`` Dynamo cannot tell that it takes no ctx. ``setup_context`` saves
    what backward needs; in an operator with outputs for that purpose alone ``save`` does, and ``setup_context`` calls
    it and marks them as hidden.
    """

    results: int | None = None  # so many outputs, the first, are results; None for all
    _apply_eagerly: Callable[..., Any]
    _eager_calls: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Function.apply binds arguments by signature on every call; a stored one saves working it out each time.
        forward: Any = cls.forward
        forward.__signature__ = inspect.signature(forward)
        cls._apply_eagerly = _eager_apply(cls)
        cls._eager_calls = _eager_calls(cls)

    @classmethod
    def call(cls, *args: Any) -> Any:
        """``apply``, or less of it: the results alone, and without autograd where nothing is to be differentiated."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return cls.apply(*args)
        if getattr(forward_ad, "_current_level", 0) >= 0:
            return cls._apply_eagerly(*args)
        return cls._eager_calls(*args)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        if info.batch_size == 0:
            raise ValueError("vmap over an empty batch: mhckit's operators run once per element and have none to run")
        runs = [
            cls.apply(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(runs[0], Tensor):
            return torch.stack(runs), 0
        return tuple(torch.stack(outputs) for outputs in zip(*runs, strict=True)), (0,) * len(runs[0])


def _eager_apply(operator: type[Operator]) -> Callable[..., Any]:
    """``apply`` of an operator outside of torch.func's transforms, which need a forward that takes no ctx.

    One that does can save tensors that it does not return, and each that autograd need not look after saves time.
    Function.apply itself would only bind the arguments for those transforms.
    """
    count, save = operator.results, _save_of(operator)

    def forward(ctx: Any, *args: Any) -> Any:
        outputs = operator.forward(*args)
        note_outputs(outputs)
        save(ctx, args, outputs)
        return outputs if count is None else outputs[:count]

    methods = {"forward": staticmethod(forward), "backward": staticmethod(operator.backward)}
    eager = torch.autograd.function.FunctionMeta(operator.__name__, (torch.autograd.Function,), methods)
    return super(torch.autograd.Function, eager).apply  # type: ignore[misc]


def _eager_calls(operator: type[Operator]) -> Callable[..., Any]:
    """Eager calls outside of transforms: in Python, and in C++ where one is like those before it."""

    def in_python(*args: Any) -> Any:
        if torch.is_grad_enabled():
            return operator._apply_eagerly(*args)
        outputs = operator.forward(*args)
        note_outputs(outputs)
        return outputs

    parameters = inspect.signature(operator.forward).parameters.values()
    tensors = sum("Tensor" in str(parameter.annotation) for parameter in parameters)
    if not tensors:
        return in_python
    name = f"{operator.__name__}Backward"
    return Calls(name, tensors, operator.results, in_python, _save_of(operator), operator.backward)


def _save_of(operator: type[Operator]) -> Callable[[Any, tuple[Any, ...], Any], None]:
    return getattr(operator, "save", operator.setup_context)


class _Backward(Operator):
    @staticmethod
    def forward(op: Any, *args: Any) -> Any:
        return op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        raise RuntimeError("mhckit's operators can be differentiated once: second derivatives are not implemented")


def _device_of(args: tuple[Any, ...]) -> torch.device:
    return next(arg for arg in args if isinstance(arg, Tensor)).device


_Meanings = tuple[tuple[int, Callable[[str], Any]], ...]


def _meanings(arguments: str) -> _Meanings:
    """Which arguments of a schema stand for something else, by their positions."""
    kinds = arguments.removeprefix("(").split(", ")
    return tuple((position, _STANDS_FOR[kind]) for position, kind in enumerate(kinds) if kind in _STANDS_FOR)


def _unpacked(args: Sequence[Any], meanings: _Meanings) -> tuple[Any, ...]:
    """Arguments with what some of them stand for in their places."""
    unpacked = list(args)
    for position, meaning in meanings:
        unpacked[position] = meaning(args[position])
    return tuple(unpacked)


class _Kernel:
    """The kernel of an operator, whose first so many arguments are tensors. A call like an earlier one is repeated."""

    def __init__(self, name: str, tensors: int, meanings: _Meanings) -> None:
        self.name = name
        self.tensors = tensors
        self.meanings = meanings
        self.plans = Known()

    def run(self, args: tuple[Any, ...]) -> Any:
        """Results for torch's dispatcher."""
        result = self._repeat(args, none_for_absent=False)
        return self._work_out(args, none_for_absent=False) if result is None else result

    def run_directly(self, args: tuple[Any, ...]) -> Any:
        """Results, or None for what is absent; None in place of all where only the dispatcher knows what to do."""
        result = self._repeat(args, none_for_absent=True)
        if result is not None:
            return result
        if all(_is_plain(tensor) for tensor in args[: self.tensors] if tensor is not None):
            return self._work_out(args, none_for_absent=True)
        return None

    def _repeat(self, args: tuple[Any, ...], *, none_for_absent: bool) -> Any:
        tensors = args[: self.tensors]
        plan = self.plans.find(tensors, args[self.tensors :])
        if plan is None:
            return None
        with _current(plan.device):
            result = plan.repeat(tensors, none_for_absent=none_for_absent)
        if result is not None and none_for_absent:
            note_repeated(tensors, plan, result)
        return result

    def _work_out(self, args: tuple[Any, ...], *, none_for_absent: bool) -> Any:
        device = _device_of(args)
        with _current(device):
            planned = _load_kernel(self.name, device, self.meanings)
            result, plan = planned(args[:-1], none_for_absent=none_for_absent)
        if plan is not None:
            self.plans.keep(args[: self.tensors], args[self.tensors :], plan)
        return result


@functools.cache
def _load_kernel(name: str, device: torch.device, meanings: _Meanings) -> Callable[..., Any]:
    """A kernel's host function, loaded on first use; raises where Triton cannot run it."""
    try:
        importlib.import_module("mhckit.kernels._runtime").check(device)
    except ImportError as error:
        raise RuntimeError(
            f"the Triton kernel of mhckit::{name} cannot be loaded: {error}; "
            "install Triton, or use mhckit.backend('reference')"
        ) from error
    operator = name.rsplit("_", 1)[0]
    kernel = getattr(importlib.import_module(f"mhckit.kernels.{operator}"), name)
    planned = importlib.import_module("mhckit.kernels._plan").Planned
    return planned((lambda *args: kernel(*_unpacked(args, meanings))) if meanings else kernel)


def _is_plain(tensor: Tensor) -> bool:
    """No subclass, no wrapper that a transform left behind, no view that is to be negated, and with memory."""
    return (
        type(tensor) in PLAIN_TENSORS
        and not is_functorch_wrapped_tensor(tensor)
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and not tensor.is_meta
    )


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels launch on the current device, which need not be the one of the tensors."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast reaches into the body of an operator and would turn its float32 products into bfloat16."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def _contiguous(result: Any) -> Any:
    return result.contiguous() if isinstance(result, Tensor) else contiguous(*result)
