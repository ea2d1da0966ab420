"""The findings on one screen, or as data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from .findings import Finding, Status, exit_code

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def as_table(findings: list[Finding]) -> Table:
    """A line per finding, with what to do about it below."""
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        style = _STYLES[finding.status]
        seen = Text(finding.seen)
        if finding.advice:
            seen.append(f"\n-> {finding.advice}", style="" if finding.status == "ok" else style)
        table.add_row(Text(finding.status, style=style), finding.name, seen)
    return table


def summary(findings: list[Finding]) -> str:
    """How many failed, and how many warn."""
    parts = []
    for status in ("failed", "warning"):
        names = [finding.name for finding in findings if finding.status == status]
        if names:
            parts.append(f"{len(names)} {status}: {', '.join(names)}")
    return "; ".join(parts) or "nothing is wrong here"


def as_data(findings: list[Finding]) -> dict[str, Any]:
    return {"exit_code": exit_code(findings), "findings": [asdict(finding) for finding in findings]}
