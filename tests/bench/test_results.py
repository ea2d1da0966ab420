"""Lines of results, and the tables and pictures made of them."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import sample
from rich.console import Console

from mhckit.bench.results import append_lines, case_label, case_of, commits_of, latest, newest, of_kind, read_lines
from mhckit.bench.tables import tables


def _printed(lines: list[dict]) -> str:
    console = Console(width=140, file=io.StringIO())
    for part in tables(lines):
        console.print(part)
    return console.file.getvalue()


def test_lines_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_lines(path, sample.lines()[:2])
    append_lines(path, sample.lines()[2:])
    assert read_lines(path) == sample.lines()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ('{"kind": "host", "commit": "a"}\n\n{"kind":\n', "line 3 of .* is no JSON"),
        ("[1]\n", "line 1 of .* has no kind and commit"),
        ('{"kind": "host"}\n', "line 1 of .* has no kind and commit"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_lines(path)


def test_newest_is_the_commit_measured_last_and_its_later_run() -> None:
    old = [line | {"commit": "old"} for line in sample.lines()]
    again = [sample.FACTS | line for line in ({"kind": "ceiling"}, *sample.sublayer(sample.SMALL, 1.0, 2.0))]
    kept = newest([*old, *sample.lines(), *again])
    assert {line["commit"] for line in kept} == {"new"}
    assert [line["microseconds"] for line in of_kind(kept, "junction")] == [1.0, 2.0, 3.0]
    assert len(of_kind(kept, "kernel")) == 2


def test_newest_of_a_kind_is_the_commit_that_measured_it_last() -> None:
    later = [line | {"commit": "later"} for line in sample.recipes()]
    measured = [*sample.lines(), *later]
    assert (
        {line["commit"] for line in newest(measured)}
        == {"later"}
        == {line["commit"] for line in newest(measured, "recipe")}
    )
    assert newest(measured, "junction") == newest(sample.lines())
    assert newest(measured, "decode") == newest(measured), "there are none"


def test_latest_is_the_last_of_each_shape() -> None:
    again = [sample.FACTS | line | {"commit": "later"} for line in sample.sublayer(sample.SMALL, 1.0, 2.0)]
    kept = latest([*sample.lines(), *again], "junction")
    assert [line["microseconds"] for line in kept] == [1.0, 2.0, 3.0, 110.0, 290.0, 400.0]
    assert commits_of(kept) == "later, new"
    assert latest(sample.lines(), "decode") == []


@pytest.mark.parametrize("name", ["device", "torch", "triton", "python", "dtype"])
def test_what_was_measured_elsewhere_is_not_beside_it(name: str) -> None:
    """Also a shape that was measured nowhere else."""
    elsewhere = [line | {name: "another"} for line in sample.lines()]
    here = [sample.FACTS | line for line in sample.sublayer(sample.SMALL, 1.0, 2.0)]
    assert latest([*elsewhere, *here], "junction") == here


def test_absent_is_no_measurement() -> None:
    assert [line["baseline"] for line in of_kind(sample.lines(), "baseline")] == ["eager"]


def test_labels() -> None:
    assert case_label(case_of(sample.SMALL)) == "2 x 3"
    assert case_label(case_of(sample.NORMED | {"streams": 2})) == "2 x 3, N = 2, norm"


def test_tables_show_everything_that_was_measured() -> None:
    text = _printed(sample.lines())
    for shown in ("25.0%", "32.0", "31.2%", "50.0%", "3.00x", "2.00%", "33.0", "12.50 s", "0 kernels compiled"):
        assert shown in text
    rows = [re.split("  +", line.strip()) for line in text.splitlines()]
    assert ["first call of junction, empty cache", "7.00 s"] in rows
    assert ["warm-up, empty cache", "4.25 s, 18 kernels compiled"] in rows
    assert ["first call of junction, after a warm-up", "0.12 s, 0 kernels compiled"] in rows
    assert "absent: liger (No module named 'liger_kernel')" in text
    assert "not a kernel of ours in the junction: Memset (Device)" in text
    assert "refused: junction, 7 x 7: WrongResult: output 0" in text


def test_tables_of_recipes_and_of_inference() -> None:
    rows = [re.split("  +", line.strip()) for line in _printed([*sample.recipes(), *sample.decode()]).splitlines()]
    assert ["2 x 3", "deepseek_v41", "forward", "60.0", "0.0", "40.0", "66.7%", "6", "75.0%"] in rows
    names = ["mhckit", "reference", "on the host", "compiled"]
    assert ["recipe", "tokens x C", "target us", *names] in rows
    assert ["deepseek_v41", "1 x 3", "12.0", "9.0 (2)", "251.0 (99)", "900.0 (99)", "44.0 (7)"] in rows
    assert ["deepseek_v41", "2 x 3", "10.0 (2)", "252.0 (99)", "900.0 (99)"] in rows


def test_tables_without_lines_are_left_out() -> None:
    assert "Others" not in _printed(sample.lines()[:2])
    assert "Recipes" not in _printed(sample.lines()) and "Inference" not in _printed(sample.lines())


def test_pictures(tmp_path: Path) -> None:
    plots = pytest.importorskip("mhckit.bench.plots", reason="needs matplotlib, which `make` installs")
    written = plots.write_plots(sample.lines(), tmp_path / "plots")
    assert [path.name for path in written] == ["kernels.png", "ceiling.png", "speedup.png"]
    more = plots.write_plots([*sample.lines(), *sample.recipes(), *sample.decode()], tmp_path / "plots")
    assert [path.name for path in more[3:]] == ["recipes.png", "inference.png"] and more[:3] == written
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in more)


@pytest.mark.parametrize(("kind", "picture"), [
    ("kernel", "kernels.png"), ("junction", "ceiling.png"), ("recipe", "recipes.png"), ("decode", "inference.png"),
])  # fmt: skip
def test_pictures_of_one_part_alone(kind: str, picture: str, tmp_path: Path) -> None:
    """As `mhckit bench --only` leaves it."""
    plots = pytest.importorskip("mhckit.bench.plots", reason="needs matplotlib, which `make` installs")
    measured = [*sample.lines(), *sample.recipes(), *sample.decode()]
    lines = [line for line in measured if line["kind"] in (kind, "ceiling")]
    assert [path.name for path in plots.write_plots(lines, tmp_path)] == [picture]


def test_bars_of_recipes_and_of_inference() -> None:
    plots = pytest.importorskip("mhckit.bench.plots", reason="needs matplotlib, which `make` installs")
    recipes, decode = plots._recipes(sample.recipes()), plots._decode(sample.decode())
    assert _bars(recipes) == {"deepseek_v4": [1.0], "deepseek_v41": [0.75]}
    assert _bars(decode) == {"deepseek_v41, C 3": [9.0, 10.0]}


def _bars(figure: Any) -> dict[str, list[float]]:
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in figure.axes[0].containers}
