"""Runs as one picture: how the loss fell, whether gradients and streams stayed calm, and how the streams are mixed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Line = Mapping[str, Any]

# Of Okabe and Ito: distinct also for those who do not see all colours.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_GAIN_FORWARD, _GAIN_BACKWARD = "health/composite_gain_forward", "health/composite_gain_backward"
_PANEL_WIDTH, _PANEL_HEIGHT, _MATRIX_SIZE = 4.6, 3.6, 2.1
_MOST_MATRICES = 6  # in a row; of more sublayers, evenly spaced ones
_SMOOTHED_PART = 0.04  # of a run that a smoothed point is the mean of


def training_picture(runs: Mapping[str, Sequence[Line]], matrices: Mapping[str, Tensor] | None, path: Path) -> Path:
    """Write one picture of some runs; returns its path.

    Args:
        runs: for each name the lines of its metrics: step, loss, grad_norm and, where there are, validation_loss and
            the health metrics of `mhckit.health`.
        matrices: for each name how streams are mixed, [N, N] or [L, N, N], [out, in] (`mean_mixing_matrices`).
        path: of the picture; its ending (.png, .svg, .pdf) says the kind.
    """
    if not any(runs.values()):
        raise ValueError("there is nothing to draw: runs must have lines")
    rows = [_Row(name, _as_stack(name, matrix)) for name, matrix in (matrices or {}).items()]
    figure = _draw(runs, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


class _Row(NamedTuple):
    """The matrices of one run: [L, out, in]."""

    name: str
    stack: Tensor


def _as_stack(name: str, matrix: Tensor) -> Tensor:
    stack = matrix.detach().float().cpu()
    stack = stack[None] if stack.ndim == 2 else stack
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or not len(stack):
        raise ValueError(f"matrices[{name!r}] must be [N, N] or [L, N, N], got {list(matrix.shape)}")
    return stack


def _draw(runs: Mapping[str, Sequence[Line]], rows: list[_Row]) -> Figure:
    """Panels of curves above, rows of matrices below; drawn without pyplot, which would keep figures and a backend."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'mhckit[viz]'") from error

    panels = [_draw_loss, _draw_gradient_norm]
    if any(_GAIN_FORWARD in line for lines in runs.values() for line in lines):
        panels.append(_draw_gain)
    heights = [_PANEL_HEIGHT, *[_MATRIX_SIZE + 0.5] * len(rows)]
    figure = Figure(figsize=(_PANEL_WIDTH * len(panels), sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, draw in zip(parts[0].subplots(1, len(panels)), panels, strict=True):
        draw(axes, runs)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    for part, row in zip(parts[1:], rows, strict=True):
        _draw_matrices(part, row)
    return figure


def _draw_loss(axes: Axes, runs: Mapping[str, Sequence[Line]]) -> None:
    starts = []
    for color, (name, lines) in _colored(runs):
        steps, losses = _series(lines, "loss")
        smooth = smoothed(losses)
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth, color=color, linewidth=1.8, label=name)
        steps, losses = _series(lines, "validation_loss")
        axes.plot(steps, losses, "o", color=color, markersize=4, markeredgecolor="white")
        starts += [smooth[0]] if smooth else []
    if any("validation_loss" in line for lines in runs.values() for line in lines):
        axes.plot([], [], "o", color="gray", markersize=4, label="validation")
    axes.set_title("Training loss: smoothed, and every step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    finite = [start for start in starts if math.isfinite(start)]
    if finite:  # a run that diverges leaves the picture instead of flattening the others
        axes.set_ylim(top=1.05 * max(finite))


def _draw_gradient_norm(axes: Axes, runs: Mapping[str, Sequence[Line]]) -> None:
    for color, (name, lines) in _colored(runs):
        steps, norms = _series(lines, "grad_norm", positive=True)
        axes.plot(steps, norms, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smoothed(norms), color=color, linewidth=1.8, label=name)
    axes.set_yscale("log")
    axes.set_title("Norm of all gradients, before clipping")


def _draw_gain(axes: Axes, runs: Mapping[str, Sequence[Line]]) -> None:
    for color, (name, lines) in _colored(runs):
        for key, style, way in ((_GAIN_FORWARD, "-", "signal"), (_GAIN_BACKWARD, "--", "gradient")):
            steps, gains = _series(lines, key, positive=True)
            if steps:
                axes.plot(steps, gains, style, color=color, marker=".", markersize=4, label=f"{name}, {way}")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5), max(high, 10.0))  # what stays at 1 is a flat line, not noise
    axes.set_title("Composite gain of all mixing matrices")


