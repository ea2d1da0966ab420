"""The way through the streams, as a drawing over depth: what each sublayer reads, where it writes, how streams mix.

Streams are lanes from left to right, sublayers stand below them. Widths of lines are shares. Lines of one colour and
about one width are one path of the SVG, so that a model of a hundred sublayers has a few hundred elements.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from mhckit.report import Drawing
from mhckit.report.text import attributes, number

from .measured import Sublayer

_LANE, _TOP, _LEFT = 30, 24, 74
_NODE_DISTANCE, _NODE_HEIGHT = 66, 24
_NARROWEST, _WIDEST, _WIDTH = 52, 120, 990
_THICKEST = 10.0
_APART = 19.0  # the outermost of the lines that meet a box, from its middle
_STEP = 0.5  # widths are multiples of this; what is thinner than one is not drawn
_COLORS = 8

_Lines = dict[tuple[str, float], list[str]]


def flow_drawing(sublayers: Sequence[Sublayer], streams: int) -> Drawing:
    column = min(max(_WIDTH / max(len(sublayers), 1), _NARROWEST), _WIDEST)
    node = _TOP + (streams - 1) * _LANE + _NODE_DISTANCE
    size = (round(_LEFT + column * len(sublayers) + 20), node + _NODE_HEIGHT + 6)
    lines: _Lines = defaultdict(list)
    mixing = max([1.0, *(abs(v) for each in sublayers for row in each.mean for v in row if math.isfinite(v))])
    boxes, unknown = [], 0
    for index, sublayer in enumerate(sublayers):
        left = _LEFT + column * index
        unknown += _draw_mixing(lines, sublayer, left, column, mixing)
        unknown += _draw_sublayer(lines, sublayer, left, column, node)
        boxes.append(_node(sublayer, index, left, column, node, size[1]))
    lanes = "".join(
        f'<text class="label end" x="{_LEFT - 10}" y="{_lane(stream) + 4}">stream {stream}</text>'
        for stream in range(streams)
    )
    paths = "".join(
        f'<path class="flow {classes}" stroke-width="{width:g}" d="{"".join(paths)}"/>'
        for (classes, width), paths in sorted(lines.items())
    )
    remark = f"{unknown} shares are not finite, and are left out." if unknown else ""
    return Drawing(lanes + paths + "".join(boxes), size, remark=remark)


def _draw_mixing(lines: _Lines, sublayer: Sublayer, left: float, column: float, most: float) -> int:
    unknown = 0
    for to, row in enumerate(sublayer.mean):
        for source, value in enumerate(row):
            start, end = (left, _lane(source)), (left + column, _lane(to))
            unknown += _add(lines, f"mixing c{source % _COLORS}", abs(value) / most, start, end)
    return unknown


def _draw_sublayer(lines: _Lines, sublayer: Sublayer, left: float, column: float, node: float) -> int:
    middle, streams, unknown = left + column / 2, len(sublayer.reads), 0
    for stream, share in enumerate(sublayer.reads):
        place = middle - 3 - _APART * (streams - 1 - stream) / streams
        unknown += _add(lines, f"reads c{stream % _COLORS}", share, (left, _lane(stream)), (place, node), down=True)
    for stream, share in enumerate(sublayer.writes):
        start = (left + column, _lane(stream))
        place = middle + 3 + _APART * (streams - 1 - stream) / streams
        unknown += _add(lines, f"writes c{stream % _COLORS}", share, start, (place, node), down=True)
    return unknown


def _add(
    lines: _Lines, classes: str, share: float, start: tuple[float, float], end: tuple[float, float], down: bool = False
) -> int:
    """1 if there is nothing to draw because the share is not known."""
    if not math.isfinite(share):
        return 1
    width = round(_THICKEST * min(share, 1.0) / _STEP) * _STEP
    if width:
        (x, y), (to_x, to_y) = start, end
        half = (x + to_x) / 2
        bend = (
            (f"{to_x:.1f} {y:.1f}", f"{to_x:.1f} {(y + to_y) / 2:.1f}")
            if down
            else (f"{half:.1f} {y}", f"{half:.1f} {to_y}")
        )
        lines[classes, width].append(f"M{x:.1f} {y}C{bend[0]} {bend[1]} {to_x:.1f} {to_y}")
    return 0


def _node(sublayer: Sublayer, index: int, left: float, column: float, node: float, height: float) -> str:
    middle, width = left + column / 2, min(column - 6, 46)
    box = attributes(x=round(middle - width / 2, 1), y=node, width=round(width, 1), height=_NODE_HEIGHT, rx=6)
    label = f'<text class="middle" x="{middle:.1f}" y="{node + 17}">{index + 1}</text>'
    tip = f"{index + 1}: {sublayer.name}\nreads {_shares(sublayer.reads)}\nwrites {_shares(sublayer.writes)}"
    hit = attributes(x=round(left, 1), y=0, width=round(column, 1), height=height, data_tip=tip)
    return f'<rect class="node"{box}/>{label}<rect class="hit"{hit}/>'


def _shares(shares: Sequence[float]) -> str:
    said = (f"{share:.0%}" if math.isfinite(share) else number(share) for share in shares)
    return ", ".join(f"{stream}: {text}" for stream, text in enumerate(said))


def _lane(stream: int) -> int:
    return _TOP + stream * _LANE
