"""Recipe: presets as published, clear refusals of nonsense, and a lossless trip through an operator schema."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from mhckit import Recipe

# Written out from the systems' own code and papers, not from recipe.py. What a system does not have is not listed.
_SOFTMAX = dict(residual="sinkhorn", init="softmax", order="rows", eps=1e-6, eps_mode="add", iterations=20)
PUBLISHED = {
    "paper": dict(
        residual="sinkhorn", init="exp", order="cols", eps_mode="none", iterations=20, stored="out_in",
        norm_eps=1e-20, norm_eps_position="inside", pre_eps=0, post_scale=2, post_eps=0, head="mean",
    ),
    "deepseek_v4": _SOFTMAX | dict(
        stored="in_out", norm_eps=1e-6, norm_eps_position="inside", pre_eps=1e-6, post_scale=2, post_eps=0,
        shifted=False, head="learned",
    ),
    "deepseek_v41": _SOFTMAX | dict(
        stored="in_out", norm_eps=1e-6, pre_eps=1e-6, post_scale=2, post_eps=0, shifted=True, head="last_pre",
    ),
    "glm5_next": _SOFTMAX | dict(
        stored="in_out", norm_eps=1e-5, pre_eps=1e-6, post_scale=2, post_eps=0, shifted=False, head="mean",
    ),
    "hy_v4": dict(
        residual="identity", norm_eps=1e-5, norm_eps_position="inside", pre_eps=1e-6, post_scale=2, post_eps=1e-6,
        head="learned",
    ),
    "liger": _SOFTMAX | dict(stored="out_in", norm_eps=1e-6, pre_eps=0, post_scale=2, post_eps=0),
    "transformer_engine": dict(
        residual="sinkhorn", init="exp", order="rows", eps_mode="none", iterations=20, stored="in_out",
        norm_eps=1.1920928955078125e-07, norm_eps_position="inside", pre_eps=0, post_scale=2,
    ),
    "megatron": dict(
        residual="sinkhorn", init="exp_minus_max", order="rows", eps=1e-6, eps_mode="clamp", iterations=20,
        stored="out_in", norm_eps=1e-6, norm_eps_position="outside", pre_eps=0, post_scale=2, head="mean",
    ),
    "mhc_cu": dict(
        residual="sinkhorn", init="exp", order="rows", eps=1e-5, eps_mode="guard", iterations=20, stored="out_in",
        norm_eps=1e-5, norm_eps_position="inside", pre_eps=0, post_scale=2,
    ),
    "mhc_triton": dict(
        residual="sinkhorn", init="abs", order="rows", eps=1e-8, eps_mode="add", iterations=20, stored="out_in",
        norm_eps=1e-6, norm_eps_position="inside", normalized_pre=True, normalized_pre_eps=1e-8, post_scale=2,
    ),
    "mhc_lite": dict(
        residual="permutation", stored="out_in", norm_eps=1e-6, norm_eps_position="inside", pre_eps=0, post_scale=2,
        head="mean",
    ),
    "hc": dict(residual="free", stored="out_in", norm_eps=1e-6, norm_eps_position="inside"),
}  # fmt: skip


def test_every_published_system_has_a_preset() -> None:
    assert set(Recipe.presets()) == set(PUBLISHED)


@pytest.mark.parametrize("name", Recipe.presets())
def test_preset_as_published(name: str) -> None:
    recipe = Recipe.preset(name)
    assert {field: getattr(recipe, field) for field in PUBLISHED[name]} == PUBLISHED[name]
    assert recipe.normalized_pre == (name == "mhc_triton")
    assert recipe.shifted == (name == "deepseek_v41")
    assert recipe.dynamic
    assert not recipe.round_mix


@pytest.mark.parametrize("name", Recipe.presets())
def test_preset_round_trips(name: str) -> None:
    recipe = Recipe.preset(name)
    assert recipe.streams == 4
    assert Recipe.from_key(recipe.key) == recipe
    assert Recipe.from_key(recipe.replace(norm_eps=1 / 3).key).norm_eps == 1 / 3
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert pickle.loads(pickle.dumps(recipe)).rows == recipe.rows
    assert copy.deepcopy(recipe).key == recipe.key
    assert hash(recipe) == hash(Recipe.preset(name))
    assert Recipe(**dataclasses.asdict(recipe)) == recipe


def test_sizes() -> None:
    for name, rows, groups in (("paper", 24, (4, 4, 16)), ("mhc_lite", 32, (4, 4, 24)), ("hy_v4", 8, (4, 4))):
        recipe = Recipe.preset(name)
        assert (recipe.rows, recipe.groups) == (rows, groups)
    assert Recipe.preset("mhc_lite", streams=5).rows == 10 + 120
    assert Recipe.preset("paper", streams=1).rows == 3
    assert Recipe(residual="projection").groups == (4, 4, 16)


def test_overrides_and_replace() -> None:
    recipe = Recipe.preset("deepseek_v4", streams=2, iterations=10)
    assert (recipe.streams, recipe.iterations, recipe.init) == (2, 10, "softmax")
    assert recipe.replace(streams=3) == Recipe.preset("deepseek_v4", streams=3, iterations=10)
    assert Recipe.preset("mhc_triton").post_scale == 2
    assert Recipe.preset("mhc_triton", dynamic=False).post_scale == 1
    assert Recipe.preset("mhc_triton", dynamic=False, post_scale=3).post_scale == 3


def test_key_reads_well_and_is_checked() -> None:
    assert Recipe().key == ""
    assert Recipe.preset("hy_v4").key == ("residual=identity norm_eps=1e-05 pre_eps=1e-06 post_eps=1e-06 head=learned")
    projection = Recipe(residual="projection", stored="in_out")
    assert projection.key == "residual=projection stored=in_out" and Recipe.from_key(projection.key) == projection
    with pytest.raises(ValueError, match="a recipe from another version of mhckit: this one has no field 'future'"):
        Recipe.from_key("streams=4 future=1")
    with pytest.raises(ValueError, match="residual='permutation'"):
        Recipe.from_key("residual=permutation streams=7")


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().streams = 2  # type: ignore[misc]


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'deepseek'; known presets: paper, deepseek_v4, deepseek_v41"):
        Recipe.preset("deepseek")


def test_unknown_field_lists_the_known_ones() -> None:
    for build in (lambda: Recipe.preset("paper", iters=3), lambda: Recipe().replace(iters=3)):
        with pytest.raises(TypeError, match=r"Recipe has no field 'iters'; fields: streams, residual, init"):
            build()


NONSENSE = [
    (dict(streams=0), "streams must be at least 1, got 0"),
    (dict(streams=4.0), "streams must be an int, got 4.0"),
    (dict(streams=True), "streams must be an int, got True"),
    (dict(iterations=0), "iterations must be at least 1"),
    (dict(residual="sinkhron"), "residual must be one of 'sinkhorn', 'projection', 'permutation', 'identity'"),
    (dict(head=None), "head must be one of"),
    (dict(shifted=1), "shifted must be a bool, got 1"),
    (dict(norm_eps=0), "norm_eps must be positive and finite"),
    (dict(norm_eps=float("nan")), "norm_eps must be positive and finite"),
    (dict(norm_eps="1e-6"), "norm_eps must be a number, got '1e-6'"),
    (dict(post_scale=-1), "post_scale must be positive"),
    (dict(pre_eps=-1e-6), r"pre_eps must be in \[0, 1\)"),
    (dict(eps=1e-6), "eps=1e-06 and eps_mode='none' contradict each other"),
    (dict(eps_mode="add"), "eps=0.0 and eps_mode='add' contradict each other"),
    (dict(init="softmax", eps=1e-6, eps_mode="add"), "init='softmax' needs order in 'rows', got 'cols'"),
    (dict(init="softmax", order="rows"), "init='softmax' needs eps_mode in 'add', got 'none'"),
    (dict(init="abs"), "init='abs' needs eps_mode in 'add', got 'none'"),
    (dict(init="exp_minus_max", eps=1e-6, eps_mode="add"), "init='exp_minus_max' needs eps_mode in 'clamp', 'guard'"),
    (dict(init="exp_minus_max", eps=1e-6, eps_mode="clamp"), "init='exp_minus_max' needs order in 'rows'"),
    (dict(residual="permutation", streams=6), "allows streams <= 5, got streams=6"),
    (dict(residual="free", pre_eps=1e-6), "residual='free' has no sigmoids"),
    (dict(head="last_pre"), "it needs shifted=True"),
]


@pytest.mark.parametrize(("fields", "message"), NONSENSE, ids=[str(fields) for fields, _ in NONSENSE])
def test_nonsense_raises(fields: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Recipe(**fields)
