"""F2 and B where rows begin anywhere: words at both ends of a row, whole steps or none, every way a row can begin."""

from __future__ import annotations

import itertools

import pytest
import torch
from accuracy import assert_accurate
from recipes import every_recipe

from mhckit.testing import Call, make_call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = every_recipe()
# Beside whole steps of 1024 channels: none, one, all but one word, and what a step has room for.
CHANNELS = (257, 258, 1021, 1022, 1023, 1025, 2051)


@pytest.mark.parametrize(
    ("operator", "channels"), [*itertools.product(["head", "pre"], CHANNELS), ("junction", 257), ("junction", 1022)]
)
def test_every_way_to_begin(operator: str, channels: int) -> None:
    """Nine tokens: each kind of row twice, and the tensor's last one."""
    call = make_call(
        operator, RECIPES["deepseek_v4"], lead=(9,), channels=channels, dtype=torch.bfloat16, device=DEVICE
    )
    assert_accurate(Call(operator, call.recipe, {k: t for k, t in call.tensors.items() if k != "out_norm_weight"}))


@pytest.mark.parametrize("streams", [1, 2, 3, 5, 8])
def test_numbers_of_streams(streams: int) -> None:
    recipe = RECIPES["deepseek_v4"].replace(streams=streams)
    assert_accurate(make_call("pre", recipe, lead=(6,), channels=259, dtype=torch.float16, device=DEVICE))


def test_with_a_norm() -> None:
    """B alone: F2 adds up squares there, in the order of the channels."""
    call = make_call("junction", RECIPES["deepseek_v4"], lead=(6,), channels=259, dtype=torch.bfloat16, device=DEVICE)
    assert_accurate(call)
