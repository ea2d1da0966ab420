"""The README's results are those that are committed."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import sample
from typer.testing import CliRunner

from mhckit.bench.readme import (
    BEGIN,
    COST_BEGIN,
    COST_END,
    END,
    NOTHING,
    TRACE_BEGIN,
    TRACE_END,
    with_costs,
    with_results,
    with_trace,
)
from mhckit.bench.results import Line, append_lines
from mhckit.cli import app

ROOT = Path(__file__).parents[2]
README = f"before\n{BEGIN}\nstale\n{END}\nafter\n"


def test_the_readme_is_not_stale() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme == with_results(readme, ROOT / "benchmarks/results/junction.jsonl"), "run `make readme`"


def test_the_trace_is_not_stale() -> None:
    page = (ROOT / "docs/performance.md").read_text()
    assert page == with_trace(page, ROOT / "benchmarks/results/junction.jsonl"), "run `make readme`"


def test_the_trace_of_the_first_case(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    traced = sample.FACTS | sample.SMALL | {"kind": "trace", "kernel": "a_kernel", "microseconds": 2.25}
    append_lines(results, [*sample.lines(), traced, traced | {"tokens": 9, "kernel": "b_kernel"}])
    written = with_trace(f"{TRACE_BEGIN}\n{TRACE_END}", results)
    assert "| `a_kernel` | 2.2 |" in written and "| sum | 3.2 |" in written and "b_kernel" not in written


def test_the_trace_is_the_last_of_that_case(tmp_path: Path) -> None:
    """Also where another case alone was traced later, and of two runs of a commit the later one."""
    results = tmp_path / "results.jsonl"
    ceiling = sample.FACTS | {"kind": "ceiling", "commit": "later"}
    traced = sample.FACTS | sample.SMALL | {"kind": "trace", "kernel": "a_kernel", "microseconds": 2.25}
    later = traced | {"commit": "later"}
    another = traced | {"commit": "last", "tokens": 9, "kernel": "b_kernel"}
    append_lines(results, [*sample.lines(), ceiling, later, ceiling, later | {"microseconds": 5.0}])
    append_lines(results, [ceiling | {"commit": "last"}, another])
    written = with_trace(f"{TRACE_BEGIN}\n{TRACE_END}", results)
    assert "2 x 3, commit later:" in written and "| sum | 5.0 |" in written and "b_kernel" not in written


def test_without_a_trace_it_says_so(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append_lines(results, [line for line in sample.lines() if line["kind"] != "trace"])
    assert with_trace(f"{TRACE_BEGIN}\n{TRACE_END}", results) == f"{TRACE_BEGIN}\n{NOTHING}\n{TRACE_END}"


@pytest.mark.parametrize("missing", ["--results", "--steps"])
def test_a_missing_file_changes_nothing(missing: str, tmp_path: Path) -> None:
    pages = {option: tmp_path / f"{option[2:]}.md" for option in ("--path", "--page", "--costs")}
    marks = ((BEGIN, END), (TRACE_BEGIN, TRACE_END), (COST_BEGIN, COST_END))
    for (begin, end), page in zip(marks, pages.values(), strict=True):
        page.write_text(f"{begin}\nas it was\n{end}\n")
    before = [page.read_text() for page in pages.values()]
    results = ROOT / "benchmarks/results"
    files = {"--results": results / "junction.jsonl", "--steps": results / "training.jsonl"}
    files[missing] = tmp_path / "none.jsonl"
    done = CliRunner().invoke(app, ["bench", "readme", *map(str, chain(*pages.items(), *files.items()))])
    assert done.exit_code == 1 and "no such file" in done.output and "none.jsonl" in done.output.replace("\n", "")
    assert [page.read_text() for page in pages.values()] == before


def test_results_of_the_newest_commit(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append_lines(results, [line | {"commit": "old", "device": "Other GPU"} for line in sample.lines()])
    append_lines(results, sample.lines())
    written = with_results(README, results)
    assert "Sample GPU" in written and "4.0 TB/s" in written
    assert "Other GPU" not in written and "stale" not in written and "old" not in written
    assert "| 2 x 3 | 100 (50%) | 200 (50%) | 300 (50%) | 5 | 2.0% | new |" in written
    assert "| 2 x 3, norm | 110 (50%) | 290 (50%) | 400 (50%) | 5 |  | new |" in written
    assert "in one run (commit new):\n\n| tokens x C | mhckit | eager |" in written
    assert "| 2 x 3 | 300 | 900 (3.0x) |" in written and "norm | 400" not in written
    assert "| kernel, 2 x 3, commit new, beside a copy at 4.0 TB/s |" in written
    assert "| F1 | 40 (25%) | 32 (31%) | 10 |" in written and "| F1 | 50" not in written
    assert "(commit new): forward 33 us, backward 44 us, without gradients 22 us" in written
    assert "From an empty cache (commit new), the first junction of a size takes 7 s to compile" in written
    warmup = "`mhckit.warmup` compiles all of them, and C++ for the host, in 4 s."
    assert written.count(f"all other operators, 12 s. {warmup}") == 1
    assert with_results(written, results) == written


def test_a_shape_that_was_measured_again_alone(tmp_path: Path) -> None:
    """Its row is of the later commit, the others stay; what is beside others is of the run with the others."""
    results = tmp_path / "results.jsonl"
    append_lines(results, sample.lines())
    again = [sample.FACTS | line | {"commit": "later"} for line in sample.sublayer(sample.SMALL, 50.0, 100.0)]
    append_lines(results, again)
    written = with_results(README, results)
    assert "| 2 x 3 | 50 (50%) | 100 (50%) | 150 (50%) | 5 | 2.0% | later |" in written
    assert "| 2 x 3, norm | 110 (50%) | 290 (50%) | 400 (50%) | 5 |  | new |" in written
    assert "| 2 x 3 | 300 | 900 (3.0x) |" in written


@pytest.mark.parametrize("kind", ["kernel", "junction", "baseline", "host", "cold_start", "memory"])
def test_what_was_not_measured_is_left_out(kind: str, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append_lines(results, [line for line in sample.lines() if line["kind"] != kind])
    written = with_results(README, results)
    assert (NOTHING in written) == (kind == "junction") and "stale" not in written


def test_results_from_before_there_was_a_warmup(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append_lines(results, [line for line in sample.lines() if line.get("operator") != "warmup"])
    assert "all other operators, 12 s.\n" in with_results(README, results)


def test_without_other_recipes_and_inference_nothing_is_said_of_them(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append_lines(results, sample.lines())
    written = with_results(README, results)
    assert "Other recipes" not in written and "Inference" not in written and "\n\n\n" not in written


def test_other_recipes_and_inference_are_of_the_commits_that_measured_them(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append_lines(results, sample.lines())
    sublayer = with_results(README, results)
    append_lines(results, [line | {"commit": "later"} for line in sample.recipes()])
    append_lines(results, [line | {"commit": "latest"} for line in sample.decode()])
    written = with_results(README, results)
    assert set(sublayer.splitlines()) <= set(written.splitlines()), "the sublayer's stay"
    assert "each beside its own bytes (commit later):" in written
    assert "| 2 x 3 | `deepseek_v4` | 80 (50%) | 160 (25%) | 240 (17%) | 6 | 1.00 |" in written
    assert "| 2 x 3 | `deepseek_v41` | 60 (67%) | 120 (33%) | 180 (22%) | 6 | 0.75 |" in written
    assert "one of 20 in a CUDA graph" in written and "among 4096 (commit latest):" in written
    assert "| recipe | C | by | 1 | 2 |" in written
    assert "| `deepseek_v41` | 3 | mhckit | 9.0 | 10.0 |" in written
    assert "| `deepseek_v41` | 3 | compiled | 44.0 |  |" in written and "on the host" not in written


def test_the_recipe_is_that_of_the_run(tmp_path: Path) -> None:
    """Not that of its last line."""
    results = tmp_path / "results.jsonl"
    append_lines(results, [*sample.lines(), *sample.recipes()])
    assert "recipe `deepseek_v4`, 4 streams" in with_results(README, results)


def test_one_block_is_needed() -> None:
    with pytest.raises(ValueError, match=r"one block between .* found 0"):
        with_results("no block", ROOT / "benchmarks/results/junction.jsonl")


def _step(variant: str, milliseconds: float, **more: object) -> Line:
    size = dict(case="small", channels=8, layers=2, batch=1, positions=4, parameters=2e9, tokens_per_second=40)
    memory = dict(peak_bytes=3e9, activation_bytes=milliseconds * 1e7, where={"mhckit": 1.25})
    return dict(kind="training", variant=variant, milliseconds=milliseconds, **size, **memory, **sample.FACTS, **more)


def test_costs_are_beside_the_plain_residual_of_the_same_run(tmp_path: Path) -> None:
    results = tmp_path / "training.jsonl"
    append_lines(results, [_step("plain", 100.0), _step("mhckit", 107.5)])
    append_lines(results, [line | {"commit": "later"} for line in (_step("plain", 200.0), _step("mhckit", 210.0))])
    written = with_costs(f"{COST_BEGIN}\n{COST_END}", results)
    assert f"| {sample.FACTS['commit']} | C 8 | 100.0 | +7.5% |" in written
    assert "| later | C 8 | 200.0 | +5.0% |" in written
    assert "| mhckit | 210.0 | +5.0% | 40 | 3.0 | 2.1 (1.05x) | 1.2 |" in written and "107.5" not in written
    assert written.count("2 layers, C 8, 1 x 4 tokens, 2.0B parameters") == 1 and "commit later" in written


def test_two_runs_of_one_commit_are_two(tmp_path: Path) -> None:
    results = tmp_path / "training.jsonl"
    for plain, ours in ((100.0, 107.5), (200.0, 210.0)):
        append_lines(results, [_step("plain", plain), _step("mhckit", ours)])
    written = with_costs(f"{COST_BEGIN}\n{COST_END}", results)
    assert "| 100.0 | +7.5% |" in written and "| 200.0 | +5.0% |" in written
    assert "| mhckit | 210.0 |" in written and "| mhckit | 107.5 |" not in written


def test_a_run_without_the_plain_residual_has_nothing_to_be_beside(tmp_path: Path) -> None:
    results = tmp_path / "training.jsonl"
    append_lines(results, [_step("plain", 100.0), _step("mhckit", 107.5) | {"case": "another"}])
    with pytest.raises(ValueError, match=r"another at commit .* lacks the plain residual"):
        with_costs(f"{COST_BEGIN}\n{COST_END}", results)


def test_the_page_on_training_is_not_stale() -> None:
    page = ROOT / "docs" / "training.md"
    assert with_costs(page.read_text(), ROOT / "benchmarks/results/training.jsonl") == page.read_text(), "make readme"
