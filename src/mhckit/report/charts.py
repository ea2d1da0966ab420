"""Charts as SVG: lines, bands of quantiles, bars. Colours are classes of the style sheet: dark pages have their own.

A value that is no number, or has no place on a logarithmic axis, is a gap in its line, a cross at the lower edge, and a
remark below the figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .scale import Scale, linear, logarithmic
from .text import attributes, escape, number

COLORS = 8  # classes c0 ... c7
_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 42
_BAR_LABEL, _BAR_ROW, _BAR_VALUE = 150, 25, 70
_LONGEST_LABEL = 23
_MOST_POINTS = 800  # of a line; more than that cannot be told apart


@dataclass(frozen=True)
class Series:
    """A line: y over x."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    style: str = ""  # "", "dashed", "faint" or "dots"; what is faint is left out of the legend
    derived: bool = False  # from another line that is drawn too: its gaps are not counted again


@dataclass(frozen=True)
class Band:
    """Quantiles over x, seven at each: least, 5%, 25%, median, 75%, 95%, most."""

    x: Sequence[float]
    quantiles: Sequence[Sequence[float]]
    color: int = 0


@dataclass(frozen=True)
class Guide:
    """A line across, such as a threshold."""

    y: float
    name: str


@dataclass(frozen=True)
class Tip:
    """What is said of a place on the x axis when it is pointed at."""

    x: float
    text: str


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    name: str
    classes: str


@dataclass(frozen=True)
class Drawing:
    """The inside of an SVG element, its legend, a note on how to read it, a remark on what could not be drawn."""

    svg: str
    size: tuple[float, float]
    legend: tuple[Key, ...] = ()
    note: str = ""
    remark: str = ""


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    log: bool = False,
    include: Iterable[float] = (),
    guides: Sequence[Guide] = (),
    tips: Sequence[Tip] = (),
) -> Drawing:
    """Lines over one x axis; ``include`` names values of y that the axis must have."""
    include = (*include, *(guide.y for guide in guides))
    values = [value for each in series for value in each.y]
    plot = _Plot([x for each in series for x in each.x], values, x_label, y_label, log, include)
    plot.draw_guides(guides)
    for each in series:
        plot.draw_series(each)
    plot.draw_tips(tips)
    shown = [each for each in series if each.style != "faint"]
    keys = [Key(each.name, f"c{each.color % COLORS} {each.style}".strip()) for each in shown]
    keys += [Key(guide.name, "guide") for guide in guides]
    return plot.drawing(tuple(keys) if len(keys) > 1 else ())


def band_chart(
    band: Band, *, x_label: str, y_label: str, include: Iterable[float] = (), tips: Sequence[Tip] = ()
) -> Drawing:
    """The median as a line, the middle half and the middle nine tenths as bands, the extremes as thin lines."""
    plot = _Plot(band.x, [q for each in band.quantiles for q in each], x_label, y_label, False, include)
    columns: list[list[float]] = [list(column) for column in zip(*band.quantiles, strict=True)]
    for low, high, kind in ((1, 5, "wide"), (2, 4, "narrow")):
        plot.draw_area(band.x, columns[low], columns[high], f"band {kind} c{band.color % COLORS}")
    for extreme in (0, 6):
        plot.draw_line(band.x, columns[extreme], f"line extreme c{band.color % COLORS}")
    plot.draw_series(Series("", band.x, columns[3], band.color))
    plot.draw_tips(tips)
    return plot.drawing(())


