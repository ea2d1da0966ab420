"""Inspections go to JSON and come back, with values that JSON has no numbers for."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from mhckit.inspect import Finding, Inspection, Spread, Sublayer, from_json, to_json

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\"'\x00"


def _sublayer(**changes: object) -> Sublayer:
    matrix = [[0.75, 0.25], [0.25, 0.75]]
    spreads = [Spread((0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)), Spread((1.0,) * 7)]
    sublayer = Sublayer(
        name=HOSTILE, mean=matrix, of_token=matrix, composite=matrix, pre=spreads, post=spreads, reads=[0.25, 0.75],
        writes=[1.0, 0.0], row_error=1e-7, column_error=2e-7, error_by_iteration=[0.5, 0.25], gain_forward=1.0,
        gain_backward=1.25, identity_distance=0.5, uniform_distance=0.5, similarity=0.9, nonfinite=0,
    )  # fmt: skip
    return dataclasses.replace(sublayer, **changes)


def _inspection(*sublayers: Sublayer, **changes: object) -> Inspection:
    inspection = Inspection(
        name=HOSTILE, kind="run", recipe={"streams": 2, "residual": "sinkhorn", "shifted": False}, streams=2, tokens=8,
        token=3, token_text=HOSTILE, text="nan", loss=2.5, sublayers=list(sublayers), mixing_depth=None,
        findings=[Finding("note", HOSTILE, "inf", "nan")], facts={"dtype": "nan"},
    )  # fmt: skip
    return dataclasses.replace(inspection, **changes)


def test_round_trip() -> None:
    inspection = _inspection(_sublayer(), _sublayer(error_by_iteration=[]), loss=None, mixing_depth=2)
    again = from_json(to_json(inspection))
    assert again == inspection
    assert isinstance(again.sublayers[0].pre[0].quantiles, tuple)
    assert again.findings[0].text == "inf" and again.facts["dtype"] == "nan" and again.text == "nan"


def test_what_is_no_number_comes_back_and_any_json_reader_can_read_it() -> None:
    bad = _sublayer(
        gain_forward=math.inf, gain_backward=-math.inf, mean=[[math.nan, 1.0], [2.0, math.inf]],
        pre=[Spread((math.nan,) * 7)] * 2, nonfinite=3,
    )  # fmt: skip
    text = to_json(_inspection(bad, loss=math.nan))

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    json.loads(text, parse_constant=refuse)
    again = from_json(text)
    (sublayer,) = again.sublayers
    assert sublayer.gain_forward == math.inf and sublayer.gain_backward == -math.inf and sublayer.nonfinite == 3
    assert again.loss is not None and math.isnan(again.loss)
    assert math.isnan(sublayer.mean[0][0]) and sublayer.mean[0][1:] == [1.0] and sublayer.mean[1] == [2.0, math.inf]
    assert all(math.isnan(value) for value in sublayer.pre[0].quantiles)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"sublayers": [], "findings": [], "loss": 1, "more": 2}'])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no report that mhckit inspect wrote"):
        from_json(text)


def test_a_file_that_is_too_deep_to_read_is_refused() -> None:
    with pytest.raises(ValueError, match="no report that mhckit inspect wrote"):
        from_json("[" * 100_000)


@pytest.mark.parametrize(
    "changes",
    [
        {"streams": 5}, {"streams": "2"}, {"text": None}, {"recipe": [1]}, {"facts": None}, {"mixing_depth": "deep"},
        {"findings": [{"level": [], "where": "", "text": "", "threshold": ""}]},
    ],
)  # fmt: skip
def test_a_report_of_other_kinds_of_values_is_refused(changes: dict[str, object]) -> None:
    data = json.loads(to_json(_inspection(_sublayer()))) | changes
    with pytest.raises(ValueError, match="no report that mhckit inspect wrote"):
        from_json(json.dumps(data))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": 5}, {"nonfinite": "5"}, {"mean": [[1.0]]}, {"composite": 1.0}, {"pre": []}, {"writes": [1.0]},
        {"post": [{"quantiles": [1.0]}] * 2}, {"gain_forward": [1.0]}, {"gain_backward": 10**400},
        {"error_by_iteration": 5.0}, {"reads": [[0.5], 0.5]},
    ],
)  # fmt: skip
def test_a_report_whose_sublayers_do_not_fit_its_streams_is_refused(changes: dict[str, object]) -> None:
    data = json.loads(to_json(_inspection(_sublayer())))
    data["sublayers"][0] |= changes
    with pytest.raises(ValueError, match="no report that mhckit inspect wrote"):
        from_json(json.dumps(data))


def test_a_report_with_a_part_missing_is_refused() -> None:
    data = json.loads(to_json(_inspection(_sublayer())))
    del data["sublayers"][0]["reads"]
    with pytest.raises(ValueError, match="reads"):
        from_json(json.dumps(data))
