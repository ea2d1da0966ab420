"""Claims: the data is complete, both computations of every case agree, and verdicts say what was measured."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mhckit.bench.claims import correctness, measure, passes, run, warmup
from mhckit.bench.claims.cases import CASES, Case
from mhckit.bench.claims.data import CLAIMS, NOT_MEASURABLE, Claim, Shape
from mhckit.bench.claims.measure import MEASURES, Machine, Measured
from mhckit.bench.claims.report import UNITS, Result, table, verdict
from mhckit.bench.correctness import WrongResult
from mhckit.testing import relative_error

SMALL = Shape(2, 3, 8)
SPEEDUP = Claim("source", "RTX 3090", "coeffs", "liger coeffs", "both", (SMALL, SMALL), "speedup", (3.5, 3.5))
TIME = dataclasses.replace(SPEEDUP, quantity="microseconds", claimed=(7, 23))
MACHINE = Machine(ceiling=4e12, nominal=5e12)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: f"{c.case}-{c.passes}-{c.quantity}-{c.shapes[0]}")
def test_every_claim_is_measured(claim: Claim) -> None:
    assert claim.case in CASES
    assert claim.quantity in MEASURES
    assert claim.quantity in UNITS
    assert claim.shapes
    assert 0 < claim.claimed[0] <= claim.claimed[1]


def test_all_documents_are_there() -> None:
    count = {}
    for claim in CLAIMS:
        count[claim.source] = count.get(claim.source, 0) + 1
    assert count == {"Liger-Kernel issue 1066": 8, "Transformer Engine PR 2790": 8, "mHC.cu": 16, "mHC-triton": 4}
    assert {len(claim.shapes) for claim in CLAIMS if "Engine" in claim.source} == {13}
    assert all(claim.why for claim in NOT_MEASURABLE)
    assert set(CASES) == {claim.case for claim in CLAIMS}


@pytest.mark.parametrize("name", CASES)
def test_naive_code_equals_mhckit(name: str) -> None:
    """Results and gradients, in float64."""
    case = CASES[name]
    tensors = case.tensors(SMALL, "cpu", torch.float64)
    gradients = passes.normal_like(case.ours(tensors))
    ours = passes.Run(case.ours, tensors, "both", gradients)()
    naive = passes.Run(case.naive, tensors, "both", gradients)()
    assert len(ours) == len(naive) > len(gradients)
    for index, (a, b) in enumerate(zip(ours, naive, strict=True)):
        assert a.shape == b.shape
        assert relative_error(a, b) < 1e-10, index


@pytest.mark.parametrize("name", CASES)
def test_right_results_are_not_refused(name: str) -> None:
    correctness.refuse_wrong(CASES[name], 8, "cpu")


@pytest.mark.parametrize("name", ["liger post_res", "mhc_cu dynamic layer"])
def test_wrong_results_are_refused(name: str) -> None:
    case = CASES[name]

    def slightly_wrong(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(1.1 * output for output in case.ours(tensors))

    with pytest.raises(WrongResult, match="relative error"):
        correctness.refuse_wrong(dataclasses.replace(case, ours=slightly_wrong), 8, "cpu")


def test_wrong_gradients_of_a_model_are_refused() -> None:
    case = CASES["liger language model"]

    def without_one_path(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        name = "sublayers.0.out.weight"
        return case.ours(tensors | {name: tensors[name] + 0 * tensors[name].detach() - 0.5 * tensors[name]})

    with pytest.raises(WrongResult):
        correctness.refuse_wrong(dataclasses.replace(case, ours=without_one_path), 8, "cpu")


def test_minimum_bytes() -> None:
    """Of `post`, in multiples of the bytes of a channel: 18 forward and 28 backward, as far as coefficients go."""
    case, shape = CASES["te expand_combine"], Shape(1, 4, 1024)
    tensors, coefficients = case.tensors(shape, "cpu"), 4 * 4 * (4 + 16)
    moved = {which: passes.Run(case.ours, tensors, which).minimum_bytes for which in ("forward", "backward", "both")}
    assert moved["forward"] == 4 * 1024 * 18 + coefficients
    assert moved["backward"] == 4 * 1024 * 28 + 2 * coefficients
    assert moved["both"] == moved["forward"] + moved["backward"]


def test_passes_return_results_and_gradients() -> None:
    case = CASES["liger pre"]
    tensors = case.tensors(SMALL, "cpu")
    counts = {which: len(passes.Run(case.ours, tensors, which)()) for which in ("forward", "backward", "both")}
    assert counts == {"forward": 1, "backward": 2, "both": 3}
    assert all(not tensor.requires_grad for tensor in tensors.values())


def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU: naive code takes 100 us and mhckit 20 us, 90 and 10 of them on the GPU."""
    tensors = Case.tensors
    monkeypatch.setattr(Case, "tensors", lambda self, shape, device, dtype=None: tensors(self, shape, "cpu", dtype))
    naive = CASES["liger coeffs"].naive
    monkeypatch.setattr(measure, "launched_microseconds", lambda ran: 100.0 if ran.compute is naive else 20.0)
    monkeypatch.setattr(measure, "gpu_microseconds", lambda compute, *_: 90.0 if compute is naive else 10.0)
    monkeypatch.setattr(measure, "peak_extra_bytes", lambda ran: 4000 if ran.compute is naive else 1000)


def _measured(quantity: str) -> Measured:
    claim = dataclasses.replace(SPEEDUP, quantity=quantity)
    return MEASURES[claim.quantity](measure.Trial.of(claim, SMALL, MACHINE))