def bar_chart(
    bars: Sequence[tuple[str, float]], *, unit: str = "", guide: float | None = None, color: int = 0
) -> Drawing:
    """Bars from the left, a row for each, in the order given; ``guide`` is a line down all of them."""
    known = [value for _, value in bars if math.isfinite(value)]
    end = _WIDTH - _BAR_VALUE
    scale = Scale(0.0, max([*known, guide or 0.0, 1e-30]), _BAR_LABEL, end)
    height = len(bars) * _BAR_ROW + 8
    parts = [] if guide is None else [f'<path class="guide" d="M{_tidy(scale.place(guide))} 2V{height}"/>']
    for index, (label, value) in enumerate(bars):
        top, middle = index * _BAR_ROW + 8, index * _BAR_ROW + 8 + _BAR_ROW / 2 - 3
        said = f"{number(value)}{unit}"
        parts.append(_text(_BAR_LABEL - 8, middle + 4, _short(label), "label end"))
        if math.isfinite(value):
            width = max(scale.place(value) - _BAR_LABEL, 1)
            box = attributes(x=_BAR_LABEL, y=top, width=_tidy(width), height=_BAR_ROW - 8, rx=3)
            parts.append(f'<rect class="bar c{color % COLORS}"{box}/>')
            parts.append(_text(_BAR_LABEL + width + 5, middle + 4, said, "label"))
        else:
            parts.append(_text(_BAR_LABEL + 5, middle + 4, said, "label bad"))
        hit = attributes(x=0, y=top - 4, width=_WIDTH, height=_BAR_ROW, data_tip=f"{label}: {said}")
        parts.append(f'<rect class="hit"{hit}/>')
    missing = len(bars) - len(known)
    remark = f"{_count(missing, 'value')} not finite." if missing else ""
    return Drawing("".join(parts), (_WIDTH, height), remark=remark)


