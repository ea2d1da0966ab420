"""F2 and B where rows begin anywhere: words at both ends of a row, whole steps or none, every way a row can begin."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from accuracy import assert_accurate
from recipes import every_recipe

from mhckit.kernels._row_words import store_words
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


@triton.jit
def _store_ones(x, token, C: tl.constexpr, TURN: tl.constexpr, WORDS: tl.constexpr):
    ones = tl.zeros((1, WORDS), tl.float32) + 1.0
    store_words(x, token, tl.arange(0, WORDS)[None, :], (ones, ones, ones, ones), TURN * C % 4, C, False)


@pytest.mark.parametrize("channels", [5, 6, 7])
@pytest.mark.parametrize("token", range(4))
def test_other_rows_stay_as_they_are(token: int, channels: int) -> None:
    """Of words that hold the ends of two rows, each program stores its own part."""
    x = torch.zeros(5, channels, dtype=torch.bfloat16, device=DEVICE)
    _store_ones[(1,)](x, token, channels, token, 4)
    assert (x[token] == 1).all() and x.sum() == channels
