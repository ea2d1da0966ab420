"""Lines of results: one flat JSON object per measurement, appended to a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
_CASE = ("tokens", "channels", "streams", "out_norm")


def read_lines(path: Path) -> list[Line]:
    lines = [_parse(text, path, number) for number, text in enumerate(path.read_text().splitlines(), 1) if text]
    if not lines:
        raise ValueError(f"{path} is empty: it should hold lines that mhckit bench wrote")
    return lines


def _parse(text: str, path: Path, number: int) -> Line:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ValueError(f"line {number} of {path} is no JSON: {error}") from error
    if not isinstance(line, dict) or not {"kind", "commit"} <= line.keys():
        raise ValueError(f"line {number} of {path} has no kind and commit: mhckit bench did not write it")
    return line


def append_lines(path: Path, lines: Iterable[Line]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def refusal(measurement: str, error: Exception) -> Line:
    """What is written in place of a measurement."""
    return {"kind": "refused", "measurement": measurement, "reason": f"{type(error).__name__}: {error}"}


def newest(lines: list[Line], kind: str | None = None) -> list[Line]:
    """Those of the commit that was measured last, or where there are lines of that kind, at which those were measured
    last; what it measured twice, from the later run.

    A run begins with its ceiling.
    """
    commit = ([line for line in lines if line["kind"] == kind] or lines)[-1]["commit"]
    latest: dict[str, list[Line]] = {}
    run: dict[str, list[Line]] = {}
    for line in lines:
        if line["commit"] == commit:
            if line["kind"] == "ceiling":
                run = {}
            latest[line["kind"]] = run.setdefault(line["kind"], [])
            latest[line["kind"]].append(line)
    return [line for of_a_kind in latest.values() for line in of_a_kind]


# What measurements shown together have in common; what tells those of one kind apart.
_SETTING = ("device", "torch", "triton", "python", "dtype")
_IDENTITY = ("tokens", "channels", "streams", "out_norm", "operator", "kernel", "direction", "baseline")


def latest(lines: Iterable[Line], kind: str) -> list[Line]:
    """Each measurement of a kind as it was made last, at whatever commit, with the device, versions and dtype of the
    one that was made last of all.
    """
    measured = of_kind(lines, kind)
    setting = [measured[-1].get(name) for name in _SETTING] if measured else []
    alike = [line for line in measured if [line.get(name) for name in _SETTING] == setting]
    return list({tuple(line.get(name) for name in _IDENTITY): line for line in alike}.values())


def commits_of(lines: Iterable[Line]) -> str:
    return ", ".join(dict.fromkeys(line["commit"] for line in lines))


def of_kind(lines: Iterable[Line], kind: str, **wanted: Any) -> list[Line]:
    """Measurements of one kind with these values; that a library is absent is none."""
    return [
        line
        for line in lines
        if line["kind"] == kind
        and "absent" not in line
        and all(line.get(name) == value for name, value in wanted.items())
    ]


def case_of(line: Line) -> tuple[Any, ...]:
    """What tells the cases of two lines apart: tokens, channels, streams, out_norm."""
    return tuple(line[name] for name in _CASE)


def case_label(case: tuple[Any, ...]) -> str:
    tokens, channels, streams, out_norm = case
    return f"{tokens} x {channels}{'' if streams == 4 else f', N = {streams}'}{', norm' if out_norm else ''}"


def by_case(lines: Iterable[Line]) -> dict[tuple[Any, ...], Line]:
    """A line per case, in the order of first appearance; measured again, the last one counts."""
    return {case_of(line): line for line in lines}


def by_recipe_and_case(lines: Iterable[Line]) -> dict[tuple[str, tuple[Any, ...]], dict[str, Line]]:
    """Lines of implementations that were timed on the same recipe and case, by implementation."""
    found: dict[tuple[str, tuple[Any, ...]], dict[str, Line]] = {}
    for line in lines:
        found.setdefault((line["recipe"], case_of(line)), {})[line["implementation"]] = line
    return found