def _draw_matrices(part: SubFigure, row: _Row) -> None:
    """Heat maps of evenly spaced sublayers, in one range of colours; rows are streams written, columns streams read."""
    count = len(row.stack)
    shown = spaced(count, _MOST_MATRICES)
    bounded = bool(row.stack.min() >= 0) and bool(row.stack.max() <= 1.001)
    limit = 1.0 if bounded else max(float(row.stack[shown].abs().max()), 1e-6)
    colors: Any = {"cmap": "Blues", "vmin": 0.0} if bounded else {"cmap": "RdBu", "vmin": -limit}
    digits = 3 if bounded and row.stack.shape[-1] <= 4 else 2
    axes_of = part.subplots(1, max(len(shown), 2), squeeze=False)[0]
    for axes, index in zip(axes_of, shown, strict=False):
        matrix = row.stack[index].tolist()
        axes.imshow(matrix, vmax=limit, **colors)
        for out, values in enumerate(matrix):
            for into, value in enumerate(values):
                color = "white" if abs(value) > 0.6 * limit else "black"
                text: Any = {"ha": "center", "va": "center", "fontsize": 7, "color": color}
                axes.text(into, out, f"{value:.{digits}f}", **text)
        axes.set_xticks(range(len(matrix)))
        axes.set_yticks(range(len(matrix)))
        axes.tick_params(labelsize=7, length=0)
        if count > 1:
            axes.set_title(f"sublayer {index + 1} of {count}", fontsize=9)
    for axes in axes_of[len(shown) :]:
        axes.set_visible(False)
    axes_of[0].set_xlabel("from stream", fontsize=8)
    axes_of[0].set_ylabel("to stream", fontsize=8)
    part.suptitle(f"{row.name}: how a sublayer mixes the streams, mean over tokens", fontsize=11)


def _colored(runs: Mapping[str, Sequence[Line]]) -> list[tuple[str, tuple[str, Sequence[Line]]]]:
    return [(_COLORS[index % len(_COLORS)], run) for index, run in enumerate(runs.items())]


def _series(lines: Sequence[Line], key: str, *, positive: bool = False) -> tuple[list[int], list[float]]:
    """Steps and values of the lines that have a key; what cannot be drawn is NaN, a gap in the curve."""
    found = [(line["step"], float(line[key])) for line in lines if line.get(key) is not None]
    steps, values = [step for step, _ in found], [value for _, value in found]
    return steps, [v if math.isfinite(v) and (v > 0 or not positive) else math.nan for v in values]


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean of the neighbours of each value, a few hundredths of the run: as many before as after, so that the curve
    does not lag behind, and fewer near the ends. NaN is no neighbour, and stays.
    """
    reach = round(_SMOOTHED_PART * len(values) / 2)
    known = [not math.isnan(value) for value in values]
    totals = [0.0, *accumulate(value if is_known else 0.0 for value, is_known in zip(values, known, strict=True))]
    counts = [0, *accumulate(known)]
    means = []
    for place in range(len(values)):
        near = min(reach, place, len(values) - 1 - place)
        first, last = place - near, place + near + 1
        mean = (totals[last] - totals[first]) / max(counts[last] - counts[first], 1)
        means.append(mean if known[place] else math.nan)
    return means


def spaced(count: int, most: int) -> list[int]:
    """At most so many of the numbers 0 .. count - 1, evenly spaced, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]
