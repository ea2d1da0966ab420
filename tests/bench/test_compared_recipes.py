"""Recipes side by side, on the CPU and with a clock that does not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from mhckit import Recipe
from mhckit.bench import correctness, recipes, timing
from mhckit.bench.cases import RECIPE, Case, compared_recipes
from mhckit.bench.correctness import WrongResult
from mhckit.bench.launches import DeviceEvent
from mhckit.bench.results import Line
from mhckit.bench.step import Step, mhckit_outputs
from mhckit.testing import Call

CASE = Case(3, 16)
TIMES = {"deepseek_v4": 10.0, "deepseek_v41": 7.5, "mhc_lite": 12.0, "hy_v4": 9.0, "static": 8.0, "projection": 9.5}


def test_which_they_are() -> None:
    compared = compared_recipes()
    assert next(iter(compared)) == RECIPE
    assert compared["deepseek_v41"].shifted and not compared["static"].dynamic
    maps = {"mhc_lite": "permutation", "hy_v4": "identity", "projection": "projection"}
    assert {name: compared[name].residual for name in maps} == maps
    assert len(set(compared.values())) == len(compared), "each of them once"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[set[str], list[str]]]:
    """Measurements without a GPU; in which direction, and which recipes together."""
    call, timed = Case.call, []
    directions: dict[str, Callable[[], str]] = {name: name.__str__ for name in ("forward", "backward", "both")}

    def times(calls: dict[str, Callable[[], Callable[[], str]]], rep: int) -> dict[str, float]:
        timed.append(({prepare()() for prepare in calls.values()}, list(calls)))
        return {name: TIMES[name] for name in calls}

    def events(run: Callable[[], object]) -> list[DeviceEvent]:
        run()
        return [DeviceEvent("kernel", 1.0)] * 3

    monkeypatch.setattr(Case, "call", lambda self, operator, **options: call(self, operator, device="cpu", **options))
    monkeypatch.setattr(Step, "directions", lambda self: directions)
    monkeypatch.setattr(recipes, "interleaved_graph_microseconds", times)
    monkeypatch.setattr(recipes, "device_events", events)
    return timed


def _measured(**options: Any) -> list[Line]:
    return recipes.measure_recipes(CASE, ceiling=1e9, rep=1, **options)


def test_a_line_per_recipe_and_direction(asked: list[tuple[set[str], list[str]]]) -> None:
    lines, names = _measured(), list(compared_recipes())
    assert asked == [({direction}, names) for direction in ("forward", "backward", "both")]
    assert [(line["direction"], line["recipe"]) for line in lines] == [
        (direction, name) for direction in ("forward", "backward", "both") for name in names
    ]
    by_recipe = {line["recipe"]: line for line in lines if line["direction"] == "backward"}
    shifted, static = by_recipe["deepseek_v41"], by_recipe["static"]
    assert (shifted["microseconds"], shifted["of_sinkhorn"]) == (7.5, 0.75) and by_recipe[RECIPE]["of_sinkhorn"] == 1
    assert (shifted["bytes"], static["bytes"], by_recipe["hy_v4"]["bytes"]) == (38 * 48, 40 * 48, 48 * 48)
    assert shifted["of_ceiling"] == pytest.approx(38 * 48 / 1e9 * 1e6 / 7.5, abs=1e-3)
    assert Recipe.from_key(static["fields"]) == compared_recipes()["static"]
    assert {line["launches"] for line in lines} == {3} and lines[0] == lines[0] | CASE.facts() | {"kind": "recipe"}


def _wrong(residual: str) -> Callable[[Call], tuple[Tensor, ...]]:
    """mhckit, were it wrong for one kind of recipe."""

    def outputs(call: Call) -> tuple[Tensor, ...]:
        y, *rest = mhckit_outputs(call)
        return (1.1 * y if call.recipe.residual == residual else y, *rest)

    return outputs


def test_a_wrong_recipe_is_refused_and_the_others_are_timed(
    asked: list[tuple[set[str], list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correctness, "mhckit_outputs", _wrong("identity"))
    lines = _measured()
    assert [together for _, together in asked] == [[name for name in compared_recipes() if name != "hy_v4"]] * 3
    (refused,) = (line for line in lines if line["kind"] == "refused")
    assert refused["measurement"] == f"recipe hy_v4, {CASE}" and refused["reason"].startswith("WrongResult: output 0")


def test_nothing_is_timed_beside_a_wrong_recipe(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "mhckit_outputs", _wrong("sinkhorn"))
    with pytest.raises(WrongResult, match="output 0"):
        _measured()
    assert asked == []


def test_a_shifted_recipe_hands_on_its_pre() -> None:
    """Its gradient is wanted, as the next junction reads with it; other recipes have read with theirs."""
    for name, outputs in (("deepseek_v41", 5), ("deepseek_v4", 4), ("hy_v4", 3)):
        assert len(mhckit_outputs(CASE.call("junction", recipe=name, device="cpu"))) == outputs


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody in each round; a device that slows down does so for all, and the round in the middle counts."""
    timed: list[str] = []

    def median(graph: str, rep: int) -> float:
        timed.append(graph)
        return {"slow": 40.0, "fast": 20.0}[graph] * len(timed)

    monkeypatch.setattr(timing, "captured", lambda prepare, calls: prepare())
    monkeypatch.setattr(timing, "median_microseconds", median)
    times = timing.interleaved_graph_microseconds({"slow": lambda: "slow", "fast": lambda: "fast"})  # type: ignore
    assert timed == ["slow", "fast"] * timing.ROUNDS
    assert times == {"slow": 40.0 * 3 / timing.CALLS_IN_GRAPH, "fast": 20.0 * 4 / timing.CALLS_IN_GRAPH}
