"""The builder of pages: valid HTML, text that stays text, a policy that fits, and nothing that is half written."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from inspections import HOSTILE, broken, hostile, inspection, sublayer

from mhckit.inspect.comparison import make_comparison
from mhckit.inspect.figures import write_picture
from mhckit.inspect.page import make_page
from mhckit.report import (
    Band,
    Columns,
    Details,
    Figure,
    Finding,
    Findings,
    Guide,
    Matrices,
    Page,
    Paragraph,
    Section,
    Series,
    Stack,
    Table,
    band_chart,
    bar_chart,
    line_chart,
    number,
    visible,
)
from mhckit.report.charts import thinned
from mhckit.report.scale import linear, log_ticks, logarithmic, nice_ticks
from mhckit.report.text import escape, json_in_html

VOID = {"meta", "link", "img"}
LOADING = ("src", "href", "srcset", "action", "data", "xlink:href", "poster")


class Outline(HTMLParser):
    """Every element in its place: ends match beginnings, ids are unique, addresses lead nowhere else."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.names: list[str] = []
        self.ids: list[str] = []
        self.handlers: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        for name, value in attrs:
            self.ids += [value or ""] if name == "id" else []
            self.handlers += [name] if name.startswith("on") or name == "style" else []
            self.addresses += [value or ""] if name in LOADING else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> has no beginning"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)


def _pages() -> dict[str, Page]:
    one_broken = inspection(sublayers=[sublayer(0), broken(1)])
    return {
        "inspection": make_page(inspection()),
        "broken": make_page(one_broken),
        "all broken": make_page(inspection(sublayers=[broken(0)])),
        "one sublayer": make_page(inspection(1)),
        "no sublayer": make_page(inspection(sublayers=[], findings=[], loss=None, mixing_depth=None)),
        "eight streams": make_page(inspection(2, 8)),
        "one stream": make_page(inspection(2, 1)),
        "hostile": make_page(hostile()),
        "comparison": make_comparison(inspection(), one_broken),
        "of other depth": make_comparison(inspection(2), inspection(5, 2)),
        "of other depth, alike": make_comparison(inspection(2), inspection(5)),
        "with nothing": make_comparison(inspection(), inspection(sublayers=[])),
        "hostile comparison": make_comparison(hostile(), hostile()),
    }


PAGES = _pages()


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_well_formed_and_load_nothing(name: str) -> None:
    html = PAGES[name].html()
    outline = Outline(html)
    assert outline.open == [] and html.startswith("<!DOCTYPE html>")
    assert outline.names[:2] == ["html", "head"] and outline.names.count("main") == 1
    assert len(set(outline.ids)) == len(outline.ids)
    assert outline.handlers == [], "the policy stops them"
    assert all(address.startswith(("#", "data:")) for address in outline.addresses)
    assert {address[1:] for address in outline.addresses if address.startswith("#")} <= set(outline.ids)
    assert "@import" not in html and "url(" not in html


def test_the_policy_knows_the_one_style_and_the_one_script() -> None:
    html = PAGES["inspection"].html()
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)[0]
    assert policy.startswith("default-src 'none'; img-src data:; ") and "unsafe" not in policy and "*" not in policy
    for element, rule in (("style", "style-src"), ("script", "script-src")):
        inside = re.findall(rf"<{element}>(.*?)</{element}>", html, re.DOTALL)
        assert len(inside) == 1
        digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy
    assert html.index("Content-Security-Policy") < html.index("<style>")


@pytest.mark.parametrize("name", ["hostile", "hostile comparison"])
def test_hostile_text_stays_text(name: str) -> None:
    html = PAGES[name].html()
    outline = Outline(html)
    assert "img" not in outline.names and "b" not in outline.names
    assert outline.names.count("script") == 1 + html.count('<script type="application/json">')
    assert sum(HOSTILE in text for text in outline.text) > 10


