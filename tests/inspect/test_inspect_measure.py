"""Composites, gains, shares and depths of matrices that are written down here, by arithmetic on paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mhckit import Recipe
from mhckit.inspect.measure import mixing_depth, sublayers
from mhckit.inspect.observe import Observed

RECIPE = Recipe.preset("paper", streams=2)
# Neither symmetric nor commuting; rows and columns sum to something else than 1.
FIRST = [[0.5, 0.25], [1.0, 0.5]]
SECOND = [[0.0, 2.0], [0.25, 1.0]]
SECOND_FIRST = [[2.0, 1.0], [1.125, 0.5625]]  # SECOND @ FIRST
IDENTITY = [[1.0, 0.0], [0.0, 1.0]]


def _observed(res: Any, name: str = "", recipe: Recipe = RECIPE, **changes: Any) -> Observed:
    """Of tokens with these matrices; everything else is 1, or as it is given."""
    matrices = torch.tensor(res, dtype=torch.float64)
    ones = torch.ones(matrices.shape[:2], dtype=torch.float64)
    numbers = dict.fromkeys(("row_error_max", "column_error_max", "identity_distance", "uniform_distance"), 0.5)
    fields: dict[str, Any] = {
        "pre": ones, "post": ones, "norms": ones, "numbers": numbers, "errors": [], "similarity": 0.5, "nonfinite": 0,
    }  # fmt: skip
    return Observed(name=name, recipe=recipe, res=matrices, **{**fields, **changes})


def _tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_the_composite_is_the_later_matrix_times_the_earlier_and_rows_are_written() -> None:
    one, two = sublayers([_observed([FIRST, IDENTITY]), _observed([SECOND, SECOND])], token=0)
    assert one.mean == [[0.75, 0.125], [0.5, 0.75]]
    assert one.of_token == FIRST and two.of_token == SECOND
    assert one.composite == one.mean
    # The mean over tokens of the products, and not the product of the means.
    assert two.composite == [[1.0, 1.5], [0.6875, 0.78125]]


def test_the_token_is_the_chosen_one() -> None:
    (one,) = sublayers([_observed([FIRST, SECOND, IDENTITY])], token=1)
    assert one.of_token == SECOND


def test_gains_are_row_sums_forward_and_column_sums_backward_of_the_worst_token() -> None:
    one, two = sublayers([_observed([IDENTITY, FIRST]), _observed([IDENTITY, SECOND])], token=0)
    assert (one.gain_forward, two.gain_forward) == (1.5, 3.0)  # of FIRST, of SECOND_FIRST
    assert (one.gain_backward, two.gain_backward) == (3.125, 3.0)  # of SECOND_FIRST, of SECOND


def test_gains_count_amounts_and_not_signs() -> None:
    (one,) = sublayers([_observed([[[0.5, -2.0], [0.25, 1.0]]])], token=0)
    assert (one.gain_forward, one.gain_backward) == (2.5, 3.0)


def test_shares_of_reading_weigh_streams_by_their_norms_and_sum_to_one() -> None:
    pre, norms = _tensor([0.5, 0.25], [0.5, 0.75]), _tensor([1.0, 2.0], [3.0, 4.0])
    (one,) = sublayers([_observed([FIRST, FIRST], pre=pre, norms=norms, post=_tensor([-3, 0.5], [0, 0.5]))], token=0)
    assert one.reads == pytest.approx([2 / 5.5, 3.5 / 5.5])
    assert one.writes == pytest.approx([0.75, 0.25])


def test_a_sublayer_that_writes_nothing_has_no_shares() -> None:
    nothing = torch.zeros(2, 2, dtype=torch.float64)
    (one,) = sublayers([_observed([FIRST, FIRST], norms=nothing, post=nothing)], token=0)
    assert one.reads == one.writes == [0.0, 0.0]


def test_a_shifted_recipe_reads_with_the_weights_of_the_sublayer_before() -> None:
    shifted = Recipe.preset("deepseek_v41", streams=2)
    first, second = _tensor([0.1, 0.9]), _tensor([0.5, 0.5])
    one, two = sublayers(
        [_observed([FIRST], recipe=shifted, pre=first), _observed([SECOND], recipe=shifted, pre=second)], token=0
    )
    assert one.reads == [1.0, 0.0]
    assert two.reads == pytest.approx([0.1, 0.9])
    assert one.pre[0].quantiles[3] == pytest.approx(0.1)  # what it computed, for the next one


def test_spreads_are_quantiles_over_tokens_for_each_stream() -> None:
    values = torch.stack([torch.arange(101.0), torch.full((101,), 7.0)], 1).double()
    (one,) = sublayers([_observed([FIRST] * 101, pre=values)], token=0)
    assert one.pre[0].quantiles == pytest.approx((0, 5, 25, 50, 75, 95, 100))
    assert one.pre[1].quantiles == (7.0,) * 7


def test_mixing_depth_counts_sublayers_until_the_mean_composite_is_near_uniform() -> None:
    halfway = [[0.75, 0.25], [0.25, 0.75]]  # its powers: 0.25, 0.125, 0.0625 from uniform
    chain = sublayers([_observed([halfway])] * 4, token=0)
    assert mixing_depth(chain) == 3
    assert mixing_depth(chain[:2]) is None
    nan = sublayers([_observed([[[math.nan, 0.5], [0.5, 0.5]]])], token=0)
    assert mixing_depth(nan) is None
