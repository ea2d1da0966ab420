"""An inspection in one picture, to paste where a page cannot go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhckit.train.atomic import written_whole
from mhckit.train.pictures import spaced

from .measured import Inspection, Sublayer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B5BD0", "#000000")
_MOST_MATRICES = 8
_SIZE, _DPI = (15.0, 10.5), 120


def write_picture(inspection: Inspection, path: Path) -> Path:
    """Write the overview; its ending (.png, .svg, .pdf) says the kind. Returns its path."""
    if not inspection.sublayers:
        raise ValueError(f"there is nothing to draw: {inspection.name!r} has no sublayers")
    figure = _draw(inspection)
    with written_whole(path) as draft:
        figure.savefig(draft, dpi=_DPI, format=path.suffix.removeprefix(".") or "png")
    return path


def _draw(inspection: Inspection) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'mhckit[viz]'") from error

    figure = Figure(figsize=_SIZE, layout="constrained")
    above, means, composites, below = figure.subfigures(4, 1, height_ratios=[3.4, 2.1, 2.1, 3.4], squeeze=False)[:, 0]
    sublayers = inspection.sublayers
    gain, error, alike = above.subplots(1, 3)
    _draw_gain(gain, sublayers)
    _draw_errors(error, sublayers)
    _draw_similarity(alike, sublayers)
    shown = spaced(len(sublayers), _MOST_MATRICES)
    _draw_matrices(means, "Mixing, mean over tokens", [sublayers[index].mean for index in shown], shown)
    _draw_matrices(composites, "Composite from the first sublayer", [sublayers[i].composite for i in shown], shown)
    reads, writes = below.subplots(1, 2)
    _draw_shares(reads, "What each sublayer reads", [each.reads for each in sublayers])
    _draw_shares(writes, "Where each sublayer writes", [each.writes for each in sublayers])
    # A name may hold what matplotlib takes for mathematics.
    name = _plain(inspection.name)
    title = f"{name}: {len(sublayers)} sublayers, {inspection.streams} streams, {inspection.tokens} tokens"
    figure.suptitle(title, fontsize=13)
    return figure


def _draw_gain(axes: Axes, sublayers: Sequence[Sublayer]) -> None:
    _curves(axes, {"signal": [s.gain_forward for s in sublayers], "gradient": [s.gain_backward for s in sublayers]})
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5), max(high, 2.0))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_title("Composite gain")


def _draw_errors(axes: Axes, sublayers: Sequence[Sublayer]) -> None:
    rows, columns = [s.row_error for s in sublayers], [s.column_error for s in sublayers]
    _curves(axes, {"rows": _positive(rows), "columns": _positive(columns)})
    if any(value > 0 for value in (*rows, *columns)):
        axes.set_yscale("log")
    axes.set_title("Largest |sum - 1|")


def _draw_similarity(axes: Axes, sublayers: Sequence[Sublayer]) -> None:
    _curves(axes, {"mean cosine of streams": [s.similarity for s in sublayers]})
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.05)
    axes.set_title("How alike the streams are")


def _curves(axes: Axes, curves: dict[str, list[float]]) -> None:
    for index, (name, values) in enumerate(curves.items()):
        known = [value if math.isfinite(value) else math.nan for value in values]
        missing = sum(map(math.isnan, known))
        label = f"{name} ({missing} not drawn)" if missing else name
        places = range(1, len(values) + 1)
        axes.plot(
            places, known, marker=".", markersize=3, color=_COLORS[index], label=label, linestyle=("-", "--")[index]
        )
    axes.set_xlabel("sublayer")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _draw_matrices(part: SubFigure, title: str, matrices: Sequence[list[list[float]]], shown: Sequence[int]) -> None:
    known = [value for matrix in matrices for row in matrix for value in row if math.isfinite(value)]
    signed = any(value < -1e-6 for value in known)
    limit = max([1.0, *map(abs, known)])
    colors: Any = {"cmap": "RdBu", "vmin": -limit} if signed else {"cmap": "Blues", "vmin": 0.0}
    for axes, matrix, index in zip(part.subplots(1, len(shown), squeeze=False)[0], matrices, shown, strict=True):
        axes.set_facecolor("#f4c7c3")  # what is not finite shows it
        axes.imshow([[v if math.isfinite(v) else math.nan for v in row] for row in matrix], vmax=limit, **colors)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(str(index + 1), fontsize=9)
    part.suptitle(title, fontsize=11)


def _draw_shares(axes: Axes, title: str, shares: Sequence[Sequence[float]]) -> None:
    """Shares of the streams, stacked; a sublayer whose shares are not finite has none."""
    bottom = [0.0] * len(shares)
    for stream in range(len(shares[0])):
        heights = [each[stream] if all(map(math.isfinite, each)) else 0.0 for each in shares]
        color = _COLORS[stream % len(_COLORS)]
        axes.bar(range(1, len(shares) + 1), heights, 0.9, bottom=bottom, color=color, label=f"stream {stream}")
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_title(title)
    axes.set_xlabel("sublayer")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _positive(values: Sequence[float]) -> list[float]:
    """What has a place on a logarithmic axis."""
    return [value if value > 0 else math.nan for value in values]


def _plain(text: str) -> str:
    printable = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return printable.replace("$", r"\$")
