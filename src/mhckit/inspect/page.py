"""An inspection as a page: what was found in words first, then the pictures behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from mhckit.report import (
    Band,
    Columns,
    Details,
    Figure,
    Findings,
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
    band_chart,
    line_chart,
    number,
    visible,
)
from mhckit.report import Finding as Said

from .flow import flow_drawing
from .measure import NEAR_UNIFORM
from .measured import Inspection, Spread, Sublayer

DEPTH = "sublayer"
_MOST_ITERATION_CURVES = 24  # of more sublayers, those that end worst


def write_page(inspection: Inspection, path: Path) -> Path:
    """Write the report as one HTML file; returns its path."""
    return make_page(inspection).write(path)


def make_page(inspection: Inspection) -> Page:
    sections = [findings_section(inspection)]
    if inspection.sublayers:
        make = (_matrices, _flow, _gain, _errors, _coefficients, _streams)
        sections += [section(inspection) for section in make]
    sections.append(_details(inspection))
    return Page(
        f"Inside {inspection.name}",
        sections,
        subtitle=f"{len(inspection.sublayers)} sublayers with hyper-connections, {inspection.streams} streams, "
        f"seen through {inspection.tokens} tokens of text",
        facts=facts(inspection),
    )


def facts(inspection: Inspection) -> dict[str, object]:
    loss = {} if inspection.loss is None else {"loss on the text": f"{number(inspection.loss, 4)} nats per token"}
    return {"kind": inspection.kind, **loss, "mixing depth": mixing_depth(inspection), **inspection.facts}


def mixing_depth(inspection: Inspection) -> str:
    depth = inspection.mixing_depth
    return "streams never fully mix" if depth is None else f"{depth} of {len(inspection.sublayers)} sublayers"


def findings_section(inspection: Inspection, *, linked: bool = True) -> Section:
    """What was found, the worst first; ``linked`` to the matrices of the sublayer, where a page has them."""
    places = {each.name: index for index, each in enumerate(inspection.sublayers)} if linked else {}
    said = [
        Said(finding.level, finding.text, finding.where, finding.threshold, places.get(finding.where))
        for finding in sorted(inspection.findings, key=lambda finding: _rank(finding.level))
    ]
    bad = sum(sublayer.nonfinite for sublayer in inspection.sublayers)
    remark = [Paragraph(f"{bad} of the measured numbers are not finite: pictures have gaps there.")] if bad else []
    nothing: list[Part] = [] if said else [Paragraph("Nothing was found that is worth saying.")]
    return Section("Findings", [Findings(said), *nothing, *remark])


def _rank(level: str) -> int:
    return {"wrong": 0, "note": 1}.get(level, 2)


def _matrices(inspection: Inspection) -> Section:
    sublayers = inspection.sublayers
    token = f"token {inspection.token}" + (f", “{visible(inspection.token_text)}”" if inspection.token_text else "")
    stacks = [
        Stack("Mean over tokens", [each.mean for each in sublayers], "How this sublayer mixes the streams."),
        Stack("One token", [each.of_token for each in sublayers], f"The same for {token}."),
        Stack(
            "Composite", [each.composite for each in sublayers], "All sublayers up to this one, one after the other."
        ),
    ]
    lead = (
        "H of a sublayer: the row is the stream that is written to, the column the stream that is read from. The "
        "identity keeps streams apart; equal cells everywhere make them alike."
    )
    return Section("Mixing", [matrices_of(sublayers, stacks, anchor="matrices")], lead)


def matrices_of(sublayers: Sequence[Sublayer], stacks: Sequence[Stack], anchor: str | None = None) -> Matrices:
    return Matrices(DEPTH, [each.name for each in sublayers], stacks, "to stream", "from stream", anchor)


def _flow(inspection: Inspection) -> Section:
    figure = Figure(
        flow_drawing(inspection.sublayers, inspection.streams),
        "From stream to sublayer and back",
        "Streams as lanes from left to right; lines to the sublayers below show what each one reads, lines back "
        "where it writes.",
        "Depth goes from left to right. On the left of a sublayer's box: what it reads from each stream; on the right: "
        "where it writes its result. Pale lines between lanes: how streams mix on the way. Widths are shares.",
        wide=True,
    )
    return Section("Flow", [figure])


def _gain(inspection: Inspection) -> Section:
    sublayers, x = inspection.sublayers, _places(inspection.sublayers)
    forward, backward = [each.gain_forward for each in sublayers], [each.gain_backward for each in sublayers]
    drawing = line_chart(
        [Series("signal, from the first sublayer to here", x, forward, 0),
         Series("gradient, from the last sublayer back to here", x, backward, 1, "dashed")],
        x_label=DEPTH, y_label="gain", log=True, include=(0.5, 2.0), guides=[Guide(1.0, "1: nothing grows")],
        tips=_tips(sublayers, lambda s: f"signal {number(s.gain_forward)}, gradient {number(s.gain_backward)}"),
    )  # fmt: skip
    figure = Figure(
        drawing,
        "Composite gain",
        f"The largest gain of the signal is {_largest(forward)}, of the gradient {_largest(backward)}.",
        "How much the product of all mixing matrices can enlarge: the largest absolute row sum forward, column sum "
        "backward, over all tokens. Doubly stochastic matrices have 1.",
    )
    distances = line_chart(
        [Series("to the identity", x, [each.identity_distance for each in sublayers], 2),
         Series("to equal mixing", x, [each.uniform_distance for each in sublayers], 4, "dashed")],
        x_label=DEPTH, y_label="distance", include=(0.0,),
        tips=_tips(sublayers, lambda e: f"identity {number(e.identity_distance)}, equal {number(e.uniform_distance)}"),
    )  # fmt: skip
    between = Figure(
        distances,
        "Between the identity and equal mixing",
        "How far the matrices of each sublayer are from the identity and from equal mixing, over tokens on average.",
        "At 0 from the identity a sublayer does not mix at all; at 0 from equal mixing it makes all streams alike.",
    )
    return Section("Stability", [Columns([figure, between])])


def _errors(inspection: Inspection) -> Section:
    sublayers, x = inspection.sublayers, _places(inspection.sublayers)
    rows, columns = [each.row_error for each in sublayers], [each.column_error for each in sublayers]
    drawing = line_chart(
        [Series("rows", x, rows, 0), Series("columns", x, columns, 1, "dashed")],
        x_label=DEPTH, y_label="largest |sum - 1|", log=True,
        tips=_tips(sublayers, lambda each: f"rows {number(each.row_error)}, columns {number(each.column_error)}"),
    )  # fmt: skip
    parts = [
        Figure(
            drawing,
            "Sums of rows and columns",
            f"The largest error of a row sum is {_largest(rows)}, of a column sum {_largest(columns)}.",
            "How far the worst row and the worst column of any token are from a sum of 1.",
        )
    ]
    if any(each.error_by_iteration for each in sublayers):
        parts.append(_iterations(sublayers))
    return Section("Exactness", [Columns(parts)])


def _iterations(sublayers: Sequence[Sublayer]) -> Figure:
    """Faint curves for all (of many, the worst), and the worst one drawn strongly."""
    curves = [each for each in sublayers if each.error_by_iteration]
    curves.sort(key=_last_error, reverse=True)
    shown = curves[:_MOST_ITERATION_CURVES]
    series = [_iteration_series(each, "faint") for each in reversed(shown[1:])] + [_iteration_series(shown[0], "")]
    drawing = line_chart(series, x_label="iterations of Sinkhorn", y_label="largest |sum - 1|", log=True)
    others = "" if len(shown) == len(curves) else f" Of {len(curves)} sublayers, the {len(shown)} worst are drawn."
    return Figure(
        drawing,
        "How the error falls with iterations",
        f"In the worst sublayer the error ends at {number(shown[0].error_by_iteration[-1])}.",
        f"Strong: {shown[0].name}, which ends worst. A curve that is still falling would gain from more iterations "
        f"or smaller logits.{others}",
    )


def _iteration_series(sublayer: Sublayer, style: str) -> Series:
    errors = sublayer.error_by_iteration
    return Series(sublayer.name, list(range(1, len(errors) + 1)), errors, 0, style)


def _last_error(sublayer: Sublayer) -> float:
    last = sublayer.error_by_iteration[-1]
    return last if math.isfinite(last) else math.inf


def _coefficients(inspection: Inspection) -> Section:
    figures = [
        _spread_figure(inspection.sublayers, stream, kind)
        for stream in range(inspection.streams)
        for kind in ("pre", "post")
    ]
    lead = (
        "pre weighs what is read from a stream, post what is written to it; both differ from token to token. The line "
        "is the median, the bands hold half and nine tenths of the tokens, dots the extremes."
    )
    return Section("Reading and writing", [Columns(figures)], lead)


def _spread_figure(sublayers: Sequence[Sublayer], stream: int, kind: str) -> Figure:
    spreads: list[Spread] = [getattr(each, kind)[stream] for each in sublayers]
    quantiles = [spread.quantiles for spread in spreads]
    tips = [
        Tip(index, f"{index}: {each.name}\nmedian {number(q[3])}, from {number(q[0])} to {number(q[6])}")
        for index, (each, q) in enumerate(zip(sublayers, quantiles, strict=True), 1)
    ]
    band = Band(_places(sublayers), quantiles, color=stream)
    drawing = band_chart(band, x_label=DEPTH, y_label=kind, include=(0.0,), tips=tips)
    return Figure(drawing, f"{kind}, stream {stream}", f"Quantiles of {kind} over tokens for every sublayer.")


def _streams(inspection: Inspection) -> Section:
    sublayers = inspection.sublayers
    similarity = [each.similarity for each in sublayers]
    drawing = line_chart(
        [Series("similarity", _places(sublayers), similarity, 2)],
        x_label=DEPTH, y_label="mean cosine", include=(0.0, 1.0),
        tips=_tips(sublayers, lambda each: f"mean cosine {number(each.similarity)}"),
    )  # fmt: skip
    figure = Figure(
        drawing,
        "How alike the streams are",
        f"Mean cosine between pairs of streams; after the last sublayer {number(similarity[-1])}.",
        "At 1 all streams point the same way, and more than one of them is of no use.",
    )
    distance = [_from_uniform(each.composite) for each in sublayers]
    depth = line_chart(
        [Series("distance", _places(sublayers), distance, 6)],
        x_label=DEPTH, y_label="largest distance", include=(0.0,),
        guides=[Guide(NEAR_UNIFORM, f"{NEAR_UNIFORM}: counts as mixed")],
        tips=_tips(sublayers, lambda each: f"distance {number(_from_uniform(each.composite))}"),
    )  # fmt: skip
    mixing = Figure(
        depth,
        "How deep until all is mixed",
        f"Distance of the composite from equal mixing; mixing depth: {mixing_depth(inspection)}.",
        f"The composite's largest distance from equal mixing. Mixing depth: {mixing_depth(inspection)}.",
    )
    return Section("Streams", [Columns([figure, mixing])])


def _from_uniform(matrix: Sequence[Sequence[float]]) -> float:
    distances = [abs(value - 1 / len(matrix)) for row in matrix for value in row]
    return max(distances) if all(map(math.isfinite, distances)) else math.nan


def _details(inspection: Inspection) -> Section:
    recipe = Table(["field", "value"], list(inspection.recipe.items()), numbers=False)
    columns = ["sublayer", "signal gain", "gradient gain", "row error", "column error", "to identity", "to equal",
               "similarity", "not finite"]  # fmt: skip
    rows = [[f"{index}: {each.name}", *_numbers(each)] for index, each in enumerate(inspection.sublayers, 1)]
    parts: list[Part] = [
        Details("All numbers", Table(columns, rows)),
        Details("Recipe", recipe),
        Details("Text that was read", Paragraph(inspection.text)),
    ]
    return Section("Details", parts)


def _numbers(each: Sublayer) -> list[str]:
    values = (each.gain_forward, each.gain_backward, each.row_error, each.column_error, each.identity_distance,
              each.uniform_distance, each.similarity)  # fmt: skip
    return [*map(number, values), str(each.nonfinite)]


def _places(sublayers: Sequence[Sublayer]) -> list[int]:
    return list(range(1, len(sublayers) + 1))


def _tips(sublayers: Sequence[Sublayer], say: Callable[[Sublayer], str]) -> list[Tip]:
    return [Tip(index, f"{index}: {each.name}\n{say(each)}") for index, each in enumerate(sublayers, 1)]


def _largest(values: Sequence[float]) -> str:
    return number(max(values, key=lambda value: value if not math.isnan(value) else math.inf))
