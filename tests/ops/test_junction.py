"""The junction as a fusion: the bits of its parts, gradients at least as exact, and no gradient of x ever added up."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from recipes import every_recipe
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mhckit
from mhckit import Mix, Recipe
from mhckit.testing import make_call, relative_error

RECIPES = every_recipe()
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


def _parameters(recipe: Recipe, channels: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
    tensors = make_call("coefficients", recipe, channels=channels, dtype=dtype, seed=seed).requires_grad().tensors
    return {name: tensors.get(name) for name in ("phi", "scale", "bias")}


def _composed(t: dict[str, Tensor], recipe: Recipe) -> tuple[Tensor, Tensor, Mix]:
    """A junction out of the small operators."""
    y = mhckit.post(t["x"], t["f"], t["mix_post"], t.get("mix_res"), f_bias=t["f_bias"])
    mix = mhckit.coefficients(
        y, t.get("phi"), t.get("scale"), t["bias"], recipe=recipe, norm_weight=t.get("norm_weight")
    )
    weights = t["mix_pre"] if recipe.shifted else mix.pre
    return y, mhckit.pre(y, weights, out_norm_weight=t["out_norm_weight"]), mix


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_recipe
def test_forward_has_the_bits_of_its_parts(recipe: Recipe, dtype: torch.dtype) -> None:
    call = make_call("junction", recipe, lead=(9,), channels=21, dtype=dtype)
    y, x_in, mix = _composed(call.tensors, recipe)
    for got, want in zip(call(), (y, x_in, *(t for t in mix if t is not None)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@each_recipe
def test_gradients_equal_those_of_its_parts(recipe: Recipe) -> None:
    call = make_call("junction", recipe, lead=(4,), channels=5)
    outputs = call.requires_grad()
    weights = [torch.randn_like(o) for o in call()]
    fused, parts = outputs, call.requires_grad()
    sum((o * w).sum() for o, w in zip(fused(), weights, strict=True)).backward()
    y, x_in, mix = _composed(parts.tensors, recipe)
    flat = (y, x_in, *(t for t in mix if t is not None))
    sum((o * w).sum() for o, w in zip(flat, weights, strict=True)).backward()
    for name, tensor in fused.tensors.items():
        want = parts.tensors[name].grad
        assert (tensor.grad is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(tensor.grad, want, msg=name)


def test_bfloat16_gradients_are_more_exact_than_those_of_its_parts() -> None:
    """The parts round the gradient of y to bfloat16 at each of their borders; the junction never does."""
    recipe = RECIPES["deepseek_v4"]
    call = make_call("junction", recipe, lead=(64,), channels=128, dtype=torch.bfloat16)
    weights = [torch.randn(o.shape).bfloat16() for o in call()]

    def gradients(run, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = call.to(lambda t: t.to(torch.promote_types(t.dtype, dtype))).requires_grad()
        outputs = run(leaves)
        torch.autograd.backward(outputs, [w.to(o.dtype) for w, o in zip(weights, outputs, strict=True)])
        return {name: t.grad for name, t in leaves.tensors.items() if t.grad is not None}

    def parts(leaves) -> tuple[Tensor, ...]:
        y, x_in, mix = _composed(leaves.tensors, recipe)
        return (y, x_in, *mix)  # type: ignore[return-value]

    exact = gradients(lambda leaves: leaves(), torch.float64)
    fused = gradients(lambda leaves: leaves(), torch.bfloat16)
    composed = gradients(parts, torch.bfloat16)
    for name in ("x", "f", "mix_post", "mix_res"):
        assert relative_error(fused[name], exact[name]) <= relative_error(composed[name], exact[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@each_recipe
def test_low_precision_gradients_are_those_at_the_rounded_y(recipe: Recipe, dtype: torch.dtype) -> None:
    """Every gradient, tensor by tensor, against float64 in which y alone is rounded: nothing else may be."""
    call = make_call("junction", recipe, lead=(33,), channels=21, dtype=dtype).requires_grad()
    outputs = call()
    weights = [torch.randn(o.shape).bfloat16() for o in outputs]
    torch.autograd.backward(outputs, [w.to(o.dtype) for w, o in zip(weights, outputs, strict=True)])

    exact = call.to(torch.Tensor.double).requires_grad()
    t = exact.tensors
    y = mhckit.post(t["x"], t["f"], t["mix_post"], t.get("mix_res"), f_bias=t["f_bias"])
    y = y + (outputs[0].double() - y).detach()
    mix = mhckit.coefficients(
        y, t.get("phi"), t.get("scale"), t["bias"], recipe=recipe, norm_weight=t.get("norm_weight")
    )
    x_in = mhckit.pre(y, t["mix_pre"] if recipe.shifted else mix.pre, out_norm_weight=t["out_norm_weight"])
    exact_outputs = [y, x_in, *(part for part in mix if part is not None)]
    torch.autograd.backward(exact_outputs, [w.double() for w in weights])
    for name, tensor in call.tensors.items():
        if tensor.grad is None:
            assert t[name].grad is None, name
        else:
            precision = torch.finfo(tensor.dtype).eps
            assert relative_error(tensor.grad, t[name].grad) < max(precision, 5e-6), name


@pytest.mark.parametrize("recipe", [RECIPES["deepseek_v4"], RECIPES["deepseek_v41"], RECIPES["hy_v4"]])
def test_autograd_never_adds_gradients_in_a_chain(recipe: Recipe) -> None:
    """enter, junction, ..., leave: every stream tensor has one consumer, so backward runs no addition at all."""
    channels, depth = 7, 4
    x = torch.randn(3, recipe.streams, channels, requires_grad=True)
    layers = [_parameters(recipe, channels, seed, torch.float32) for seed in range(depth)]
    sublayers = [torch.randn(channels, channels, requires_grad=True) for _ in range(depth)]
    streams, h, mix = mhckit.enter(x, **layers[0], recipe=recipe)  # type: ignore[arg-type]
    for layer, weight in zip(layers[1:], sublayers, strict=False):
        streams, h, mix = mhckit.junction(streams, h @ weight, mix, **layer, recipe=recipe)  # type: ignore[arg-type]
    out = mhckit.leave(streams, h @ sublayers[-1], mix, recipe=recipe)

    consumers = Counter(_edges(out.grad_fn))
    shared = [node.name() for (node, _), count in consumers.items() if count > 1]
    assert shared == []

    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Operations() as operations:
        out.backward(torch.randn_like(out))
    assert [name for name in operations.seen if "add" in name] == []
    assert operations.seen.count("junction_bwd.default") == depth - 1
    assert all(p.grad is not None for layer in layers for p in layer.values() if p is not None)


def _edges(root):
    """Every edge of the autograd graph below root: (node, which of its outputs)."""
    seen, stack = {root}, [root]
    while stack:
        for node, index in stack.pop().next_functions:
            if node is None:
                continue
            yield node, index
            if node not in seen:
                seen.add(node)
                stack.append(node)


def test_the_check_for_added_gradients_can_fail() -> None:
    """The same chain started from x itself instead of enter's output: x is then used twice."""
    recipe = RECIPES["paper"]
    x = torch.randn(3, 4, 7, requires_grad=True)
    layer = _parameters(recipe, 7, 0, torch.float32)
    doubled = x * 2
    _, h, mix = mhckit.enter(doubled, **layer, recipe=recipe)  # type: ignore[arg-type]
    out = mhckit.leave(doubled, h, mix, recipe=recipe)
    assert max(Counter(_edges(out.grad_fn)).values()) == 2


