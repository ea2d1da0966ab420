"""Results as pictures: how near the ceiling, and how much faster than others."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .budgets import DIRECTIONS, ROLES
from .results import Line, by_case, case_label, case_of, commits_of, latest, newest, of_kind

_GROUP_WIDTH = 0.8


def write_plots(lines: list[Line], folder: Path) -> list[Path]:
    """kernels.png and ceiling.png with the last measurement of each shape; speedup.png, recipes.png and inference.png
    for the commits at which they were measured last. Those of what was measured; the files written.
    """
    compared, recipes, decode = (newest(lines, kind) for kind in ("baseline", "recipe", "decode"))
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Figure] = {}
    if kernels := latest(lines, "kernel"):
        pictures["kernels.png"] = _kernels(kernels)
    if sublayer := latest(lines, "junction"):
        pictures["ceiling.png"] = _ceiling(sublayer)
    if of_kind(compared, "baseline"):
        pictures["speedup.png"] = _speedup(compared)
    if of_kind(recipes, "recipe"):
        pictures["recipes.png"] = _recipes(recipes)
    if of_kind(decode, "decode"):
        pictures["inference.png"] = _decode(decode)
    for name, figure in pictures.items():
        figure.savefig(folder / name, dpi=150)
    return [folder / name for name in pictures]


def _kernels(lines: list[Line]) -> Figure:
    """Bars per case: the part of the copy ceiling that each kernel of the sublayer reaches, of those with a budget."""
    bars = {
        role: _percent_per_case(of_kind(lines, "kernel", operator="junction", kernel=role)) for role in ROLES.values()
    }
    return _ceiling_bars(lines, bars)


def _ceiling(lines: list[Line]) -> Figure:
    """Bars per case: the part of the copy ceiling that the sublayer reaches in each direction."""
    bars = {direction: _percent_per_case(of_kind(lines, "junction", direction=direction)) for direction in DIRECTIONS}
    return _ceiling_bars(lines, bars)


def _percent_per_case(lines: list[Line]) -> dict[str, float]:
    return {case_label(case): 100 * line["of_ceiling"] for case, line in by_case(lines).items()}


def _ceiling_bars(lines: list[Line], bars: dict[str, dict[str, float]]) -> Figure:
    figure, axes = _figure(lines, "percent of the copy ceiling")
    axes.axhline(100, color="black", linewidth=0.8)
    _grouped_bars(axes, bars, "%.0f")
    return figure


def _speedup(lines: list[Line]) -> Figure:
    """Bars per case: time of forward and backward by others, over mhckit's."""
    own = by_case(of_kind(lines, "junction", direction="both"))
    bars: dict[str, dict[str, float]] = {}
    for line in of_kind(lines, "baseline", direction="both"):
        case = case_of(line)
        if case in own:
            faster = line["microseconds"] / own[case]["microseconds"]
            bars.setdefault(line["baseline"], {})[case_label(case)] = faster
    return _times_as_long(lines, "mhckit", bars)


def _recipes(lines: list[Line]) -> Figure:
    """Bars per case: time of forward and backward with each recipe, over the Sinkhorn recipe's."""
    bars: dict[str, dict[str, float]] = {}
    for line in of_kind(lines, "recipe", direction="both"):
        bars.setdefault(line["recipe"], {})[case_label(case_of(line))] = line["of_sinkhorn"]
    return _times_as_long(lines, "the Sinkhorn recipe", bars)


def _times_as_long(lines: list[Line], other: str, bars: dict[str, dict[str, float]]) -> Figure:
    figure, axes = _figure(lines, f"times as long as {other}, forward and backward")
    axes.axhline(1, color="black", linewidth=0.8)
    _grouped_bars(axes, bars)
    return figure


def _decode(lines: list[Line]) -> Figure:
    """Bars per number of tokens: a junction of mhckit without gradients, for each recipe and number of channels."""
    bars: dict[str, dict[str, float]] = {}
    for line in of_kind(lines, "decode", implementation="mhckit"):
        name = f"{line['recipe']}, C {line['channels']}"
        bars.setdefault(name, {})[str(line["tokens"])] = line["microseconds"]
    figure, axes = _figure(lines, "us of a junction in a CUDA graph, without gradients")
    axes.set_xlabel("tokens")
    _grouped_bars(axes, bars)
    return figure


def _figure(lines: list[Line], quantity: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel(quantity)
    axes.set_title(f"mHC sublayer on {lines[-1]['device']}, {lines[-1]['dtype']}, commit {commits_of(lines)}")
    return figure, axes


def _grouped_bars(axes: Axes, bars: dict[str, dict[str, float]], label: str = "%.3g") -> None:
    """One group per case, one color per series; a series need not have every case."""
    cases = list(dict.fromkeys(case for values in bars.values() for case in values))
    width = _GROUP_WIDTH / max(len(bars), 1)
    for index, (name, values) in enumerate(bars.items()):
        left = [cases.index(case) - _GROUP_WIDTH / 2 + (index + 0.5) * width for case in values]
        axes.bar_label(axes.bar(left, list(values.values()), width, label=name), fmt=label, fontsize=7)
    axes.set_xticks(range(len(cases)), cases, rotation=20, ha="right")
    if bars:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
