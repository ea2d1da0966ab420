"""Verdicts: does a claim hold on this machine, and the table that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from .data import NOT_MEASURABLE, Claim, Quantity, Shape
from .measure import BESIDE, Measured

UNITS: dict[Quantity, str] = {
    "speedup": "x",
    "memory saved": "% memory saved",
    "memory ratio": "x less memory",
    "of the bound": "% of the bound",
    "microseconds": " us",
}
LESS_IS_BETTER: tuple[Quantity, ...] = ("microseconds",)


@dataclass(frozen=True)
class Result:
    """A claim at one of its shapes: a measurement, or the problem that prevented it."""

    claim: Claim
    shape: Shape
    measured: Measured | None
    problem: str = ""

    @property
    def holds(self) -> bool | None:
        return None if self.measured is None else holds(self.claim, self.measured.value)

    def line(self) -> dict[str, Any]:
        """As it is written to a file of results."""
        claim, measured = self.claim, self.measured
        low, high = claim.claimed
        line = {
            "kind": "claim",
            "source": claim.source,
            "claimed_on": claim.hardware,
            "claim": claim.what,
            "passes": claim.passes,
            "quantity": claim.quantity,
            "claimed": low if low == high else [low, high],
            "shape": str(self.shape),
            "note": claim.note,
            "holds": self.holds,
        }
        if measured is None:
            return line | {"problem": self.problem}
        beside = {BESIDE[claim.quantity][0]: _rounded(measured.beside)} if claim.quantity in BESIDE else {}
        possible = {} if measured.possible is None else {"possible": _rounded(measured.possible)}
        facts = {name: _rounded(value) for name, value in measured.facts.items()}
        return line | {"measured": _rounded(measured.value)} | beside | possible | facts


def holds(claim: Claim, value: float) -> bool:
    """Met or beaten, by the worst that was claimed."""
    low, high = claim.claimed
    return value <= high if claim.quantity in LESS_IS_BETTER else value >= low


def verdict(results: Sequence[Result]) -> str:
    """Of one claim, over its shapes."""
    problems = [result.problem for result in results if result.measured is None]
    if problems:
        return f"no: {problems[0]}"
    held = sum(bool(result.holds) for result in results)
    if held == len(results):
        return "yes"
    failed = [result for result in results if not result.holds]
    impossible = [result for result in failed if _is_impossible(result)]
    many = f"at {held} of {len(results)} shapes" if held else "no"
    return f"{many}; for nobody on this machine at {len(impossible)}" if impossible else many


def table(results: Sequence[Result]) -> Table:
    """A row for each claim, with the range over its shapes; below them, in what the measurements differ from theirs."""
    rows = Table("claim", "source", "on", "claimed", "measured here", "beside it", "holds?", box=None, pad_edge=False)
    grouped: dict[Claim, list[Result]] = {}
    for result in results:
        grouped.setdefault(result.claim, []).append(result)
    for claim, group in grouped.items():
        measured = [result.measured for result in group if result.measured is not None]
        rows.add_row(
            _title(claim),
            claim.source,
            claim.hardware,
            _range(claim.claimed, UNITS[claim.quantity]),
            _range([m.value for m in measured], UNITS[claim.quantity]),
            _beside(claim, measured),
            Text(verdict(group)),
        )
    notes = dict.fromkeys(f"{claim.source}, {claim.what}: {claim.note}" for claim in grouped if claim.note)
    rows.caption = Text("\n".join(notes))
    for other in NOT_MEASURABLE:
        rows.add_row(other.what, other.source, other.hardware, other.claimed, "", "", f"not measurable: {other.why}")
    return rows


def _is_impossible(result: Result) -> bool:
    possible = None if result.measured is None else result.measured.possible
    return possible is not None and not holds(result.claim, possible)


def _title(claim: Claim) -> str:
    passes = "fwd + bwd" if claim.passes == "both" else claim.passes
    shapes = str(claim.shapes[0]) if len(claim.shapes) == 1 else f"{len(claim.shapes)} shapes"
    return f"{claim.what}, {passes}, {shapes}"


def _beside(claim: Claim, measured: Sequence[Measured]) -> str:
    values = [m.beside for m in measured if m.beside is not None]
    return _range(values, BESIDE[claim.quantity][1]) if values else ""


def _range(values: Sequence[float], unit: str) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return (low if low == high else f"{low} to {high}") + unit


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
