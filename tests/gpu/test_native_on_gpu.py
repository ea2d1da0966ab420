"""Calls that C++ repeats, on a GPU: the same bits as Python's, in backward, graphs, streams and forms of kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import cotangents_of, run
from noting_driver import native
from recipes import every_recipe
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton import knobs

from mhckit.kernels import _native
from mhckit.kernels._launcher import KNOWS_LAUNCHES
from mhckit.kernels._plan import Plan
from mhckit.ops._calls import Calls
from mhckit.ops._known import Known
from mhckit.ops._register import Operator
from mhckit.testing import Call, make_call

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.skipif(not KNOWS_LAUNCHES, reason="launches without Triton, of one version of Triton")
OPERATORS = ("activate", "coefficients", "expand", "head", "junction", "post", "pre", "project", "sinkhorn")


class Counting:
    """mhckit.native's module; counts the forwards that it repeated."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.repeated = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def call(self, known: Any, args: tuple[Any, ...]) -> Any:
        results = self._module.call(known, args)
        self.repeated += results is not None
        return results


@pytest.fixture
def in_cpp(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """C++ that knows no call yet; nor does Python recognise one of an earlier test."""
    counting = Counting(native())
    native_of, find, seen = Plan.native, Known.find, set()

    def find_none_of_before(known: Known, *call: Any) -> Any:
        if id(known) not in seen:
            seen.add(id(known))
            known._kinds.clear()
        return find(known, *call)

    def counted(plan: Plan) -> tuple[Any, ...] | None:
        taken = native_of(plan)
        return None if taken is None else (counting, taken[1])

    for operator in Operator.__subclasses__():
        if isinstance(operator._eager_calls, Calls):
            monkeypatch.setattr(operator._eager_calls, "_known", None)
    monkeypatch.setattr(Known, "find", find_none_of_before)
    monkeypatch.setattr(Plan, "native", counted)
    return counting


def _call(operator: str = "junction", recipe: str = "deepseek_v4", tokens: int = 70, channels: int = 256) -> Call:
    size: dict[str, Any] = {"lead": (tokens,), "channels": channels}
    return make_call(operator, every_recipe()[recipe], **size, dtype=torch.bfloat16, device=DEVICE)


def _assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def _in_python(call: Call) -> dict[str, Tensor]:
    """What the first call of its kind returns, and that kind is known to C++ from the third on."""
    want = run(call, "triton")
    for _ in range(2):
        _assert_same(run(call, "triton"), want)
    return want


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator(operator: str, in_cpp: Counting) -> None:
    want = _in_python(_call(operator))
    for number in (2, 3):
        _assert_same(run(_call(operator), "triton"), want)
        assert in_cpp.repeated == number


@pytest.mark.parametrize("recipe", every_recipe())
@pytest.mark.parametrize(("tokens", "channels"), [(70, 256), (1, 128), (4000, 384)])
def test_every_recipe(recipe: str, tokens: int, channels: int, in_cpp: Counting) -> None:
    """Few tokens and many, for which kernels have other forms."""
    call = _call(recipe=recipe, tokens=tokens, channels=channels)
    _assert_same(run(call, "triton"), _in_python(call))
    assert in_cpp.repeated == 2


def test_forms_for_hopper(in_cpp: Counting) -> None:
    """Without a bias of f; tensor maps for J, and for F1, whose addresses are new in every call."""
    tensors = {k: t for k, t in _call(tokens=9000, channels=1024).tensors.items() if k != "f_bias"}
    call = Call("junction", every_recipe()["deepseek_v4"], tensors)
    want = _in_python(call)
    kept = [torch.empty(1 << 20, device=DEVICE) for _ in range(3)]
    moved = Call("junction", call.recipe, {name: tensor.clone() for name, tensor in tensors.items()})
    _assert_same(run(moved, "triton"), want)
    assert in_cpp.repeated == 2 and len(kept) == 3


def test_other_values_of_the_same_kind(in_cpp: Counting) -> None:
    first, second = _call("post"), _call("post")
    second.tensors["x"].mul_(2.0)
    _in_python(first)
    got = run(second, "triton")
    assert in_cpp.repeated == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calls, "_ready", lambda self: False)
        _assert_same(got, run(second, "triton"))
    assert in_cpp.repeated == 2


@pytest.mark.parametrize("frozen", ["x", "phi", "f", "bias"])
def test_frozen_tensors(frozen: str, in_cpp: Counting) -> None:
    results = []
    for _ in range(5):
        leaves = _call().requires_grad()
        leaves.tensors[frozen].requires_grad_(False)
        outputs = leaves()
        torch.autograd.backward(outputs, cotangents_of(outputs))
        results.append({name: tensor.grad for name, tensor in leaves.tensors.items() if tensor.grad is not None})
    assert in_cpp.repeated == 3 and frozen not in results[0] and len(results[0]) > 5
    for result in results[1:]:
        _assert_same(result, results[0])


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1), (2, 3)])
def test_only_some_outputs_are_used(used: tuple[int, ...], in_cpp: Counting) -> None:
    results = []
    for _ in range(5):
        leaves = _call().requires_grad()
        outputs = leaves()
        chosen = [outputs[k] for k in used]
        torch.autograd.backward(chosen, [torch.ones_like(output) for output in chosen])
        results.append({name: tensor.grad for name, tensor in leaves.tensors.items() if tensor.grad is not None})
    assert in_cpp.repeated == 3
    for result in results[1:]:
        _assert_same(result, results[0])


