"""Models that are broken in one way each: the finding names sublayer, number and threshold. A healthy one has none."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_models import SUBLAYERS, connections, healthy, inspect_saved, residual_bias, said

from mhckit import Recipe
from mhckit.inspect import Finding, Inspection, Sublayer, findings
from mhckit.inspect.findings import find
from mhckit.models import LanguageModel


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    return inspect_saved(healthy(), tmp_path_factory.mktemp("healthy"))


def test_a_healthy_model_is_told_so_check_by_check(sound: Inspection) -> None:
    assert {each.level for each in sound.findings} == {"good"}, sound.findings
    assert len(sound.findings) == 7
    assert all(each.threshold for each in sound.findings)


def _freeze(model: LanguageModel) -> None:
    for connection in connections(model):
        connection.scale[2] = 0
        residual_bias(connection).copy_(40 * torch.eye(3))


def _make_uniform(model: LanguageModel) -> None:
    for connection in connections(model):
        connection.scale[2] = 0
        residual_bias(connection).zero_()


def _close_pre(model: LanguageModel) -> None:
    for connection in connections(model):
        connection.bias[:3] = -12


def _open_one_post(model: LanguageModel) -> None:
    connections(model)[2].bias[4] = 20


def _starve_reading(model: LanguageModel) -> None:
    for connection in connections(model):
        connection.scale[0] = 0
        connection.bias[1] = -6.0  # a share of 0.003 or so, and not at the end of the range


def _starve_writing(model: LanguageModel) -> None:
    for connection in connections(model):
        connection.scale[1] = 0
        connection.bias[3:6] = torch.tensor([3.0, -5.0, 3.0])


def _enlarge_logits(model: LanguageModel) -> None:
    """Two streams want to read the same one alone, which no doubly stochastic matrix does."""
    residual_bias(connections(model)[1]).copy_(-30 * torch.tensor([[0.0, 1, 1], [0, 1, 1], [0, 0, 0]]))


def _silence(model: LanguageModel) -> None:
    """Nothing is written, so the streams stay the copies that they start as."""
    for name, parameter in model.named_parameters():
        if name.endswith((".out.weight", ".down.weight")):
            parameter.zero_()


@pytest.mark.parametrize(
    ("damage", "pattern", "level", "where"),
    [
        (_freeze, r"frozen at the identity \(distance .*\bin 4 of 4 sublayers", "note", "blocks.0.attn_connection"),
        (_make_uniform, r"Mixing is uniform \(distance .*\bin 4 of 4 sublayers", "wrong", "blocks.0.attn_connection"),
        (_close_pre, r"pre is saturated for 3 of 3 streams.*\bin 4 of 4", "wrong", "blocks.0.attn_connection"),
        (_open_one_post, r"post is saturated for 1 of 3 .* In blocks\.1\.attn_c", "note", "blocks.1.attn_connection"),
        (_starve_reading, r"Stream 1 is never read: its share is 0\.00\d+ at most", "wrong", ""),
        (_starve_writing, r"Stream 1 is never written: its share is 0\.00\d+ at most", "wrong", ""),
        (
            _enlarge_logits,
            r"Column sums are off by 0\.\d+: logits too large for 20",
            "wrong",
            "blocks.0.mlp_connection",
        ),
        (_silence, r"nearly alike at every depth \(cosine 1\.0000", "note", ""),
    ],
)
def test_each_damage_is_found_and_named(
    tmp_path: Path, damage: Callable[[LanguageModel], None], pattern: str, level: str, where: str
) -> None:
    model = healthy()
    with torch.no_grad():
        damage(model)
    inspection = inspect_saved(model, tmp_path)
    (finding,) = said(inspection, pattern)
    assert (finding.level, finding.where) == (level, where)
    assert finding.threshold
    levels = [each.level for each in inspection.findings]
    assert levels == sorted(levels, key=["wrong", "note", "good"].index) and levels[-1] == "good"


def test_values_that_are_no_numbers_are_blamed_on_the_sublayer_that_made_them(tmp_path: Path) -> None:
    model = healthy()
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.down.weight")[0, 0] = torch.nan
    inspection = inspect_saved(model, tmp_path)
    (finding,) = said(inspection, "NaN or infinite")
    assert finding.level == "wrong" and finding.where == "blocks.0.mlp_connection"
    assert "3 of 4 sublayers" in finding.text
    assert said(inspection, "The loss is nan")
    assert inspection.findings[0].level == "wrong"
    assert not said(inspection, "", "good"), "nothing is well in a model that computes NaN"
    assert [each.nonfinite > 0 for each in inspection.sublayers] == [False, True, True, True]


def test_products_that_overflow_are_not_taken_for_well(sound: Inspection) -> None:
    last = _with(sound.sublayers[-1], gain_forward=math.inf)
    found = find([*sound.sublayers[:-1], last], PAPER, 1.0)
    assert found[0].level == "wrong" and found[0].where == last.name and "Coefficients are finite" in found[0].text
    assert not [each for each in found if each.level == "good"]


def test_the_last_sublayer_is_blamed_too(tmp_path: Path) -> None:
    model = healthy()
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.down.weight")[0, 0] = torch.inf
    (finding,) = said(inspect_saved(model, tmp_path), "first in")
    assert finding.where == "blocks.1.mlp_connection" and f"1 of {SUBLAYERS}" in finding.text


def test_writing_nothing_is_not_taken_for_values_that_overflow(tmp_path: Path) -> None:
    model = healthy()
    with torch.no_grad():
        for connection in connections(model):
            connection.bias[3:6] = -200  # whose sigmoid is 0 in float32
    inspection = inspect_saved(model, tmp_path)
    assert not said(inspection, "is not, in|NaN")
    assert len(said(inspection, r"Stream \d is never written: its share is 0 at most", "wrong")) == 3
    assert said(inspection, "post is saturated for 3 of 3 streams.*in 4 of 4", "wrong")


def test_one_stream_has_nothing_to_mix(tmp_path: Path) -> None:
    inspection = inspect_saved(healthy(streams=1), tmp_path)
    assert [each.text for each in inspection.findings] == ["Every value is finite."]


def test_streams_that_a_recipe_does_not_mix_are_not_called_frozen(tmp_path: Path) -> None:
    inspection = inspect_saved(healthy(residual="hy_v4"), tmp_path)
    assert not said(inspection, "identity|doubly|gain", "wrong", "note", "good")
    assert said(inspection, "Every stream is read", "good")


def _with(sublayer: Sublayer, **changes: float) -> Sublayer:
    return dataclasses.replace(sublayer, **changes)


PAPER = Recipe.preset("paper", streams=3)


@pytest.mark.parametrize(
    ("changes", "recipe", "level", "text"),
    [
        ({"gain_forward": 1.61}, PAPER, "note", "gain forward reaches 1.61: a signal"),
        ({"gain_backward": 4.1}, PAPER, "wrong", "gain backward reaches 4.1: a gradient"),
        ({"gain_forward": 3000.0}, PAPER.replace(residual="free"), "wrong", "gain forward reaches 3e"),
        ({"row_error": 0.02}, PAPER, "note", "Row sums are off by 0.02: logits too large for 20 iterations"),
        ({"row_error": 0.02}, Recipe.preset("mhc_triton", streams=3), "note", "off by 0.02: logits too unequal for 20"),
        ({"column_error": 0.2}, PAPER.replace(iterations=7), "wrong", "Column sums are off by 0.2: .* 7 iterations"),
        ({"row_error": 0.2}, PAPER.replace(residual="permutation"), "wrong", r"Row sums are off by 0\.2\."),
        ({"column_error": 0.2}, PAPER.replace(residual="projection"), "wrong", r"Column sums are off by 0\.2\."),
    ],
)
def test_thresholds(sound: Inspection, changes: dict[str, float], recipe: Recipe, level: str, text: str) -> None:
    first, second, *rest = sound.sublayers
    inspection = dataclasses.replace(sound, findings=find([first, _with(second, **changes), *rest], recipe, 1.0))
    (finding,) = said(inspection, text)
    assert (finding.level, finding.where) == (level, second.name)
    assert len(said(inspection, "")) == 1, "and nothing else is"
    assert finding.threshold.endswith({"note": ("1.6", "0.01"), "wrong": ("4", "0.1")}[level])


def test_just_below_the_thresholds_is_well(sound: Inspection) -> None:
    last = _with(sound.sublayers[-1], gain_forward=1.59, gain_backward=1.59, row_error=0.009, column_error=0.009)
    assert {each.level for each in find([*sound.sublayers[:-1], last], PAPER, 1.0)} == {"good"}


def test_sums_of_a_free_map_promise_nothing(sound: Inspection) -> None:
    off = [_with(each, row_error=2.0, column_error=2.0) for each in sound.sublayers]
    assert not [each for each in find(off, PAPER.replace(residual="free"), 1.0) if "sum" in each.text.lower()]


def test_many_sublayers_make_one_finding_that_names_the_worst(sound: Inspection) -> None:
    many = [
        dataclasses.replace(
            sound.sublayers[0], name=f"layer.{index}", similarity=0.5, column_error=0.2 + 0.001 * (index % 90)
        )
        for index in range(120)
    ]
    (finding,) = [each for each in find(many, PAPER, 1.0) if each.level != "good"]
    assert isinstance(finding, Finding) and finding.where == "layer.89"
    assert "off by 0.29" in finding.text and "in 120 of 120 sublayers" in finding.text
    assert len(finding.text) < 250


@pytest.mark.parametrize(
    ("line", "thresholds"),
    [
        ("frozen", [findings.FROZEN]),
        ("Mixing is uniform", [findings.UNIFORM]),
        ("sums are off", [findings.SUMS_NOTE, findings.SUMS_WRONG]),
        ("Composite gain", [findings.GAIN_NOTE, findings.GAIN_WRONG]),
        ("never read", [findings.UNUSED]),
        ("saturated", [findings.SATURATED]),
        ("nearly alike", [findings.ALIKE]),
    ],
)
def test_the_documentation_has_the_thresholds(line: str, thresholds: list[float]) -> None:
    page = Path(__file__).parents[2] / "docs" / "inspect.md"
    (row,) = [each for each in page.read_text().splitlines() if re.match(rf"\| [^|]*{line}[^|]*\|", each)]
    numbers = re.findall(r"\d+(?:\.\d+)?", row.split("|")[2])
    assert {f"{threshold:g}" for threshold in thresholds} <= set(numbers)