def test_every_part_escapes_what_it_is_given() -> None:
    bar = Figure(bar_chart([(HOSTILE, 1.0)], unit=HOSTILE), HOSTILE, HOSTILE, HOSTILE)
    series = [Series(HOSTILE, [1, 2], [1.0, 2.0]), Series("other", [1], [1.0])]
    lines = line_chart(series, x_label=HOSTILE, y_label=HOSTILE, guides=[Guide(1.0, HOSTILE)])
    parts = [
        bar, Figure(lines, HOSTILE, HOSTILE, wide=True), Paragraph(HOSTILE),
        Findings([Finding(HOSTILE, HOSTILE, "x" + HOSTILE, HOSTILE)]), Details(HOSTILE, Paragraph(HOSTILE)),
        Table([HOSTILE], [[HOSTILE, HOSTILE]], HOSTILE), Columns([Paragraph(HOSTILE)]),
        Matrices(HOSTILE, [HOSTILE], [Stack(HOSTILE, [[[1.0]]], HOSTILE)], HOSTILE, HOSTILE, HOSTILE),
    ]  # fmt: skip
    for part in parts:
        names = Outline(part.html()).names
        assert "img" not in names and "b" not in names, type(part)
        assert names.count("script") == isinstance(part, Matrices)
    page = Page(HOSTILE, [Section(HOSTILE, [], HOSTILE)], HOSTILE, {HOSTILE: HOSTILE})
    assert Outline(page.html()).names.count("script") == 1


def test_text_that_is_no_text_is_replaced() -> None:
    assert escape("a\x00b\ud800c\x1b[31m") == "a\ufffdb\ufffdc\ufffd[31m"
    Page("\ud800", [Section("\udfff", [Paragraph("\x00")])]).html().encode("utf-8")
    assert visible(" a\n\t") == "␣a↵⇥"


def test_json_cannot_end_its_element_and_comes_back() -> None:
    data = {"name": HOSTILE, "values": [1.5, math.nan, math.inf, -math.inf]}
    text = json_in_html(data)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"name": HOSTILE, "values": [1.5, "NaN", "infinite", "-infinite"]}


def test_numbers_as_people_read_them() -> None:
    values = (0.123456, 1234.5, 1e-7, math.nan, math.inf, None, 0.0)
    assert [*map(number, values)] == ["0.123", "1,234", "1e-07", "NaN", "infinite", "not measured", "0"]


def test_a_gap_is_no_line_and_is_said() -> None:
    y = [1.0, 2.0, math.nan, 3.0, 4.0, math.inf, 5.0]
    drawing = line_chart([Series("a", range(7), y)], x_label="x", y_label="y")
    path = re.findall(r'class="line c0" d="([^"]*)"', drawing.svg)[0]
    assert path.count("M") == 2 and path.count("L") == 2
    assert drawing.svg.count('class="dots') == 1, "a point alone is a dot"
    assert drawing.remark == "2 values are not drawn (crosses at the lower edge): NaN, infinite."
    assert "nan" not in drawing.svg and "inf" not in drawing.svg
    band = band_chart(Band([1, 2, 3], [[0.0] * 7, [math.nan] * 7, [1.0] * 7]), x_label="x", y_label="y")
    assert band.remark.startswith("1 value is not drawn") and "nan" not in band.svg
    assert bar_chart([("a", math.nan), ("b", 1.0)]).remark == "1 value is not finite."


def test_a_logarithmic_axis_says_where_zero_is() -> None:
    drawing = line_chart([Series("a", [1, 2, 3], [0.0, 0.1, -1.0])], x_label="x", y_label="y", log=True)
    assert drawing.note == "0 is drawn at the lower edge." and "1 value is not drawn" in drawing.remark
    assert not line_chart([Series("a", [1, 2], [0.0, 0.1])], x_label="x", y_label="y").note


@pytest.mark.parametrize(
    "values", [[], [math.nan], [0.0], [5.0, 5.0], [1e-300, 1e300], [-1.0, -1.0], [1e-320], [0.5, -1.7e308, 1.7e308]]
)
@pytest.mark.parametrize("log", [False, True])
def test_axes_hold_whatever_comes(values: list[float], log: bool) -> None:
    drawing = line_chart([Series("a", range(len(values)), values)], x_label="x", y_label="y", log=log)
    numbers = [float(text) for text in re.findall(r"[ ML](-?[0-9.]+)", drawing.svg)]
    assert all(-20 <= value <= 480 for value in numbers) and "nan" not in drawing.svg