def test_enter_hands_the_streams_on_without_a_copy() -> None:
    call = make_call("enter", RECIPES["paper"]).requires_grad()
    assert call()[0].data_ptr() == call.tensors["x"].data_ptr()


def test_float32_streams_around_bfloat16_sublayers() -> None:
    recipe = RECIPES["deepseek_v4"]
    call = make_call("junction", recipe, dtype=torch.float32)
    t = call.requires_grad().tensors
    f = t["f"].detach().bfloat16().requires_grad_()
    mix = Mix(t["mix_pre"], t["mix_post"], t["mix_res"])
    y, x_in, _ = mhckit.junction(
        t["x"], f, mix, t["phi"], t["scale"], t["bias"], recipe=recipe, out_dtype=torch.bfloat16
    )
    assert (y.dtype, x_in.dtype) == (torch.float32, torch.bfloat16)
    x_in.float().sum().backward()
    assert f.grad is not None
    assert f.grad.dtype == torch.bfloat16
    _, x_in, _ = mhckit.enter(y, t["phi"], t["scale"], t["bias"], recipe=recipe, out_dtype=torch.bfloat16)
    assert x_in.dtype == torch.bfloat16


def test_round_mix_rounds_post_and_res_alone() -> None:
    recipe = RECIPES["deepseek_v4"]
    call = make_call("coefficients", recipe, dtype=torch.bfloat16)
    t = call.tensors
    exact = mhckit.coefficients(t["x"], t["phi"], t["scale"], t["bias"], recipe=recipe)
    rounded = mhckit.coefficients(t["x"], t["phi"], t["scale"], t["bias"], recipe=recipe.replace(round_mix=True))
    assert exact.res is not None
    assert rounded.res is not None
    assert torch.equal(rounded.pre, exact.pre)
    assert torch.equal(rounded.post, exact.post.bfloat16().float())
    assert torch.equal(rounded.res, exact.res.bfloat16().float())
    assert not torch.equal(rounded.res, exact.res)


def test_unused_outputs_cost_no_gradient_of_their_own() -> None:
    """Losses on single outputs: autograd hands None for the others, and they count as zero."""
    call = make_call("junction", RECIPES["deepseek_v4"])
    weights = [torch.randn_like(o) for o in call()]
    total = {name: torch.zeros_like(t) for name, t in call.tensors.items()}
    for index, weight in enumerate(weights):
        leaves = call.requires_grad()
        (leaves()[index] * weight).sum().backward()
        for name, tensor in leaves.tensors.items():
            total[name] += 0 if tensor.grad is None else tensor.grad
    leaves = call.requires_grad()
    sum((o * w).sum() for o, w in zip(leaves(), weights, strict=True)).backward()
    for name, tensor in leaves.tensors.items():
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad, total[name], msg=name)
