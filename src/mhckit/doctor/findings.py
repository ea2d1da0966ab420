"""What an examination finds, one thing at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, what was seen, and what to do about it; values are for programs."""

    name: str
    status: Status
    seen: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if something failed; warnings, and what could not be looked at here, leave it at 0."""
    return int(any(finding.status == "failed" for finding in findings))


def in_a_line(error: BaseException) -> str:
    """An exception's type and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