def test_scales_place_values_where_they_belong() -> None:
    scale = linear([0.0, 10.0], 100.0, 200.0)
    assert [scale.place(value) for value in (0, 5, 10)] == [100, 150, 200]
    down = logarithmic([0.01, 1.0], 200.0, 100.0)
    assert down.place(0.1) == pytest.approx(150) and down.place(0.0) == 200
    assert nice_ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(-3.0, 47.0) == [0, 10, 20, 30, 40]
    assert log_ticks(1e-6, 1e-1) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
    assert log_ticks(0.6, 3.0) == pytest.approx([1, 2])


def test_long_lines_are_thinned_and_keep_their_peaks() -> None:
    points = [(float(step), 1.0) for step in range(100_000)]
    points[31_415] = (31_415.0, 99.0)
    points[50_000] = (50_000.0, math.nan)
    few = thinned(points)
    assert len(few) <= 800 and (31_415.0, 99.0) in few and any(math.isnan(y) for _, y in few)
    assert thinned(points[:10]) == points[:10] and [x for x, _ in few] == sorted(x for x, _ in few)


def test_stacks_must_fit_their_names() -> None:
    with pytest.raises(ValueError, match="'mean' must have 2 matrices, got 1"):
        Matrices("sublayer", ["a", "b"], [Stack("mean", [[[1.0]]])], "to", "from")
    assert Stack("doubly stochastic", [[[0.5]]]).data()["limit"] == 1.0
    assert Stack("signed", [[[-0.25, 0.1]]]).data()["limit"] == 0.25
    assert Stack("next to nothing", [[[-1e-5, 1e-5]]]).data()["limit"] == 0.05
    assert Stack("broken", [[[math.nan]]]).data()["limit"] == 1.0


def test_a_page_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "page.html"
    assert Page("title one", []).write(path) == path and "title one" in path.read_text(encoding="utf-8")

    class Failing:
        def html(self) -> str:
            raise RuntimeError("no part")

    with pytest.raises(RuntimeError, match="no part"):
        Page("title two", [Section("", [Failing()])]).write(path)
    assert "title one" in path.read_text(encoding="utf-8") and [*path.parent.iterdir()] == [path]
    with path.open(encoding="utf-8") as reader:  # who reads it now goes on reading the old one
        Page("title three", []).write(path)
        assert "title one" in reader.read() and "title three" in path.read_text(encoding="utf-8")


def test_findings_come_first_and_the_worst_of_them_first() -> None:
    html = make_page(inspection()).html()
    assert html.index("column sums off by 0.08") < html.index("all is well") < html.index("How this sublayer mixes")
    assert "Threshold: more than 1e-2" in html


def test_a_comparison_says_what_differs() -> None:
    html = make_comparison(inspection(2), inspection(5, 2, recipe={"iterations": 3})).html()
    assert "<td>2</td><td>5</td><td>+3</td>" in html
    assert '<tr class="marked"><th scope="row">iterations</th><td>20</td><td>3</td></tr>' in html
    assert "percent of the depth" in html and "B - A, mean over tokens" not in html
    assert "B - A, mean over tokens" in make_comparison(inspection(), inspection()).html()


def test_a_comparison_says_whether_both_read_the_same() -> None:
    def said(**changes: Any) -> str:
        return make_comparison(inspection(), inspection(**changes)).html()

    assert "seen through the same tokens<" in said(name="another")
    assert "seen through one text, as different tokens<" in said(facts={"tokens": "4 x 16, bytes"})
    assert "seen through different texts" in said(text="another text")
    assert "<td>2 of 3 sublayers</td><td>streams never fully mix</td><td></td>" in said(mixing_depth=None)


def test_the_picture(tmp_path: Path) -> None:
    """Also of a model whose name matplotlib takes for mathematics, and whose numbers are none."""
    path = write_picture(inspection(name="$x^{2$ \x00", sublayers=[sublayer(0), broken(1)]), tmp_path / "report.png")
    assert path.read_bytes().startswith(b"\x89PNG") and [*tmp_path.iterdir()] == [path]


def test_a_picture_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        write_picture(inspection(sublayers=[]), tmp_path / "report.png")
