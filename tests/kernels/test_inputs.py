"""What kernels are given: no tokens, one token, other layouts, offsets, missing gradients, NaN, round_mix."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from accuracy import assert_accurate, cotangents_of, run
from recipes import every_recipe

import mhckit
from mhckit.testing import OPERATORS, Call, make_call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = every_recipe()
each_operator = pytest.mark.parametrize("operator", OPERATORS)


def _call(operator: str, name: str = "deepseek_v4", **options) -> Call:
    return make_call(operator, RECIPES[name], device=DEVICE, **{"channels": 37, "dtype": torch.bfloat16, **options})


NO_TOKENS = [
    (operator, name)
    for operator in OPERATORS
    for name in ("deepseek_v4", "paper-static", "hy_v4", "deepseek_v41")
    if (operator, name) != ("sinkhorn", "hy_v4")
]


@pytest.mark.parametrize(("operator", "name"), NO_TOKENS)
def test_no_tokens(operator: str, name: str) -> None:
    call = _call(operator, name, lead=(2, 0))
    got, want = run(call, "triton"), run(call, "reference")
    assert got.keys() == want.keys()
    for key, value in got.items():
        torch.testing.assert_close(value, want[key], rtol=0, atol=1e-6, msg=key)


@each_operator
def test_one_token(operator: str) -> None:
    assert_accurate(_call(operator, lead=(1,)))


@each_operator
def test_no_leading_dimensions(operator: str) -> None:
    call, flat = _call(operator, lead=()), _call(operator, lead=(1,))
    got, want = run(call, "triton"), run(flat, "triton")
    for key, value in got.items():
        assert torch.equal(value.flatten(), want[key].flatten()), key


@each_operator
def test_any_layout(operator: str) -> None:
    """Permuted, strided and offset inputs give the bits of contiguous ones."""
    call = _call(operator, lead=(3, 4))
    want = run(call, "triton")

    def shuffled(tensor: torch.Tensor) -> torch.Tensor:
        strange = torch.full((*tensor.shape[::-1], 2), torch.nan, dtype=tensor.dtype, device=tensor.device)
        strange = strange.permute(*reversed(range(tensor.ndim + 1)))[1]
        return strange.copy_(tensor)

    def offset(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.new_full((1,), torch.nan), tensor.flatten()])[1:].view(tensor.shape)

    for change in (shuffled, offset):
        tensors = {name: change(tensor).detach() for name, tensor in call.tensors.items()}
        assert not (change is shuffled and any(t.is_contiguous() for t in tensors.values() if t.numel() > 1))
        leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        with mhckit.backend("triton"):
            outputs = dataclasses.replace(call, tensors=leaves)()
        cotangents = cotangents_of(outputs)
        torch.autograd.backward(outputs, [change(cotangent) for cotangent in cotangents])
        for i, output in enumerate(outputs):
            assert torch.equal(output, want[f"output {i}"]), f"{change.__name__} {i}"
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                assert torch.equal(leaf.grad, want[f"d{name}"]), f"{change.__name__} d{name}"


PER_TOKEN = [(operator, "deepseek_v4") for operator in OPERATORS if operator != "expand"]
PER_TOKEN += [("sinkhorn", name) for name in ("paper", "megatron", "mhc_cu", "mhc_triton", "mhc_lite", "projection")]
TOKENS = 19


@pytest.mark.parametrize(("operator", "name"), PER_TOKEN)
def test_nan_stays_in_its_token(operator: str, name: str) -> None:
    call = _call(operator, name, lead=(TOKENS,))
    clean = run(call, "triton")
    per_token = [n for n, t in call.tensors.items() if t.shape[:1] == (TOKENS,)]
    assert per_token
    others = torch.arange(TOKENS, device=DEVICE) != 17
    for poisoned in per_token:
        tensors = {n: t.clone() for n, t in call.tensors.items()}
        tensors[poisoned][17].view(-1)[[0, -1]] = torch.nan
        results = run(dataclasses.replace(call, tensors=tensors), "triton")
        unused = poisoned == "mix_pre"
        assert unused or any(results[key][17].isnan().any() for key in results if key.startswith("output")), poisoned
        for key, value in results.items():
            if key.startswith("output") or key[1:] in per_token:
                assert torch.equal(value[others], clean[key][others]), f"{poisoned}: {key}"


@pytest.mark.parametrize("operator", ["enter", "junction", "coefficients", "activate", "project"])
@pytest.mark.parametrize("name", ["deepseek_v4", "paper-static", "deepseek_v41", "hy_v4"])
def test_gradients_that_autograd_does_not_have(operator: str, name: str) -> None:
    """Each output alone: the gradients of the others arrive as None."""
    call = _call(operator, name, lead=(5,))
    count = len(call())
    for kept in range(count):
        results = {}
        for backend in ("triton", "reference"):
            leaves = call.requires_grad()
            with mhckit.backend(backend):  # type: ignore[arg-type]
                output = leaves()[kept]
            if not output.requires_grad:
                continue
            output.backward(torch.ones_like(output))
            results[backend] = {n: t.grad for n, t in leaves.tensors.items() if t.grad is not None}
        if results:
            assert results["triton"].keys() == results["reference"].keys()
            for key, value in results["triton"].items():
                torch.testing.assert_close(value, results["reference"][key], rtol=2e-2, atol=2e-2, msg=key)


@pytest.mark.parametrize("frozen", [("phi", "norm_weight"), ("out_norm_weight",), ("x", "f"), ("phi", "scale", "bias")])
def test_gradients_that_nobody_needs(frozen: tuple[str, ...]) -> None:
    call = _call("junction", lead=(5,))
    want = run(call, "triton")
    leaves = {n: t.detach().clone().requires_grad_(n not in frozen) for n, t in call.tensors.items()}
    with mhckit.backend("triton"):
        outputs = dataclasses.replace(call, tensors=leaves)()
    torch.autograd.backward(outputs, cotangents_of(outputs))
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (name in frozen or f"d{name}" not in want), name
        if leaf.grad is not None:
            assert torch.equal(leaf.grad, want[f"d{name}"]), name


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_out_dtype(out_dtype: torch.dtype) -> None:
    call = _call("enter", lead=(5,))
    t = call.tensors
    results = {}
    for backend in ("triton", "reference"):
        with mhckit.backend(backend):  # type: ignore[arg-type]
            results[backend] = mhckit.enter(
                t["x"], t["phi"], t["scale"], t["bias"], recipe=call.recipe, out_dtype=out_dtype
            )[1]
    assert results["triton"].dtype == out_dtype
    torch.testing.assert_close(results["triton"], results["reference"])


@pytest.mark.parametrize("operator", ["coefficients", "enter", "junction"])
def test_rounded_mix(operator: str) -> None:
    recipe = RECIPES["deepseek_v4"].replace(round_mix=True)
    call = make_call(operator, recipe, device=DEVICE, channels=37, lead=(19,), dtype=torch.bfloat16)
    with mhckit.backend("triton"):
        mix = call()[-3:]
    assert all(torch.equal(part, part.bfloat16().float()) for part in mix[1:])
    assert not torch.equal(mix[0], mix[0].bfloat16().float())
    assert_accurate(call)


def test_activate_does_not_round() -> None:
    """Rounding belongs to coefficients, also where there is no residual map."""
    for name in ("deepseek_v4", "hy_v4"):
        recipe = RECIPES[name].replace(round_mix=True)
        assert_accurate(make_call("activate", recipe, device=DEVICE, lead=(5,), dtype=torch.float32))


def test_an_eps_below_float32() -> None:
    """norm_eps underflows, so tokens that do not exist must not divide by it."""
    recipe = RECIPES["paper"].replace(norm_eps=1e-50)
    assert_accurate(make_call("enter", recipe, device=DEVICE, lead=(3,), channels=37, dtype=torch.bfloat16))


def _post(x: torch.Tensor, call: Call) -> torch.Tensor:
    return call(x=x)[0]


def test_tensors_that_are_more_than_their_memory() -> None:
    """Views that are to be negated, tensors of zeros without memory, and none at all: torch knows what they mean."""
    call = _call("post", lead=(3,), dtype=torch.float32)
    x = call.tensors["x"]
    with mhckit.backend("triton"):
        negative = torch.ops.aten._neg_view(x)
        torch.testing.assert_close(_post(negative, call), _post(-x, call))
        zeros = torch.ops.aten._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)
        torch.testing.assert_close(_post(zeros, call), _post(torch.zeros_like(x), call))
        assert call.to(lambda tensor: tensor.to("meta"))()[0].shape == x.shape


@pytest.mark.parametrize("differentiable", [True, False])
def test_what_a_transform_leaves_behind(differentiable: bool) -> None:
    """vjp returns a function that runs once the transform is over, on what it saved in it."""
    call = _call("post", lead=(3,), dtype=torch.float32)
    x, results = call.tensors["x"], {}
    for backend in ("triton", "reference"):
        with mhckit.backend(backend):
            y, pullback, *_ = torch.func.vjp(lambda x: _post(x, call), x)
            with torch.set_grad_enabled(differentiable):
                results[backend] = pullback(torch.ones_like(y))[0]
    torch.testing.assert_close(results["triton"], results["reference"])


def test_tools_see_the_operators() -> None:
    call = _call("post", lead=(3,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler's, about itself, the first time it runs in a process
        with mhckit.backend("triton"), torch.profiler.profile() as profile:
            call()
    assert "mhckit::post_fwd" in {event.key for event in profile.key_averages()}
