"""Results as a page, from lines just measured or from a file of them; needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mhckit.report import (
    Choice,
    Columns,
    Details,
    Figure,
    Finding,
    Findings,
    Page,
    Part,
    Section,
    Series,
    Table,
    bar_chart,
    line_chart,
)

from .results import Line, by_case, case_label, case_of, newest, of_kind

# Lines of these kinds fill the page; a file without any of them is none of `mhckit bench`.
_KINDS = {
    "junction", "kernel", "recipe", "decode", "baseline", "memory", "host", "cold_start",
    "training", "model", "refused",
}  # fmt: skip
_DIRECTIONS = ("forward", "backward", "both")


def write_report(lines: Sequence[Line], path: Path) -> Path:
    """Write the page of the commit that was measured last; returns its path."""
    return make_report(lines).write(path)


def make_report(lines: Sequence[Line]) -> Page:
    measured = [line for line in lines if {"kind", "commit"} <= line.keys()]
    if not any(line["kind"] in _KINDS for line in measured):
        raise ValueError(
            f"a report needs lines that mhckit bench wrote, of kind {', '.join(sorted(_KINDS))}: found none"
        )
    last = newest(measured)
    sections = [section for make in _SECTIONS if (section := make(last)) is not None]
    facts = last[0]  # those that follow may be of another recipe
    return Page(
        f"mHC on {facts.get('device', 'an unknown GPU')}",
        sections,
        subtitle="Speed beside what a large copy reaches on the same GPU in the same run",
        facts={name: facts[key] for name, key in _FACTS.items() if key in facts},
    )


_FACTS = {
    "commit": "commit", "GPU": "device", "date": "date", "copy ceiling, TB/s": "copy_terabytes_per_second",
    "dtype": "dtype", "recipe": "recipe", "torch": "torch", "Triton": "triton", "Python": "python",
    "transformers": "transformers",
}  # fmt: skip


def _sublayer(lines: list[Line]) -> Section | None:
    """Bars of the part of the ceiling and the time, one pair of figures for each direction."""
    options: list[tuple[str, Part]] = []
    for index, direction in enumerate(_DIRECTIONS):
        measured = by_case(of_kind(lines, "junction", direction=direction))
        if measured:
            what = "forward and backward" if direction == "both" else direction
            options.append((what, _pair(measured, what, index)))
    if not options:
        return None
    options.reverse()
    rows = [
        [case_label(case_of(line)), line["direction"], *_times(line), line["launches"]]
        for line in of_kind(lines, "junction")
    ]
    table = Table(["tokens x C", "direction", "us", "MB", "floor, us", "of the ceiling", "launches"], rows)
    lead = "One sublayer's connection. The ceiling is the time its bytes take at the speed of a large copy."
    return Section("Sublayer", [Choice("direction", options), Details("All numbers", table)], lead)


def _pair(measured: dict[tuple, Line], what: str, color: int) -> Part:
    of_ceiling = [(case_label(case), 100 * line["of_ceiling"]) for case, line in measured.items()]
    times = [(case_label(case), line["microseconds"]) for case, line in measured.items()]
    return Columns(
        [
            _bars(of_ceiling, f"Percent of the ceiling, {what}", "%", 100.0, color),
            _bars(times, f"Microseconds, {what}", " us", None, color),
        ]
    )


def _bars(bars: list[tuple[str, float]], title: str, unit: str, guide: float | None, color: int) -> Figure:
    alt = "; ".join(f"{name}: {value:.3g}{unit}" for name, value in bars)
    return Figure(bar_chart(bars, unit=unit, guide=guide, color=color), title, alt)


def _kernels(lines: list[Line]) -> Section | None:
    """A figure for each kernel of the sublayer; the other operators in the table."""
    measured = of_kind(lines, "kernel")
    if not measured:
        return None
    roles = dict.fromkeys(line["kernel"] for line in measured if line["operator"] == "junction")
    figures = []
    for index, role in enumerate(roles):
        of_role = by_case(line for line in measured if line["kernel"] == role and line["operator"] == "junction")
        bars = [(case_label(case), 100 * line["of_ceiling"]) for case, line in of_role.items()]
        figures.append(_bars(bars, f"{role}, percent of the ceiling", "%", 100.0, index))
    rows = [
        [case_label(case_of(line)), line["operator"], line["kernel"], *_times(line), _clean(line)] for line in measured
    ]
    columns = ["tokens x C", "operator", "kernel", "us", "MB", "floor, us", "of the ceiling", "on a clean L2 cache"]
    table = Table(columns, rows)
    lead = "F1 writes and projects, F2 reads; backward B, J and P. Each beside the time that its own bytes take."
    return Section("Kernels", [Columns(figures), Details("All numbers", table)], lead)


def _clean(line: Line) -> str:
    return f"{line['clean_cache_of_ceiling']:.1%}" if "clean_cache_of_ceiling" in line else ""


def _times(line: Line) -> list[str]:
    megabytes = f"{line['bytes'] / 1e6:.1f}"
    return [f"{line['microseconds']:.1f}", megabytes, f"{line['floor_microseconds']:.1f}", f"{line['of_ceiling']:.1%}"]


def _speedup(lines: list[Line]) -> Section | None:
    """A figure for each shape that others were measured on."""
    own = {(case_of(line), line["direction"]): line["microseconds"] for line in of_kind(lines, "junction")}
    others = [line for line in of_kind(lines, "baseline") if (case_of(line), line["direction"]) in own]
    if not others:
        return None
    figures = []
    for case in dict.fromkeys(case_of(line) for line in others):
        bars = [
            (line["baseline"], line["microseconds"] / own[case, "both"])
            for line in others
            if case_of(line) == case and line["direction"] == "both"
        ]
        if bars:
            figures.append(_bars(bars, f"{case_label(case)}, forward and backward", "x", 1.0, 2))
    rows = [
        [case_label(case_of(line)), line["baseline"], line["direction"], f"{line['microseconds']:.1f}",
         line["launches"], f"{line['microseconds'] / own[case_of(line), line['direction']]:.2f}x"]
        for line in others
    ]  # fmt: skip
    table = Table(["tokens x C", "implementation", "direction", "us", "launches", "mhckit is faster by"], rows)
    return Section(
        "Speedup",
        [Columns(figures), Details("All numbers", table)],
        "Time of others over mhckit's, for each shape; 1 is as fast.",
    )


def _recipes(lines: list[Line]) -> Section | None:
    """A figure for each shape: forward and backward with each recipe."""
    measured = of_kind(lines, "recipe")
    if not measured:
        return None
    figures = []
    for case in dict.fromkeys(case_of(line) for line in measured):
        of_case = [line for line in measured if case_of(line) == case and line["direction"] == "both"]
        bars = [(line["recipe"], line["microseconds"]) for line in of_case]
        figures.append(_bars(bars, f"{case_label(case)}, microseconds, forward and backward", " us", None, 4))
    rows = [
        [case_label(case_of(line)), line["recipe"], line["direction"], *_times(line), line["launches"],
         f"{line['of_sinkhorn']:.1%}"]
        for line in measured
    ]  # fmt: skip
    columns = ["tokens x C", "recipe", "direction", "us", "MB", "floor, us", "of the ceiling", "launches"]
    table = Table([*columns, "of the Sinkhorn recipe's time"], rows)
    lead = "The sublayer with other recipes, which took turns with the first; each beside the bytes that it needs."
    return Section("Recipes", [Columns(figures), Details("All numbers", table)], lead)


def _decode(lines: list[Line]) -> Section | None:
    """A figure for each recipe and number of channels: time over the number of tokens."""
    measured = of_kind(lines, "decode")
    if not measured:
        return None
    figures: list[Part] = []
    for recipe, channels in dict.fromkeys((line["recipe"], line["channels"]) for line in measured):
        here = [line for line in measured if (line["recipe"], line["channels"]) == (recipe, channels)]
        series = []
        for color, name in enumerate(dict.fromkeys(line["implementation"] for line in here)):
            by_name = [line for line in here if line["implementation"] == name]
            tokens, times = ([line[key] for line in by_name] for key in ("tokens", "microseconds"))
            series.append(Series(name, tokens, times, color))
        alt = "; ".join(f"{line['implementation']}, {line['tokens']}: {line['microseconds']:.3g} us" for line in here)
        drawing = line_chart(series, x_label="tokens", y_label="us", log=True)
        figures.append(Figure(drawing, f"{recipe}, C {channels}: microseconds of a junction", alt))
    rows = [
        [line["recipe"], case_label(case_of(line)), line["implementation"], f"{line['microseconds']:.1f}",
         line.get("target_microseconds", ""), line["launches"]]
        for line in measured
    ]  # fmt: skip
    table = Table(["recipe", "tokens x C", "implementation", "us", "target, us", "launches"], rows)
    lead = "Without gradients, as one of {links} in a CUDA graph unless it says otherwise. Inputs: {inputs}."
    return Section("Inference", [Columns(figures), Details("All numbers", table)], lead.format(**measured[0]))


def _memory(lines: list[Line]) -> Section | None:
    rows = [
        [case_label(case_of(line)), *(f"{line[name] / 1e6:.1f}" for name in _BYTES), f"{line['workspace_of_x']:.2%}"]
        for line in of_kind(lines, "memory")
    ]
    columns = ["tokens x C", "peak, MB", "kept, MB", "gradients, MB", "workspace / x"]
    return Section("Memory", [Table(columns, rows)], "Of forward and backward.") if rows else None


_BYTES = ("peak_extra_bytes", "kept_bytes", "gradient_bytes")


def _host(lines: list[Line]) -> Section | None:
    parts: list[Part] = []
    times = [[line["operator"], line["direction"], f"{line['microseconds']:.1f}"] for line in of_kind(lines, "host")]
    if times:
        parts.append(Table(["operator", "direction", "us"], times, caption="Time of a call until it returns"))
    starts = [[line["operator"], line["cache"], f"{line['seconds']:.2f}"] for line in of_kind(lines, "cold_start")]
    if starts:
        parts.append(Table(["first call of", "cache", "seconds"], starts, caption="First calls of a process"))
    return Section("Host", parts) if parts else None


def _training(lines: list[Line]) -> Section | None:
    """A figure for each case: a step with every residual connection."""
    measured = of_kind(lines, "training")
    if not measured:
        return None
    parts: list[Part] = []
    for case in dict.fromkeys(line["case"] for line in measured):
        of_case = list({line["variant"]: line for line in measured if line["case"] == case}.values())
        size = "{layers} layers, C {channels}, {batch} x {positions} tokens".format(**of_case[0])
        bars = [(line["variant"], line["milliseconds"]) for line in of_case]
        parts.append(_bars(bars, f"{case}: milliseconds of a step, {size}", " ms", None, 6))
        rows = [
            [line["variant"], f"{line['milliseconds']:.1f}", line["tokens_per_second"],
             f"{line['peak_bytes'] / 1e9:.1f}", f"{line['activation_bytes'] / 1e9:.1f}"]
            for line in of_case
        ]  # fmt: skip
        parts.append(Table(["residual", "ms", "tokens/s", "peak, GB", "activations, GB"], rows, caption=case))
    return Section("Training steps", [Columns(parts)])


def _model(lines: list[Line]) -> Section | None:
    measured = of_kind(lines, "model")
    bars = [(line["variant"], line["milliseconds"]) for line in measured]
    if not bars:
        return None
    rows = [
        [line["variant"], f"{line['milliseconds']:.1f}", f"{line['peak_extra_bytes'] / 1e9:.1f}"] for line in measured
    ]
    parts = [_bars(bars, "Milliseconds of forward and backward", " ms", None, 6), Table(["", "ms", "peak, GB"], rows)]
    return Section("Whole model", [Columns(parts)])


def _remarks(lines: list[Line]) -> Section | None:
    absent = {line.get("baseline", line.get("variant")): line["absent"] for line in lines if "absent" in line}
    found = [Finding("note", f"{name} was not measured: {reason}") for name, reason in absent.items()]
    for line in of_kind(lines, "refused"):
        reason = line.get("reason", f"its results are off by {line.get('error')}")
        found.append(Finding("wrong", f"{line.get('measurement', line.get('variant'))} was refused: {reason}"))
    return Section("Remarks", [Findings(found)]) if found else None


_SECTIONS = (_remarks, _sublayer, _kernels, _recipes, _decode, _speedup, _training, _model, _memory, _host)