def test_on_another_stream(in_cpp: Counting) -> None:
    """It is the one that the inputs are computed on, long after everything was launched."""
    call = _call("post", tokens=2000, channels=1024)
    want, *_ = [call() for _ in range(3)]
    stream = torch.cuda.Stream()
    late = torch.zeros_like(call.tensors["x"])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(call.tensors["x"])
        got = Call("post", call.recipe, call.tensors | {"x": late})()
    stream.synchronize()
    assert in_cpp.repeated == 2 and torch.equal(got[0], want[0])


def test_threads_that_have_done_nothing_on_the_gpu(in_cpp: Counting) -> None:
    """They have no context of the driver's yet."""
    call = _call()
    want = _in_python(call)
    results: list[dict[str, Tensor]] = []
    torch.cuda.synchronize()
    for _ in range(3):
        thread = threading.Thread(target=lambda: results.append(run(call, "triton")))
        thread.start()
        thread.join()
    assert in_cpp.repeated == 4 and len(results) == 3
    for result in results:
        _assert_same(result, want)


def test_in_a_graph(in_cpp: Counting) -> None:
    call = _call()
    want = _in_python(call)
    leaves = call.requires_grad()
    cotangents = cotangents_of(call())
    graph, before = torch.cuda.CUDAGraph(), in_cpp.repeated
    with torch.cuda.graph(graph):
        outputs = leaves()
        names = [name for name in leaves.tensors if f"d{name}" in want]
        gradients = torch.autograd.grad(outputs, [leaves.tensors[name] for name in names], cotangents)
    assert in_cpp.repeated == before + 1
    graph.replay()
    torch.cuda.synchronize()
    results = {f"output {number}": output for number, output in enumerate(outputs)}
    _assert_same(results | {f"d{name}": value for name, value in zip(names, gradients, strict=True)}, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant: bool, in_cpp: Counting) -> None:
    call = _call()
    want = _in_python(call)
    leaves = call.requires_grad()

    def junction(*tensors: Tensor) -> tuple[Tensor, ...]:
        return Call("junction", call.recipe, dict(zip(call.tensors, tensors, strict=True)))()

    before = in_cpp.repeated
    outputs = checkpoint(junction, *leaves.tensors.values(), use_reentrant=reentrant)
    torch.autograd.backward(outputs, cotangents_of(outputs))
    assert in_cpp.repeated > before
    for name, tensor in leaves.tensors.items():
        if tensor.grad is not None:
            assert torch.equal(tensor.grad, want[f"d{name}"]), name


def test_nothing_stays_allocated(in_cpp: Counting) -> None:
    call = _call()
    _in_python(call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        run(call, "triton")
    assert in_cpp.repeated == 6 and torch.cuda.memory_allocated() == before


def _transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def _unaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("change", [_transposed, _unaligned, torch.nn.Parameter])
def test_tensors_of_other_kinds(change: Callable[[Tensor], Tensor], in_cpp: Counting) -> None:
    call = _call("post")
    want = _in_python(call)
    for _ in range(4):
        changed = Call("post", call.recipe, call.tensors | {"x": change(call.tensors["x"]).detach()})
        _assert_same(run(changed, "triton"), want)


def test_hooks_of_triton_see_every_launch(in_cpp: Counting) -> None:
    call, seen = _call(), []
    want, before = _in_python(call), in_cpp.repeated

    def hook(metadata: Any) -> None:
        seen.append(metadata)

    outputs = call.requires_grad()()
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        torch.autograd.backward(outputs, cotangents_of(outputs))
        of_backward = len(seen)
        _assert_same(run(call, "triton"), want)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert in_cpp.repeated == before + 1 and of_backward == 4 and len(seen) == 4 + 6


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cuda", torch.bfloat16)])
def test_modes(mode: Callable[[], Any], in_cpp: Counting) -> None:
    call = _call()
    want = [value for name, value in _in_python(call).items() if name.startswith("output")]
    before = in_cpp.repeated
    with mode():
        for _ in range(4):
            for got, wanted in zip(call(), want, strict=True):
                assert torch.equal(got, wanted) and got.is_inference() == torch.is_inference_mode_enabled()
    assert in_cpp.repeated >= before + 2


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    native()
    assert _native.module(DEVICE) is not None
    monkeypatch.setenv("MHCKIT_NATIVE", "0")
    assert _native.module(DEVICE) is None