def test_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    _clock(monkeypatch)
    ran = passes.Run(CASES["liger coeffs"].ours, CASES["liger coeffs"].tensors(SMALL, "cpu"), "both")
    least = ran.minimum_bytes / MACHINE.ceiling * 1e6

    speedup = _measured("speedup")
    assert (speedup.value, speedup.beside) == (5, 9)
    assert speedup.possible == pytest.approx(100 / least)
    assert _measured("microseconds").value == 10
    assert _measured("memory ratio").value == 4
    saved = 1 - (ran.held_bytes + 1000) / (ran.held_bytes + 4000)
    assert _measured("memory saved").value == pytest.approx(100 * saved)
    bound = _measured("of the bound")
    assert bound.value == pytest.approx(100 * least / 10)
    assert bound.beside == pytest.approx(bound.value * 4 / 5)


def test_long_calls_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(passes, "median_microseconds", lambda ran, rep: asked.append(rep) or 1e3 * ran())
    assert passes.launched_microseconds(lambda: 2) == 2000
    assert passes.launched_microseconds(lambda: 90.5) == 90500
    assert asked == [20, 20, 453]


def _results(claim: Claim, *values: Measured | str) -> list[Result]:
    return [
        Result(claim, SMALL, None, value) if isinstance(value, str) else Result(claim, SMALL, value) for value in values
    ]


@pytest.mark.parametrize(
    ("claim", "values", "expected"),
    [
        (SPEEDUP, (Measured(3.5), Measured(9)), "yes"),
        (SPEEDUP, (Measured(3.4), Measured(9)), "at 1 of 2 shapes"),
        (SPEEDUP, (Measured(1), Measured(2)), "no"),
        (SPEEDUP, (Measured(1, possible=3), Measured(2, possible=4)), "no; for nobody on this machine at 1"),
        (SPEEDUP, (Measured(9), "wrong result: result 0"), "no: wrong result: result 0"),
        (TIME, (Measured(7), Measured(23)), "yes"),
        (TIME, (Measured(7), Measured(24)), "at 1 of 2 shapes"),
        (TIME, (Measured(24), Measured(25)), "no"),
    ],
)
def test_verdict(claim: Claim, values: tuple[Measured | str, ...], expected: str) -> None:
    assert verdict(_results(claim, *values)) == expected


def test_lines() -> None:
    (line,) = (result.line() for result in _results(SPEEDUP, Measured(4.56789, 9, 50, {"ours_microseconds": 12.34567})))
    assert line["kind"] == "claim"
    assert (line["claimed"], line["measured"], line["possible"], line["holds"]) == (3.5, 4.568, 50, True)
    assert (line["shape"], line["ours_microseconds"], line["by_gpu_time"]) == ("B2 T3 C8", 12.35, 9)
    (refused,) = (result.line() for result in _results(TIME, "wrong result"))
    assert (refused["claimed"], refused["holds"], refused["problem"]) == ([7, 23], None, "wrong result")
    assert "measured" not in refused


def test_table() -> None:
    console = Console(width=220, file=io.StringIO(), record=True)
    noted = dataclasses.replace(TIME, note="theirs are float16")
    console.print(table(_results(SPEEDUP, Measured(3, 4), Measured(6, 9)) + _results(noted, "wrong result [/x]")))
    text = console.export_text()
    for expected in (
        "3.5x",
        "3 to 6x",
        "4 to 9x by GPU time",
        "at 1 of 2",
        "7 to 23 us",
        "no: wrong result [/x]",
        "coeffs: theirs are",
    ):
        assert expected in text
    assert text.count("not measurable") == len(NOT_MEASURABLE)


def test_run_reports_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every claim gets a line and a row, whatever happens to it; nothing wrong is timed."""

    def measured(trial: measure.Trial) -> Measured:
        if trial.passes == "backward":
            raise RuntimeError("out of memory\nand a long story")
        return Measured(1.0)

    def refused(case: Case, channels: int) -> None:
        if case is CASES["te projection"]:
            raise WrongResult("result 0")

    monkeypatch.setattr(run, "compile_all", lambda advance: None)
    monkeypatch.setattr(run, "machine_at_hand", lambda: MACHINE)
    monkeypatch.setattr(run, "environment", lambda commit: {"commit": commit})
    monkeypatch.setattr(run, "refuse_wrong", refused)
    monkeypatch.setattr(run, "MEASURES", dict.fromkeys(MEASURES, measured))
    output = tmp_path / "claims.jsonl"
    run.run_claims(output, "abc")
    lines = [json.loads(text) for text in output.read_text().splitlines()]
    assert len(lines) == sum(len(claim.shapes) for claim in CLAIMS)
    assert {line["commit"] for line in lines} == {"abc"}
    problems = {(line["claim"] == "projection", line["passes"] == "backward"): line.get("problem") for line in lines}
    assert problems == {
        (True, False): "wrong result: result 0",
        (True, True): "wrong result: result 0",
        (False, True): "RuntimeError: out of memory",
        (False, False): None,
    }


def test_nothing_is_compiled_twice() -> None:
    pairs = warmup.widths()
    assert len(pairs) == len({(id(CASES[case]), channels) for case, channels in pairs})
    assert {channels for _, channels in pairs} == {shape.channels for claim in CLAIMS for shape in claim.shapes}


def test_compiling_goes_on_after_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "widths", lambda: [("liger pre", 8), ("no such case", 8)])
    monkeypatch.setattr(warmup, "PROCESSES", 1)
    done = []
    warmup.compile_all(lambda: done.append(1), "cpu")
    assert len(done) == 2