class _Plot:
    """The area between two axes, and what has been drawn there so far."""

    def __init__(
        self, x: Iterable[float], y: Sequence[float], x_label: str, y_label: str, log: bool, include: Iterable[float]
    ) -> None:
        self.x = linear(x, _LEFT, _WIDTH - _RIGHT, room=0.02)
        bottom = _HEIGHT - _BOTTOM
        self.y = logarithmic(y, bottom, _TOP, include) if log else linear(y, bottom, _TOP, include, room=0.06)
        self.parts = [self._axes(x_label, y_label)]
        self.undrawn: list[tuple[float, float]] = []
        self.at_zero = log and any(value == 0 for value in y)

    def draw_guides(self, guides: Iterable[Guide]) -> None:
        for guide in guides:
            self.parts.append(f'<path class="guide" d="M{_LEFT} {_tidy(self.y.place(guide.y))}H{_WIDTH - _RIGHT}"/>')

    def draw_series(self, series: Series) -> None:
        """Counts what cannot be drawn, then draws the rest."""
        if not series.derived:
            self.undrawn += [(x, y) for x, y in zip(series.x, series.y, strict=True) if not self.y.drawable(y)]
        color = f"c{series.color % COLORS}"
        if series.style == "dots":
            self._draw_dots(zip(series.x, series.y, strict=True), color)
        else:
            self.draw_line(series.x, series.y, f"line {series.style} {color}".replace("  ", " "))

    def draw_line(self, x: Sequence[float], y: Sequence[float], classes: str) -> None:
        path, alone = [], []
        for run in _runs(thinned(list(zip(x, y, strict=True))), self.y):
            if len(run) == 1:
                alone += run
            else:
                path.append("M" + "L".join(self._place(*point) for point in run))
        if path:
            self.parts.append(f'<path class="{classes}" d="{"".join(path)}"/>')
        self._draw_dots(alone, next(each for each in classes.split() if each[1:].isdigit()))

    def draw_area(self, x: Sequence[float], low: Sequence[float], high: Sequence[float], classes: str) -> None:
        path = []
        for run in _runs([*zip(x, low, high, strict=True)], self.y):
            there = [self._place(place, bottom) for place, bottom, _ in run]
            back = [self._place(place, top) for place, _, top in reversed(run)]
            path.append("M" + "L".join([*there, *back]) + "Z")
        self.parts.append(f'<path class="{classes}" d="{"".join(path)}"/>')

    def draw_tips(self, tips: Sequence[Tip]) -> None:
        """A strip as wide as the space around each place."""
        places = [self.x.place(tip.x) for tip in tips]
        for index, (tip, place) in enumerate(zip(tips, places, strict=True)):
            left = (places[index - 1] + place) / 2 if index else _LEFT
            right = (places[index + 1] + place) / 2 if index + 1 < len(places) else _WIDTH - _RIGHT
            box = attributes(x=_tidy(left), y=_TOP, width=_tidy(right - left), height=_HEIGHT - _BOTTOM - _TOP)
            self.parts.append(f'<rect class="hit"{box}{attributes(data_tip=tip.text)}/>')

    def drawing(self, legend: tuple[Key, ...]) -> Drawing:
        crosses = dict.fromkeys(_tidy(self.x.place(x)) for x, _ in self.undrawn)
        bottom = _HEIGHT - _BOTTOM
        cross = "".join(f"M{x} {bottom - 9}m-4 0l8 8m0 -8l-8 8" for x in crosses)
        if cross:
            self.parts.append(f'<path class="cross" d="{cross}"/>')
        return Drawing("".join(self.parts), (_WIDTH, _HEIGHT), legend, self._note(), self._remark())

    def _remark(self) -> str:
        if not self.undrawn:
            return ""
        what = ", ".join(dict.fromkeys(number(y) for _, y in self.undrawn[:50]))
        return f"{_count(len(self.undrawn), 'value')} not drawn (crosses at the lower edge): {what}."

    def _note(self) -> str:
        return "0 is drawn at the lower edge." if self.at_zero else ""

    def _place(self, x: float, y: float) -> str:
        return f"{_tidy(self.x.place(x))} {_tidy(self.y.place(y))}"

    def _draw_dots(self, points: Iterable[tuple[float, float]], color: str) -> None:
        dots = [f"M{self._place(x, y)}h0" for x, y in points if self.y.drawable(y)]
        if dots:
            self.parts.append(f'<path class="dots {color}" d="{"".join(dots)}"/>')

    def _axes(self, x_label: str, y_label: str) -> str:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        parts, lines = [], []
        for tick in self.y.ticks():
            place = _tidy(self.y.place(tick))
            lines.append(f"M{_LEFT} {place}H{right}")
            parts.append(_text(_LEFT - 7, place + 4, f"{tick:.6g}", "label end"))
        for tick in self.x.ticks():
            place = _tidy(self.x.place(tick))
            lines.append(f"M{place} {bottom}v4")
            parts.append(_text(place, bottom + 17, _thousands(tick), "label middle"))
        parts.append(_text((_LEFT + right) / 2, _HEIGHT - 5, x_label, "axis middle"))
        turned = f' transform="translate(11 {(_TOP + bottom) / 2}) rotate(-90)"'
        parts.append(f'<text class="axis middle"{turned}>{escape(y_label)}</text>')
        parts.append(f'<path class="grid" d="{"".join(lines)}"/><path class="base" d="M{_LEFT} {bottom}H{right}"/>')
        return "".join(parts)


def thinned(points: list[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many points, of a longer line the lowest and the highest of each stretch, so that no peak is lost.

    A stretch with a value that is none keeps that one too, as a gap.
    """
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 3))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        known = [point for point in stretch if math.isfinite(point[1])]
        chosen = [point for point in stretch if not math.isfinite(point[1])][:1]
        if known:
            chosen += [min(known, key=lambda point: point[1]), max(known, key=lambda point: point[1])]
        kept += sorted(set(chosen))
    return kept


def _runs(points: list[tuple[float, ...]] | list[tuple[float, float]], scale: Scale) -> list[list[tuple[float, ...]]]:
    """Stretches without a gap."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for point in points:
        if all(scale.drawable(value) for value in point[1:]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _text(x: float, y: float, text: str, classes: str) -> str:
    return f'<text class="{classes}" x="{_tidy(x)}" y="{_tidy(y)}">{escape(text)}</text>'


def _tidy(value: float) -> float:
    rounded = round(value, 1)
    return int(rounded) if rounded == int(rounded) else rounded


def _thousands(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 and value == int(value) else f"{value:.6g}"


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"


def _count(count: int, what: str) -> str:
    return f"1 {what} is" if count == 1 else f"{count} {what}s are"
