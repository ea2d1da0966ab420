"""Two inspections in one page, side by side. They may differ in depth, in streams and in recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from mhckit.report import (
    Columns,
    Figure,
    Group,
    Guide,
    Page,
    Part,
    Section,
    Series,
    Stack,
    Table,
    Tip,
    line_chart,
    number,
)

from .flow import flow_drawing
from .measured import Inspection, Sublayer
from .page import DEPTH, facts, findings_section, matrices_of, mixing_depth

_Pair = tuple[Inspection, Inspection]


def write_comparison(first: Inspection, second: Inspection, path: Path) -> Path:
    """Write the page of both; returns its path."""
    return make_comparison(first, second).write(path)


def make_comparison(first: Inspection, second: Inspection) -> Page:
    both = (first, second)
    sections = [_summary(both), _findings(both)]
    if first.sublayers and second.sublayers:
        sections += [_curves(both), _matrices(both), _flow(both)]
    sections.append(_settings(both))
    return Page(
        f"{first.name} beside {second.name}",
        sections,
        subtitle=f"Two models with hyper-connections, seen through {_texts(both)}",
        facts={f"{letter}": each.name for letter, each in zip("AB", both, strict=True)},
    )


def _texts(both: _Pair) -> str:
    """A report that was made earlier may be of another text, and a tokenizer makes other tokens of the same one."""
    first, second = both
    if first.text != second.text:
        return "different texts: their losses and matrices are not of the same tokens"
    same = first.facts.get("tokens") == second.facts.get("tokens")
    return "the same tokens" if same else "one text, as different tokens"


def _summary(both: _Pair) -> Section:
    rows = []
    for name, measure in _MEASURES.items():
        one, other = (measure(each) for each in both)
        rows.append([name, number(one, 4), number(other, 4), _difference(one, other)])
    rows.append(["mixing depth", *map(mixing_depth, both), _difference(*(each.mixing_depth for each in both))])
    lead = "The worst of all sublayers, except where a row says otherwise."
    return Section("In numbers", [Table(["", "A", "B", "B - A"], rows)], lead)


def _worst(of: Callable[[Sublayer], float]) -> Callable[[Inspection], float | None]:
    def worst(inspection: Inspection) -> float | None:
        values = [of(each) for each in inspection.sublayers]
        bad = [value for value in values if not math.isfinite(value)]
        return bad[0] if bad else max(values, default=None)

    return worst


_MEASURES: dict[str, Callable[[Inspection], float | None]] = {
    "sublayers": lambda each: len(each.sublayers),
    "streams": lambda each: each.streams,
    "loss on the text": lambda each: each.loss,
    "composite gain of the signal": _worst(lambda each: each.gain_forward),
    "composite gain of the gradient": _worst(lambda each: each.gain_backward),
    "error of row sums": _worst(lambda each: each.row_error),
    "error of column sums": _worst(lambda each: each.column_error),
    "similarity of streams after the last sublayer": lambda each: (
        each.sublayers[-1].similarity if each.sublayers else None
    ),
    "numbers that are not finite": lambda each: sum(sublayer.nonfinite for sublayer in each.sublayers),
}


def _difference(one: float | None, other: float | None) -> str:
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return ""
    return "equal" if one == other else f"{other - one:+.3g}"


def _findings(both: _Pair) -> Section:
    groups = [
        Group(f"{letter}: {each.name}", findings_section(each, linked=False).parts)
        for letter, each in zip("AB", both, strict=True)
    ]
    return Section("Findings", [Columns(groups)])


def _curves(both: _Pair) -> Section:
    """Over the sublayers, or over the part of the depth where depths differ."""
    signal = (lambda s: s.gain_forward, "Composite gain of the signal", "gain", True, (0.5, 2.0), 1.0)
    gradient = (lambda s: s.gain_backward, "Composite gain of the gradient", "gain", True, (0.5, 2.0), 1.0)
    others = (
        (lambda s: s.row_error, "Error of row sums", "largest |sum - 1|", True, (), None),
        (lambda s: s.column_error, "Error of column sums", "largest |sum - 1|", True, (), None),
        (lambda s: s.identity_distance, "Distance to the identity", "distance", False, (0.0,), None),
        (lambda s: s.similarity, "How alike the streams are", "mean cosine", False, (0.0, 1.0), None),
    )
    figures = [_curve(both, *each) for each in (signal, gradient, *others)]
    lead = "" if _same_depth(both) else "The two differ in depth: 0 is the first sublayer of each, 100 the last."
    return Section("Over depth", [Columns(figures)], lead)


def _curve(
    both: _Pair, of: Callable[[Sublayer], float], title: str, label: str, log: bool, include: Sequence[float],
    guide: float | None,
) -> Figure:  # fmt: skip
    same = _same_depth(both)
    x_label = DEPTH if same else "percent of the depth"
    series = []
    for index, (letter, each) in enumerate(zip("AB", both, strict=True)):
        values = [of(sublayer) for sublayer in each.sublayers]
        series.append(
            Series(f"{letter}: {each.name}", _places(len(values), same), values, index, ("", "dashed")[index])
        )
    guides = [] if guide is None else [Guide(guide, f"{guide:g}")]
    tips = _tips(both, of) if same else []
    drawing = line_chart(series, x_label=x_label, y_label=label, log=log, include=include, guides=guides, tips=tips)
    ends = " and ".join(number(each.y[-1]) for each in series)
    return Figure(drawing, title, f"Two curves over depth, which end at {ends}.")


def _tips(both: _Pair, of: Callable[[Sublayer], float]) -> list[Tip]:
    pairs = zip(both[0].sublayers, both[1].sublayers, strict=True)
    return [
        Tip(index, f"{index}: {one.name}\nA {number(of(one))}, B {number(of(other))}")
        for index, (one, other) in enumerate(pairs, 1)
    ]


def _places(count: int, same: bool) -> list[float]:
    return [index + 1 if same else 100 * index / max(count - 1, 1) for index in range(count)]


def _matrices(both: _Pair) -> Section:
    """In one choice with their difference where they are of one kind, else in one for each."""
    first, second = both
    if not _same_depth(both) or first.streams != second.streams:
        parts: list[Part] = [_own_matrices(letter, each) for letter, each in zip("AB", both, strict=True)]
        return Section(
            "Mixing", parts, "A above, B below: they differ in depth or streams, so each has its own choice."
        )
    pairs = list(zip(first.sublayers, second.sublayers, strict=True))
    stacks = []
    for kind, name in (("mean", "mean over tokens"), ("composite", "composite")):
        stacks += [
            Stack(f"A, {name}", [getattr(one, kind) for one, _ in pairs]),
            Stack(f"B, {name}", [getattr(other, kind) for _, other in pairs]),
            Stack(f"B - A, {name}", [_minus(getattr(other, kind), getattr(one, kind)) for one, other in pairs]),
        ]
    return Section(
        "Mixing", [matrices_of(first.sublayers, stacks)], "Rows are streams written to, columns streams read from."
    )


def _own_matrices(letter: str, inspection: Inspection) -> Part:
    sublayers = inspection.sublayers
    stacks = [
        Stack(f"{letter}, mean over tokens", [each.mean for each in sublayers]),
        Stack(f"{letter}, one token", [each.of_token for each in sublayers]),
        Stack(f"{letter}, composite", [each.composite for each in sublayers]),
    ]
    return matrices_of(sublayers, stacks)


def _minus(one: list[list[float]], other: list[list[float]]) -> list[list[float]]:
    return [[a - b for a, b in zip(row, beside, strict=True)] for row, beside in zip(one, other, strict=True)]


def _flow(both: _Pair) -> Section:
    alt = "Streams as lanes; lines to and from the sublayers below show what each one reads and writes."
    figures = [
        Figure(flow_drawing(each.sublayers, each.streams), f"{letter}: {each.name}", alt, wide=True)
        for letter, each in zip("AB", both, strict=True)
    ]
    return Section(
        "Flow", figures, "Left of a box what a sublayer reads, right of it where it writes. Widths are shares."
    )


def _settings(both: _Pair) -> Section:
    tables = []
    for title, maps in (("Facts", [facts(each) for each in both]), ("Recipe", [each.recipe for each in both])):
        one, other = maps
        names = list(dict.fromkeys([*one, *other]))
        rows = [[name, one.get(name, "none"), other.get(name, "none")] for name in names]
        marked = frozenset(index for index, (_, a, b) in enumerate(rows) if a != b)
        tables.append(Table(["", "A", "B"], rows, caption=title, numbers=False, marked=marked))
    return Section("What they are", tables, "Rows that differ are marked.")


def _same_depth(both: _Pair) -> bool:
    return len(both[0].sublayers) == len(both[1].sublayers)
