"""Every operator, token by token, against the same math written out plainly (plain.py)."""

from __future__ import annotations

import numpy as np
import plain
import pytest
import torch
from recipes import every_recipe
from torch import Tensor

import mhckit
from mhckit import Recipe
from mhckit.testing import make_call

RECIPES = every_recipe()
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
each_dynamic_recipe = pytest.mark.parametrize(
    "recipe", [r for r in RECIPES.values() if r.dynamic], ids=[k for k, r in RECIPES.items() if r.dynamic]
)
LEAD, CHANNELS = (2, 2), 3
TOKENS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def _arrays(call) -> dict:
    return {name: tensor.numpy() for name, tensor in call.tensors.items()}


def _assert_equal(got: Tensor, want) -> None:
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-10, atol=1e-12)


def _plain_mix(x, a: dict, recipe: Recipe):
    if not recipe.dynamic:
        return plain.mix(a["bias"], recipe)
    return plain.mix(plain.logits(x, a["phi"], a["scale"], a["bias"], recipe, a["norm_weight"]), recipe)


def _assert_mix(got: mhckit.Mix, token: tuple[int, int], want) -> None:
    pre, post, res = want
    _assert_equal(got.pre[token], pre)
    _assert_equal(got.post[token], post)
    if res is None:
        assert got.res is None
    else:
        assert got.res is not None
        _assert_equal(got.res[token], res)


def test_project() -> None:
    call = make_call("project", Recipe(), lead=LEAD, channels=CHANNELS)
    z, mean_square = call()
    a = _arrays(call)
    for token in TOKENS:
        flat = a["x"][token].reshape(-1)
        _assert_equal(z[token], [np.sum(flat * row * a["norm_weight"]) for row in a["phi"]])
        _assert_equal(mean_square[token], np.mean(flat**2))


@each_dynamic_recipe
def test_coefficients_are_the_three_steps(recipe: Recipe) -> None:
    call = make_call("coefficients", recipe, lead=LEAD, channels=CHANNELS)
    t = call.tensors
    z, mean_square = mhckit.project(t["x"], t["phi"], norm_weight=t["norm_weight"])
    pre, post, logits = mhckit.activate(z, mean_square, t["scale"], t["bias"], recipe=recipe)
    res = mhckit.sinkhorn(logits, recipe=recipe)
    for got, want in zip(call(), (t for t in (pre, post, res) if t is not None), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@each_recipe
def test_coefficients(recipe: Recipe) -> None:
    call = make_call("coefficients", recipe, lead=LEAD, channels=CHANNELS)
    t, a = call.tensors, _arrays(call)
    got = mhckit.coefficients(
        t["x"], t.get("phi"), t.get("scale"), t["bias"], recipe=recipe, norm_weight=t.get("norm_weight")
    )
    for token in TOKENS:
        _assert_mix(got, token, _plain_mix(a["x"][token], a, recipe))


def test_pre() -> None:
    call = make_call("pre", Recipe(), lead=LEAD, channels=CHANNELS)
    a = _arrays(call)
    normed = call()[0]
    bare = mhckit.pre(call.tensors["x"], call.tensors["pre"])
    for token in TOKENS:
        _assert_equal(bare[token], plain.collapse(a["x"][token], a["pre"][token]))
        _assert_equal(normed[token], plain.collapse(a["x"][token], a["pre"][token], a["out_norm_weight"], 1e-6))


@pytest.mark.parametrize("mixed", [True, False])
def test_post(mixed: bool) -> None:
    call = make_call("post", Recipe(), lead=LEAD, channels=CHANNELS)
    a, t = _arrays(call), call.tensors
    got = mhckit.post(t["x"], t["f"], t["post"], t["res"] if mixed else None, f_bias=t["f_bias"])
    for token in TOKENS:
        matrix = a["res"][token] if mixed else None
        _assert_equal(
            got[token], plain.write_back(a["x"][token], a["f"][token] + a["f_bias"], a["post"][token], matrix)
        )


def test_expand() -> None:
    call = make_call("expand", Recipe(streams=3), lead=LEAD, channels=CHANNELS)
    (x,) = call()
    assert x.shape == (*LEAD, 3, CHANNELS)
    for stream in range(3):
        assert torch.equal(x[..., stream, :], call.tensors["h"])
    assert x.data_ptr() != call.tensors["h"].data_ptr()


@each_dynamic_recipe
def test_head(recipe: Recipe) -> None:
    call = make_call("head", recipe, lead=LEAD, channels=CHANNELS)
    a = _arrays(call)
    (h,) = call()
    n = recipe.streams
    for token in TOKENS:
        x = a["x"][token]
        if recipe.head == "mean":
            weights = np.full(n, 1 / n)
        elif recipe.head == "last_pre":
            weights = a["pre"][token]
        else:
            flat = x.reshape(-1)
            r = 1 / np.sqrt(np.mean(flat**2) + recipe.norm_eps)
            weights = plain.sigmoid(a["fn"] @ flat * r * a["scale"][0] + a["base"]) + recipe.pre_eps
        _assert_equal(h[token], plain.collapse(x, weights))


@each_recipe
def test_enter(recipe: Recipe) -> None:
    call = make_call("enter", recipe, lead=LEAD, channels=CHANNELS)
    a, t = _arrays(call), call.tensors
    x, x_in, *mix = call()
    assert torch.equal(x, t["x"])
    for token in TOKENS:
        want = _plain_mix(a["x"][token], a, recipe)
        _assert_mix(mhckit.Mix(*mix) if len(mix) == 3 else mhckit.Mix(*mix, None), token, want)
        weights = np.eye(recipe.streams)[0] if recipe.shifted else want[0]
        _assert_equal(x_in[token], plain.collapse(a["x"][token], weights, a["out_norm_weight"], 1e-6))


@each_recipe
def test_junction(recipe: Recipe) -> None:
    call = make_call("junction", recipe, lead=LEAD, channels=CHANNELS)
    a = _arrays(call)
    y, x_in, *mix = call()
    for token in TOKENS:
        matrix = a["mix_res"][token] if "mix_res" in a else None
        written = plain.write_back(a["x"][token], a["f"][token] + a["f_bias"], a["mix_post"][token], matrix)
        _assert_equal(y[token], written)
        want = _plain_mix(written, a, recipe)
        _assert_mix(mhckit.Mix(*mix) if len(mix) == 3 else mhckit.Mix(*mix, None), token, want)
        weights = a["mix_pre"][token] if recipe.shifted else want[0]
        _assert_equal(x_in[token], plain.collapse(written, weights, a["out_norm_weight"], 1e-6))


@each_dynamic_recipe
def test_leave(recipe: Recipe) -> None:
    call = make_call("leave", recipe, lead=LEAD, channels=CHANNELS)
    a = _arrays(call)
    (y,) = call()
    for token in TOKENS:
        matrix = a["mix_res"][token] if "mix_res" in a else None
        f = a["f"][token] + a["f_bias"]
        _assert_equal(y[token], plain.write_back(a["x"][token], f, a["mix_post"][token], matrix))
