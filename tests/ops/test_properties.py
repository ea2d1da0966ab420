"""Hypothesis over operators, recipes, shapes, strides and dtypes: no combination may be special."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from mhckit import Recipe
from mhckit.recipe import _INIT_RULES
from mhckit.testing import OPERATORS, Call, make_call

pytest.importorskip("hypothesis", reason="hypothesis is not installed")
import hypothesis.strategies as st
from hypothesis import given


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any valid recipe, presets or not."""
    init = draw(st.sampled_from(list(_INIT_RULES)))
    eps_modes, orders, _ = _INIT_RULES[init]
    eps_mode = draw(st.sampled_from(eps_modes))
    residual = draw(st.sampled_from(["sinkhorn", "projection", "permutation", "identity", "free"]))
    shifted = draw(st.booleans())
    sigmoids = residual != "free"
    return Recipe(
        streams=draw(st.integers(1, 4 if residual == "permutation" else 8)),
        residual=residual,
        init=init,
        order=draw(st.sampled_from(orders)),
        iterations=draw(st.integers(1, 6)),
        eps_mode=eps_mode,
        eps=0.0 if eps_mode == "none" else draw(st.sampled_from([1e-8, 1e-6, 1e-2])),
        stored=draw(st.sampled_from(["out_in", "in_out"])),
        norm_eps=draw(st.sampled_from([1e-20, 1e-6, 1e-1])),
        norm_eps_position=draw(st.sampled_from(["inside", "outside"])),
        pre_eps=draw(st.sampled_from([0.0, 1e-6])) if sigmoids else 0.0,
        normalized_pre=draw(st.booleans()) if sigmoids else False,
        post_scale=draw(st.sampled_from([1.0, 2.0])),
        post_eps=draw(st.sampled_from([0.0, 1e-6])) if sigmoids else 0.0,
        shifted=shifted,
        head=draw(st.sampled_from(["mean", "learned", *(["last_pre"] if shifted else [])])),
        dynamic=draw(st.booleans()),
    )


@st.composite
def calls(draw: st.DrawFn, lead: tuple[int, ...] | None = None) -> Call:
    recipe = draw(recipes())
    operator = draw(st.sampled_from(list(OPERATORS)))
    if operator == "sinkhorn" and recipe.residual == "identity":
        operator = "coefficients"
    return make_call(
        operator,
        recipe,
        lead=tuple(draw(st.lists(st.integers(0, 3), max_size=3))) if lead is None else lead,
        channels=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])),
        seed=draw(st.integers(0, 2**16)),
        optional=draw(st.booleans()),
    )


def _restride(tensor: Tensor, kind: str) -> Tensor:
    """The same values in another layout."""
    if kind == "offset":
        return torch.cat([tensor.new_full((3,), math.nan), tensor.flatten()])[3:].view(tensor.shape)
    if kind == "sliced":
        return torch.stack([tensor, tensor.new_full(tensor.shape, math.nan)], -1)[..., 0]
    if kind == "permuted":
        dims = list(range(tensor.ndim))
        return tensor.permute(dims[::-1]).contiguous().permute(dims[::-1])
    return tensor


def _run(call: Call) -> tuple[tuple[Tensor, ...], dict[str, Tensor | None]]:
    leaves = call.requires_grad()
    outputs = leaves()
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    torch.autograd.backward(outputs, weights)
    return outputs, {name: tensor.grad for name, tensor in leaves.tensors.items()}


@given(calls(), st.sampled_from(["offset", "sliced", "permuted"]))
def test_layout_does_not_matter(call: Call, kind: str) -> None:
    """But for rounding: a CPU's matrix products may add in another order where memory is aligned otherwise."""
    restrided = call.to(lambda tensor: _restride(tensor, kind))
    for got, want in zip(restrided(), call(), strict=True):
        assert got.is_contiguous()
        precision = _precision(call, got)
        torch.testing.assert_close(got, want, rtol=4 * precision, atol=4 * precision * _size(want))


@given(calls())
def test_finite_and_close_to_float64(call: Call) -> None:
    """Any dtype against float64 on the same values; bounds by the dtype's own precision."""
    outputs, gradients = _run(call)
    exact_outputs, exact_gradients = _run(call.to(torch.Tensor.double))
    for got, want in zip(outputs, exact_outputs, strict=True):
        assert got.isfinite().all()
        precision = _precision(call, got)
        torch.testing.assert_close(got.double(), want, rtol=40 * precision, atol=40 * precision * _size(want))
    for name, got in gradients.items():
        want = exact_gradients[name]
        assert (got is None) == (want is None), name
        if got is not None and want is not None:
            assert got.dtype == call.tensors[name].dtype
            difference = _size(got.double() - want)
            assert difference <= 100 * _lowest_precision(call) * max(
                _size(g) for g in exact_gradients.values() if g is not None
            ), name


def _precision(call: Call, output: Tensor) -> float:
    """y of a junction is rounded before it is read again: its dtype bounds everything computed from it."""
    return _lowest_precision(call) if call.operator == "junction" else torch.finfo(output.dtype).eps


def _lowest_precision(call: Call) -> float:
    return max(torch.finfo(tensor.dtype).eps for tensor in call.tensors.values())


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


@given(calls(lead=(3, 2)), st.integers(0, 2))
def test_tokens_do_not_see_each_other(call: Call, token: int) -> None:
    """NaN in one token stays in that token."""
    name = next(iter(call.tensors))  # x, h, z or logits: the tensor that has tokens
    if name == "bias":
        return  # a static activate has no tokens
    poisoned = call.tensors[name].clone()
    poisoned[token] = math.nan
    others = torch.arange(3) != token
    for got, want in zip(call(**{name: poisoned}), call(), strict=True):
        torch.testing.assert_close(got[others], want[others], rtol=1e-6, atol=1e-7)


@given(recipes())
def test_any_recipe_survives_its_own_description(recipe: Recipe) -> None:
    assert Recipe(**dataclasses.asdict(recipe)) == recipe
    assert Recipe.from_key(recipe.key) == recipe
    assert recipe.rows == sum(recipe.groups)
