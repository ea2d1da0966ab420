"""Every wrong argument gets an error that names the tensor, its axes, what was wanted and what came."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import mhckit
from mhckit import Mix, Recipe
from mhckit.testing import OPERATORS, make_call

PAPER = Recipe.preset("paper")
LEARNED = Recipe.preset("deepseek_v4")
SHIFTED = Recipe.preset("deepseek_v41")
IDENTITY = Recipe.preset("hy_v4")
PROJECTION = Recipe(residual="projection")
STATIC = Recipe.preset("paper", dynamic=False)


def _call(operator: str, recipe: Recipe = PAPER, **replaced: Any) -> Any:
    """After a call that is right, which later ones like it are not checked again for."""
    call = make_call(operator, recipe, lead=(2, 3), channels=5, dtype=torch.float32)
    call()
    return call(**{name: change(call.tensors[name]) for name, change in replaced.items()})


def _shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :-1]


WRONG_SHAPES = [
    ("project", "phi", PAPER, "phi must be [P, N*C] with P >= 1 and N*C = 20, got (24, 19)"),
    ("project", "norm_weight", PAPER, "norm_weight must be [N*C] = (20,), got (19,)"),
    ("activate", "z", PAPER, "z must be [..., P] = (2, 3, 24), got (2, 3, 23)"),
    ("activate", "mean_square", PAPER, "mean_square must be [...] = (2, 3), got (2, 2)"),
    ("activate", "scale", PAPER, "scale must be [groups] = (3,), got (2,)"),
    ("activate", "bias", PAPER, "bias must be [P] = (24,), got (23,)"),
    ("sinkhorn", "logits", PAPER, "logits must be [..., N, N] = (2, 3, 4, 4), got (2, 3, 4, 3)"),
    ("sinkhorn", "logits", PROJECTION, "logits must be [..., N, N] = (2, 3, 4, 4), got (2, 3, 4, 3)"),
    ("sinkhorn", "logits", Recipe.preset("mhc_lite"), "logits must be [..., N!] = (2, 3, 24), got (2, 3, 23)"),
    ("coefficients", "phi", PAPER, "phi must be [P, N*C] = (24, 20), got (24, 19)"),
    ("coefficients", "phi", IDENTITY, "phi must be [P, N*C] = (8, 20), got (8, 19)"),
    ("coefficients", "scale", IDENTITY, "scale must be [groups] = (2,), got (1,)"),
    ("pre", "pre", PAPER, "pre must be [..., N] = (2, 3, 4), got (2, 3, 3)"),
    ("pre", "out_norm_weight", PAPER, "out_norm_weight must be [C] = (5,), got (4,)"),
    ("post", "f", PAPER, "f must be [..., C] = (2, 3, 5), got (2, 3, 4)"),
    ("post", "post", PAPER, "post must be [..., N] = (2, 3, 4), got (2, 3, 3)"),
    ("post", "res", PAPER, "res must be [..., N_out, N_in] = (2, 3, 4, 4), got (2, 3, 4, 3)"),
    ("post", "f_bias", PAPER, "f_bias must be [C] = (5,), got (4,)"),
    ("head", "fn", LEARNED, "fn must be [N, N*C] = (4, 20), got (4, 19)"),
    ("head", "base", LEARNED, "base must be [N] = (4,), got (3,)"),
    ("head", "pre", SHIFTED, "pre must be [..., N] = (2, 3, 4), got (2, 3, 3)"),
    ("enter", "bias", PAPER, "bias must be [P] = (24,), got (23,)"),
    ("enter", "out_norm_weight", PAPER, "out_norm_weight must be [C] = (5,), got (4,)"),
    ("junction", "f", PAPER, "f must be [..., C] = (2, 3, 5), got (2, 3, 4)"),
    ("junction", "mix_pre", PAPER, "mix.pre must be [..., N] = (2, 3, 4), got (2, 3, 3)"),
    ("junction", "mix_post", PAPER, "mix.post must be [..., N] = (2, 3, 4), got (2, 3, 3)"),
    ("junction", "mix_res", PAPER, "mix.res must be [..., N_out, N_in] = (2, 3, 4, 4), got (2, 3, 4, 3)"),
    ("junction", "f_bias", PAPER, "f_bias must be [C] = (5,), got (4,)"),
    ("leave", "mix_res", PAPER, "mix.res must be [..., N_out, N_in] = (2, 3, 4, 4), got (2, 3, 4, 3)"),
]


@pytest.mark.parametrize(("operator", "name", "recipe", "message"), WRONG_SHAPES, ids=[w[3][:40] for w in WRONG_SHAPES])
def test_wrong_shape(operator: str, name: str, recipe: Recipe, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _call(operator, recipe, **{name: _shorter})


def test_streams_that_do_not_fit_the_recipe() -> None:
    call = make_call("enter", Recipe(streams=3))
    with pytest.raises(ValueError, match=re.escape("N = 4 (recipe.streams), got N = 3 in (2, 3, 3, 5)")):
        mhckit.enter(call.tensors["x"], call.tensors["phi"], call.tensors["scale"], call.tensors["bias"], recipe=PAPER)
    with pytest.raises(ValueError, match=re.escape("x must be [..., N, C] with at least 2 axes, got (5,)")):
        mhckit.pre(torch.randn(5), torch.randn(4))
    with pytest.raises(ValueError, match=re.escape("N >= 1 and C >= 1, got (2, 4, 0)")):
        mhckit.pre(torch.randn(2, 4, 0), torch.randn(2, 4))


EVERY_TENSOR = [(operator, name) for operator, names in OPERATORS.items() for name in names]


def _recipe_with(operator: str, name: str) -> Recipe:
    return SHIFTED if (operator, name) == ("head", "pre") else LEARNED


@pytest.mark.parametrize(("operator", "name"), EVERY_TENSOR, ids=[f"{o}-{n}" for o, n in EVERY_TENSOR])
def test_wrong_dtype(operator: str, name: str) -> None:
    """Integers, and complex tensors, which may require gradients but are no streams."""
    shown = name.replace("mix_", "mix.")
    for dtype in (torch.int64, torch.complex64, torch.float8_e4m3fn):
        wanted = f"{shown} must be a float tensor .*(bfloat16, float16, float32, float64), got {str(dtype)[6:]}"
        with pytest.raises(TypeError, match=re.escape(wanted).replace(r"\.\*", r"\[.*\] ")):
            _call(operator, _recipe_with(operator, name), **{name: lambda t, dtype=dtype: t.to(dtype)})


@pytest.mark.parametrize(("operator", "name"), EVERY_TENSOR, ids=[f"{o}-{n}" for o, n in EVERY_TENSOR])
def test_wrong_device(operator: str, name: str) -> None:
    if len(OPERATORS[operator]) == 1:
        assert _call(operator, LEARNED, **{name: lambda t: t.to("meta")})[0].is_meta
        return
    with pytest.raises(ValueError, match=r"must be on the device of the other tensors, (cpu|meta), got (cpu|meta)"):
        _call(operator, _recipe_with(operator, name), **{name: lambda t: t.to("meta")})


@pytest.mark.parametrize(("operator", "name"), EVERY_TENSOR, ids=[f"{o}-{n}" for o, n in EVERY_TENSOR])
def test_not_a_tensor(operator: str, name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name.replace('mix_', 'mix.')} must be a torch.Tensor \[.*\], got list"):
        _call(operator, _recipe_with(operator, name), **{name: lambda t: [1.0]})


class TestRecipeMismatch:
    tensors = make_call("enter", PAPER).tensors

    def test_dynamic_without_phi(self) -> None:
        t = self.tensors
        with pytest.raises(ValueError, match=r"phi must be a tensor \[P, N\*C\]: the recipe is dynamic"):
            mhckit.enter(t["x"], None, t["scale"], t["bias"], recipe=PAPER)
        with pytest.raises(ValueError, match=r"scale must be a tensor \[groups\]: the recipe is dynamic"):
            mhckit.enter(t["x"], t["phi"], None, t["bias"], recipe=PAPER)

    def test_static_with_phi(self) -> None:
        t = self.tensors
        with pytest.raises(ValueError, match=r"scale must be None: the recipe is static"):
            mhckit.enter(t["x"], t["phi"], t["scale"], t["bias"], recipe=STATIC)
        with pytest.raises(ValueError, match=r"phi must be None: the recipe is static"):
            mhckit.enter(t["x"], t["phi"], None, t["bias"], recipe=STATIC)
        with pytest.raises(ValueError, match=r"norm_weight must be None: the recipe is static"):
            mhckit.enter(t["x"], None, None, t["bias"], recipe=STATIC, norm_weight=t["norm_weight"])

    def test_static_activate_with_z(self) -> None:
        with pytest.raises(ValueError, match=r"z and mean_square must be None: the recipe is static"):
            mhckit.activate(torch.randn(2, 24), torch.rand(2), None, torch.randn(24), recipe=STATIC)

    def test_mix_with_and_without_res(self) -> None:
        x, f, weights = torch.randn(2, 4, 5), torch.randn(2, 5), torch.randn(2, 4)
        with pytest.raises(TypeError, match=r"mix.res must be a torch.Tensor \[..., N_out, N_in\], got NoneType"):
            mhckit.leave(x, f, Mix(weights, weights, None), recipe=PAPER)
        with pytest.raises(ValueError, match=r"mix.res must be None: the recipe has residual='identity'"):
            mhckit.leave(x, f, Mix(weights, weights, torch.randn(2, 4, 4)), recipe=IDENTITY)
        with pytest.raises(TypeError, match=r"mix must be a mhckit.Mix\(pre, post, res\), got Tensor"):
            mhckit.leave(x, f, weights, recipe=PAPER)  # type: ignore[arg-type]

    def test_head_arguments_of_another_head(self) -> None:
        x = torch.randn(2, 4, 5)
        with pytest.raises(ValueError, match=r"pre must be None: it belongs to head='last_pre'.*head='mean'"):
            mhckit.head(x, recipe=PAPER, pre=torch.randn(2, 4))
        with pytest.raises(TypeError, match=r"fn must be a torch.Tensor \[N, N\*C\], got NoneType"):
            mhckit.head(x, recipe=LEARNED)

    def test_not_a_recipe(self) -> None:
        with pytest.raises(TypeError, match=r"recipe must be a mhckit.Recipe.*got str"):
            mhckit.head(torch.randn(2, 4, 5), recipe="paper")  # type: ignore[arg-type]


def test_expand_arguments() -> None:
    with pytest.raises(ValueError, match="streams must be at least 1, got 0"):
        mhckit.expand(torch.randn(2, 5), 0)
    with pytest.raises(TypeError, match=r"streams must be an int, got 2\.0"):
        mhckit.expand(torch.randn(2, 5), 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape("h must be [..., C] with C >= 1, got ()")):
        mhckit.expand(torch.tensor(1.0), 2)


def test_out_dtype() -> None:
    with pytest.raises(TypeError, match="out_dtype must be one of bfloat16, float16, float32, float64, got int32"):
        mhckit.pre(torch.randn(2, 4, 5), torch.randn(2, 4), out_dtype=torch.int32)


def test_sparse_tensors() -> None:
    with pytest.raises(TypeError, match=re.escape("x must be a dense tensor [..., N, C], got layout sparse_coo")):
        mhckit.pre(torch.randn(2, 4, 5).to_sparse(), torch.randn(2, 4))


@pytest.mark.parametrize("operator", ["pre", "enter", "junction"])
def test_out_norm_eps(operator: str) -> None:
    tensors = make_call(operator, PAPER).tensors
    mix = Mix(*(tensors.get(f"mix_{name}") for name in ("pre", "post", "res")))  # type: ignore[arg-type]
    arguments = {
        "pre": lambda: (tensors["x"], tensors["pre"]),
        "enter": lambda: (tensors["x"], tensors["phi"], tensors["scale"], tensors["bias"]),
        "junction": lambda: (tensors["x"], tensors["f"], mix, tensors["phi"], tensors["scale"], tensors["bias"]),
    }[operator]()
    recipe = {} if operator == "pre" else {"recipe": PAPER}
    for wrong, error in ((None, TypeError), ("1e-6", TypeError), (-1.0, ValueError), (float("nan"), ValueError)):
        with pytest.raises(error, match="out_norm_eps must be"):
            getattr(mhckit, operator)(*arguments, out_norm_eps=wrong, **recipe)
