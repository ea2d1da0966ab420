"""Every kernel, forward and backward, against the reference in float64: every recipe, width, dtype and odd size."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from accuracy import assert_accurate
from recipes import every_recipe

from mhckit import Recipe
from mhckit.kernels import _launch, _math
from mhckit.recipe import MAX_PERMUTATION_STREAMS
from mhckit.testing import OPERATORS, Call, make_call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = every_recipe()


def _call(operator: str, recipe: Recipe, **options) -> Call:
    return make_call(operator, recipe, device=DEVICE, **options)


def _applies(operator: str, recipe: Recipe) -> bool:
    """Whether the recipe means something to the operator that another does not cover."""
    if operator in ("project", "pre", "post", "expand", "leave"):
        return recipe == RECIPES["paper"] or (operator == "leave" and recipe == RECIPES["hy_v4"])
    if operator == "sinkhorn":
        return recipe.residual != "identity" and recipe.dynamic
    if operator in ("enter", "coefficients"):  # junction has their code
        return recipe in (RECIPES["deepseek_v4"], RECIPES["deepseek_v41"], RECIPES["paper-static"])
    if operator == "head":
        return recipe in (RECIPES["deepseek_v4"], RECIPES["deepseek_v41"], RECIPES["paper"], RECIPES["mhc_triton"])
    return True


CASES = [(operator, name) for operator in OPERATORS for name, recipe in RECIPES.items() if _applies(operator, recipe)]


@pytest.mark.parametrize(("operator", "name"), CASES, ids=[f"{o}-{n}" for o, n in CASES])
def test_every_recipe(operator: str, name: str) -> None:
    """In bfloat16, with tokens and channels that divide no tile."""
    assert_accurate(_call(operator, RECIPES[name], lead=(19,), channels=37, dtype=torch.bfloat16))


WIDE = [
    (operator, streams)
    for operator in OPERATORS
    for streams in range(1, 9)
    # post and junction have the code of these, but for the streams' gradient beside a norm and no write-back
    if not (operator in ("leave", "coefficients") or (operator == "enter" and streams not in (2, 8)))
    and not (DEVICE == "cuda" and operator == "enter")
    and not (DEVICE == "cuda" and operator == "junction" and streams in (6, 7))  # compiled for minutes
]


@pytest.mark.parametrize(("operator", "streams"), WIDE)
def test_every_number_of_streams(operator: str, streams: int) -> None:
    recipe = RECIPES["deepseek_v4"].replace(streams=streams)
    assert_accurate(_call(operator, recipe, lead=(5,), channels=37, dtype=torch.bfloat16, seed=streams))


@pytest.mark.parametrize("streams", range(1, MAX_PERMUTATION_STREAMS + 1))
def test_permutations_of_every_number_of_streams(streams: int) -> None:
    assert_accurate(_call("sinkhorn", Recipe.preset("mhc_lite", streams=streams), lead=(5,), dtype=torch.float32))
    assert_accurate(
        _call("coefficients", Recipe.preset("mhc_lite", streams=streams), lead=(3,), channels=5, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("operator", OPERATORS)
def test_float32(operator: str) -> None:
    call = _call(operator, RECIPES["deepseek_v4"], lead=(17,), channels=37, dtype=torch.float32)
    assert_accurate(call, relative=1e-5)


@pytest.mark.parametrize("operator", OPERATORS)
def test_float16(operator: str) -> None:
    assert_accurate(_call(operator, RECIPES["paper"], lead=(17,), channels=37, dtype=torch.float16))


@pytest.mark.parametrize("operator", ["project", "coefficients", "pre", "post", "head", "enter", "junction"])
def test_without_optional_arguments(operator: str) -> None:
    assert_accurate(
        _call(operator, RECIPES["deepseek_v4"], lead=(9,), channels=37, dtype=torch.bfloat16, optional=False)
    )


@pytest.mark.parametrize(("operator", "channels"), [("junction", 200), ("junction", 137), ("enter", 200)])
def test_a_norm_without_a_bias_over_several_steps(operator: str, channels: int) -> None:
    """The norm's weight is loaded a step ahead there, in tiles of one piece or two, the last one not full."""
    call = _call(operator, RECIPES["deepseek_v4"], lead=(19,), channels=channels, dtype=torch.bfloat16)
    tensors = {name: tensor for name, tensor in call.tensors.items() if name != "f_bias"}
    assert_accurate(Call(operator, call.recipe, tensors))


