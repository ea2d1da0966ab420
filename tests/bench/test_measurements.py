"""Which measurements there are, what is compiled for them, and how a run puts them together; without a GPU."""

from __future__ import annotations

import io
import os
import pickle
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import pytest
import sample
from rich.console import Console
from triton import knobs

from mhckit.bench import compilation, run
from mhckit.bench.cases import DECODE_TARGETS, RECIPE, Case, compared_recipes
from mhckit.bench.compilation import Preparation, preparation
from mhckit.bench.correctness import WrongResult
from mhckit.bench.decode import compile_kernels, compile_reference
from mhckit.bench.results import read_lines
from mhckit.bench.run import MEASUREMENTS, Measurement, Plan
from mhckit.bench.sections import Section

PLAN, QUICK = Plan(ceiling=4e12), Plan.quick(ceiling=4e12)


def _measurements(section: Section, plan: Plan = PLAN) -> list[Measurement]:
    return list(MEASUREMENTS[section](plan))


def test_every_part_has_measurements() -> None:
    assert list(MEASUREMENTS) == list(Section)
    labels = [each.label for section in Section for each in _measurements(section)]
    assert len(labels) == len(set(labels)) > 40
    assert [each.label for each in _measurements(Section.RECIPES)] == [
        "recipes, 8192 x 4096, N = 4",
        "recipes, 16384 x 2560, N = 4",
    ]


def test_inference_is_compiled_for_few_shapes() -> None:
    measurements = _measurements(Section.DECODE)
    compiles = Counter(each.function for one in measurements for each in dict.fromkeys(one.compiles))
    assert len(measurements) == 2 * 2 * 6 and compiles[compile_reference] == 2 * 2 * len(DECODE_TARGETS)
    different = {each for one in measurements for each in one.compiles if each.function is compile_kernels}
    assert different == {
        Preparation(compile_kernels, (recipe, channels))
        for recipe in ("deepseek_v4", "deepseek_v41")
        for channels in (4096, 7168)
    }


def test_quick_is_quick() -> None:
    (recipes,) = _measurements(Section.RECIPES, QUICK)
    assert len(recipes.compiles) == len(compared_recipes())
    decode = _measurements(Section.DECODE, QUICK)
    assert len(decode) == 4 and {each.function for one in decode for each in one.compiles} == {compile_kernels}


def test_parts_share_what_they_compile() -> None:
    """The recipe that all of the benchmark uses is not compiled again for being named."""
    (junction, *_), (recipes, *_) = _measurements(Section.JUNCTION), _measurements(Section.RECIPES)
    assert junction.compiles[0] == recipes.compiles[0] != recipes.compiles[1]
    _function, (operator, case, recipe) = recipes.compiles[1]
    assert (operator, case) == ("junction", Case(compilation.TOKENS_TO_COMPILE, 4096))
    assert recipe == compared_recipes()["deepseek_v41"]


@pytest.mark.parametrize("section", Section)
def test_another_process_can_be_told(section: Section) -> None:
    for measurement in _measurements(section):
        assert pickle.loads(pickle.dumps(measurement.compiles)) == measurement.compiles


class _Processes:
    """Do nothing, and keep what they are told."""

    told: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, count: int, cache: str | None = None) -> None:
        _Processes.told.append((count, cache))

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def submit(self, *call: Any) -> Future[None]:
        _Processes.told.append(call)
        done: Future[None] = Future()
        done.set_exception(RuntimeError("what fails here fails again where it is measured"))
        return done


def test_nothing_is_prepared_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And Triton's cache is named: Inductor would name another one, in which nothing is found."""
    monkeypatch.setattr(compilation, "_processes", _Processes)
    monkeypatch.setattr(_Processes, "told", [])
    monkeypatch.setattr(knobs.cache, "get_triton_dir", lambda name: str(tmp_path / name))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    one, other = preparation("junction", Case(9, 64)), preparation("junction", Case(9, 64), "hy_v4")
    with knobs.cache.scope():
        compilation.compile_in_parallel([one, other, one, preparation("junction", Case(99, 64), RECIPE)])
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache") == knobs.cache.dir
    assert _Processes.told == [(2, None), (one.function, *one.arguments), (other.function, *other.arguments)]


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lines with what they depend on, written and shown; one that fails is refused, and the next one is made."""
    facts = {name: sample.FACTS[name] for name in ("commit", "device", "torch", "triton", "python", "date")}
    compiled: list[Preparation] = []

    def measure(case: Case, ceiling: float, rep: int) -> list[dict[str, Any]]:
        if case.channels == 2560:
            raise WrongResult("output 0")
        ours = [line for line in sample.recipes(case.facts()) if line["kind"] == "recipe"]
        return [{name: value for name, value in line.items() if name not in facts} for line in ours]

    monkeypatch.setattr(run, "copy_ceiling", lambda: 4e12)
    monkeypatch.setattr(run, "environment", lambda commit: facts | {"commit": commit})
    monkeypatch.setattr(run, "compile_in_parallel", compiled.extend)
    monkeypatch.setattr(run, "measure_recipes", measure)
    output, console = tmp_path / "results.jsonl", Console(width=140, file=io.StringIO())
    lines = run.run_benchmark(only=Section.RECIPES, quick=False, output=output, commit="abc", console=console)
    assert lines == read_lines(output) and len(compiled) == 2 * len(compared_recipes())
    assert [line["kind"] for line in lines] == ["ceiling", *["recipe"] * 6, "refused"]
    assert all(line["commit"] == "abc" and line["device"] == "Sample GPU" for line in lines)
    assert [line["recipe"] for line in lines[:5:4]] == ["deepseek_v4", "deepseek_v41"]
    assert lines[-1]["reason"] == "WrongResult: output 0"
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "75.0%" in printed and "refused: recipes, 16384 x 2560, N = 4" in printed
