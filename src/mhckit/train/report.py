"""The page that a run ends with: report.html in its folder, from its lines of metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mhckit import __version__
from mhckit.report import (
    Columns,
    Details,
    Figure,
    Guide,
    Matrices,
    Page,
    Paragraph,
    Part,
    Section,
    Series,
    Stack,
    Table,
    Tip,
    line_chart,
    number,
)

from .config import TrainConfig
from .pictures import smoothed, spaced
from .run_folder import Line

_MOST_TIPS = 150
_FORWARD, _BACKWARD = "health/composite_gain_forward", "health/composite_gain_backward"


def write_report(
    path: Path, config: TrainConfig, lines: Sequence[Line], matrices: Mapping[str, Tensor] | None, remark: str = ""
) -> Path:
    """Write the page; ``matrices`` has the mean [N, N] of each sublayer by name. Returns its path."""
    return make_report(config, lines, matrices, remark).write(path)


def make_report(
    config: TrainConfig, lines: Sequence[Line], matrices: Mapping[str, Tensor] | None, remark: str = ""
) -> Page:
    sections = [Section("Over steps", [Columns(_figures(lines))] if lines else [Paragraph("No step is done yet.")])]
    if matrices:
        sections.append(_mixing(matrices))
    elif config.model.recipe is not None:
        sections.append(
            Section("Mixing", [Paragraph("mhckit inspect, given the folder of this run, shows the mixing matrices.")])
        )
    sections.append(_config(config))
    done = int(lines[-1]["step"]) if lines else 0
    return Page(
        f"Run {config.run_name}",
        sections,
        subtitle=remark or f"{done} of {config.max_steps} steps done",
        facts=_facts(config, lines),
    )


def _facts(config: TrainConfig, lines: Sequence[Line]) -> dict[str, str]:
    last = lines[-1] if lines else {}
    facts = {
        "parameters": f"{config.model.parameters() / 1e6:.1f}M",
        "residual": config.model.residual,
        "dtype": config.model.dtype,
        "loss": number(last.get("loss"), 4),
    }
    validated = [line["validation_loss"] for line in lines if line.get("validation_loss") is not None]
    if validated:
        facts["validation loss"] = number(validated[-1], 4)
    if lines:
        facts["tokens/s"] = f"{last['tokens_per_second']:,.0f}"
        facts["memory"] = f"{max(line['memory_bytes'] for line in lines) / 2**30:.2f} GiB"
    return {**facts, "mhckit": __version__}


def _figures(lines: Sequence[Line]) -> list[Figure]:
    """Of what the lines have, in the order of interest."""
    found = [_loss(lines), _gradient_norm(lines), _gain(lines), _memory(lines), _speed(lines), _rate(lines)]
    return [figure for figure in found if figure is not None]


def _loss(lines: Sequence[Line]) -> Figure | None:
    x, y = _series(lines, "loss")
    series = [Series("every step", x, y, 0, "faint"), Series("smoothed", x, smoothed(_known(y)), 0, derived=True)]
    checked, losses = _series(lines, "validation_loss")
    if checked:
        series.append(Series("validation", checked, losses, 1, "dots"))
    tips = _tips(lines, "loss", "loss")
    drawing = line_chart(series, x_label="step", y_label="nats per token", log=_positive(y), tips=tips)
    return Figure(
        drawing, "Loss", f"It begins at {number(y[0])} and ends at {number(y[-1])}.", "Smoothed; pale: every step."
    )


def _gradient_norm(lines: Sequence[Line]) -> Figure | None:
    x, y = _series(lines, "grad_norm")
    series = [Series("every step", x, y, 2, "faint"), Series("smoothed", x, smoothed(_known(y)), 2, derived=True)]
    drawing = line_chart(series, x_label="step", y_label="norm", log=True, tips=_tips(lines, "grad_norm", "norm"))
    return Figure(
        drawing, "Norm of all gradients", f"It ends at {number(y[-1])}.", "Before clipping. Smoothed; pale: every step."
    )


def _gain(lines: Sequence[Line]) -> Figure | None:
    forward, backward = _series(lines, _FORWARD), _series(lines, _BACKWARD)
    if not forward[0]:
        return None
    series = [Series("signal", *forward, 0), Series("gradient", *backward, 1, "dashed")]
    guides = [Guide(1.0, "1: nothing grows")]
    drawing = line_chart(series, x_label="step", y_label="gain", log=True, include=(0.5, 2.0), guides=guides)
    return Figure(
        drawing,
        "Composite gain",
        f"At the end {number(forward[1][-1])} for the signal.",
        "How much the product of all mixing matrices can enlarge.",
    )


def _memory(lines: Sequence[Line]) -> Figure | None:
    x, y = _series(lines, "memory_bytes")
    sizes = [value / 2**30 for value in y]
    drawing = line_chart([Series("peak", x, sizes, 3)], x_label="step", y_label="GiB", include=(0.0,))
    return Figure(drawing, "Peak memory", f"At most {max(sizes):.3g} GiB.", "In the first process.")


def _speed(lines: Sequence[Line]) -> Figure | None:
    x, y = _series(lines, "tokens_per_second")
    tips = _tips(lines, "tokens_per_second", "tokens/s")
    drawing = line_chart([Series("speed", x, y, 4)], x_label="step", y_label="tokens/s", include=(0.0,), tips=tips)
    return Figure(drawing, "Tokens per second", f"At the end {y[-1]:,.0f}.", "Slow where kernels are compiled.")


def _rate(lines: Sequence[Line]) -> Figure | None:
    x, y = _series(lines, "lr")
    drawing = line_chart([Series("rate", x, y, 6)], x_label="step", y_label="learning rate", include=(0.0,))
    return Figure(drawing, "Learning rate", f"At the end {number(y[-1])}.")


def _mixing(matrices: Mapping[str, Tensor]) -> Section:
    stack = Stack("Mean over tokens", [matrix.detach().double().cpu().tolist() for matrix in matrices.values()])
    lead = "How each sublayer mixes the streams at the end of the run; mhckit inspect shows more."
    return Section("Mixing", [Matrices("sublayer", list(matrices), [stack], "to stream", "from stream")], lead)


def _config(config: TrainConfig) -> Section:
    rows = []
    for name, value in config.to_dict().items():
        rows += [[f"{name}.{key}", each] for key, each in value.items()] if isinstance(value, dict) else [[name, value]]
    parts: list[Part] = [Details("All options of this run", Table(["option", "value"], rows, numbers=False))]
    return Section("Config", parts)


def _series(lines: Sequence[Line], key: str) -> tuple[list[int], list[float]]:
    found = [(line["step"], float(line[key])) for line in lines if line.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _known(values: Sequence[float]) -> list[float]:
    return [value if math.isfinite(value) else math.nan for value in values]


def _positive(values: Sequence[float]) -> bool:
    return all(value > 0 for value in values if math.isfinite(value))


def _tips(lines: Sequence[Line], key: str, name: str) -> list[Tip]:
    found: list[Any] = [line for line in lines if line.get(key) is not None]
    shown = [found[index] for index in spaced(len(found), _MOST_TIPS)]
    return [Tip(line["step"], f"step {line['step']}: {name} {number(float(line[key]), 4)}") for line in shown]