@pytest.mark.parametrize("operator", ["post", "junction", "leave"])
def test_float32_streams_with_a_bfloat16_sublayer(operator: str) -> None:
    call = _call(operator, RECIPES["deepseek_v4"], lead=(9,), channels=37, dtype=torch.float32)
    assert_accurate(dataclasses.replace(call, tensors=call.tensors | {"f": call.tensors["f"].bfloat16()}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_in_any_dtype(dtype: torch.dtype) -> None:
    call = _call("junction", RECIPES["deepseek_v4"], lead=(9,), channels=37, dtype=torch.bfloat16)
    activations = ("x", "f", "mix_pre", "mix_post", "mix_res")
    tensors = {name: t if name in activations else t.to(dtype) for name, t in call.tensors.items()}
    assert_accurate(dataclasses.replace(call, tensors=tensors))


@pytest.mark.parametrize("operator", [operator for operator in OPERATORS if operator not in ("activate", "sinkhorn")])
def test_several_slices_of_channels_and_programs(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one slice of the projection and of J's sums, and more than one program along every axis.

    Interpreted, also more than one chunk of tokens; on a GPU test_large.py has those.
    """
    channels = 5128
    if DEVICE == "cpu":  # interpreted, narrow slices show the same in a tenth of the time
        monkeypatch.setattr(_launch, "SLICE_WIDTH", 64)
        monkeypatch.setattr(_launch, "TOKEN_CHUNK", 16)
        channels = 170
    assert channels >= 2 * _launch.SLICE_WIDTH
    tokens = 67 if operator == "project" else 35
    assert_accurate(_call(operator, RECIPES["deepseek_v4"], lead=(tokens,), channels=channels, dtype=torch.bfloat16))


@pytest.mark.parametrize(("channels", "chunk", "short", "norm"), [
    (40, 16, 32, False),
    (40, 1000, 64, False),
    (33, 16, 32, False),  # every second token
    (33, 1000, 64, False),
    (40, 16, 32, True),
    (33, 16, 32, True),
])  # fmt: skip
def test_chunks_of_tokens_and_short_sums(
    channels: int, chunk: int, short: int, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted, P has five tiles of tokens here, or three of every second one: in more chunks than that, or in one,
    with a short sum for each tile or for two, and one that is left. On a GPU tiles are twice as long where C is 40,
    and there are three.
    """
    monkeypatch.setattr(_launch, "TOKEN_CHUNK", chunk)
    monkeypatch.setattr(_launch, "SHORT_SUM", short)
    call = _call("junction", RECIPES["deepseek_v4"], lead=(140,), channels=channels, dtype=torch.bfloat16)
    left_out = () if norm else ("norm_weight", "out_norm_weight")
    assert_accurate(dataclasses.replace(call, tensors={n: t for n, t in call.tensors.items() if n not in left_out}))


@pytest.mark.parametrize("rows", [1, 24, 300])
def test_project_any_number_of_rows(rows: int) -> None:
    call = _call("project", RECIPES["paper"], lead=(5,), channels=37, dtype=torch.bfloat16)
    phi = torch.randn(rows, 148, generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    assert_accurate(dataclasses.replace(call, tensors=call.tensors | {"phi": phi}))


@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.residual == "sinkhorn" and r.dynamic])
@pytest.mark.parametrize("size", [0.0, 300.0, 3e4])
def test_sinkhorn_of_large_and_zero_logits(name: str, size: float) -> None:
    recipe = RECIPES[name]
    call = _call("sinkhorn", recipe, lead=(33,), dtype=torch.float32)
    logits = call.tensors["logits"] * size
    if recipe.init != "exp":  # not where eps cannot help: linear starts of one-sided logits
        logits = logits.clamp(-1e4, 1e4)
    assert_accurate(dataclasses.replace(call, tensors={"logits": logits}))


@pytest.mark.parametrize("name", ["paper", "deepseek_v4", "mhc_triton"])
def test_a_segment_that_reaches_beyond_the_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far from convergence, where a step too many shows."""
    monkeypatch.setattr(_math, "SEGMENT_ITERATIONS", 2)
    _math.math_of.cache_clear()
    try:
        recipe = RECIPES[name].replace(iterations=4 if name == "deepseek_v4" else 3)
        assert_accurate(_call("sinkhorn", recipe, lead=(7,), dtype=torch.float32))
    finally:
        _math.math_of.cache_clear()


@pytest.mark.parametrize("iterations", [1, 2, 3, 37, 50])
@pytest.mark.parametrize("name", ["paper", "deepseek_v4", "mhc_triton"])
def test_any_number_of_iterations(name: str, iterations: int) -> None:
    """Short ones in one segment; longer ones in several, the last of which may reach beyond the end."""
    recipe = RECIPES[name].replace(iterations=iterations, streams=3)
    assert_accurate(_call("sinkhorn", recipe, lead=(7,), dtype=torch.float32))
