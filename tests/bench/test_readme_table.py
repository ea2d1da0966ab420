"""The README's results are those that are committed."""

from __future__ import annotations

from pathlib import Path

import pytest
import sample

from mhckit.bench.readme import BEGIN, END, NOTHING, TRACE_BEGIN, TRACE_END, with_results, with_trace
from mhckit.bench.results import append_lines

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


def test_without_results_it_says_so(tmp_path: Path) -> None:
    assert with_results(README, tmp_path / "none.jsonl") == f"before\n{BEGIN}\n{NOTHING}\n{END}\nafter\n"


def test_results_of_the_newest_commit(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append_lines(results, [line | {"commit": "old", "device": "Other GPU"} for line in sample.lines()])
    append_lines(results, sample.lines())
    written = with_results(README, results)
    assert "Sample GPU" in written and "commit new" in written and "4.0 TB/s" in written
    assert "Other GPU" not in written and "stale" not in written
    assert "| 2 x 3 | 100 (50%) | 200 (50%) | 300 (50%) | 5 | 2.0% | 3.0x |" in written
    assert "| 2 x 3, norm | 110 (50%) | 290 (50%) | 400 (50%) | 5 |  |  |" in written
    assert "| F1 | 40 (25%) | 10 |" in written and "| F1 | 50" not in written
    assert "forward 33 us, backward 44 us, without gradients 22 us" in written and "takes 7 s to compile" in written
    assert with_results(written, results) == written


def test_one_block_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one block between .* found 0"):
        with_results("no block", tmp_path / "none.jsonl")
