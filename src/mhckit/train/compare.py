"""Runs side by side: their metrics from the folders of runs, or from one file of results that holds several."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .run_folder import METRICS


def read_runs(paths: Iterable[Path]) -> dict[str, list[dict[str, Any]]]:
    """Lines of metrics by name of run: that of its folder, or in a file of several what they say is their residual."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        file = path / METRICS if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{path} is neither the folder of a run, with its {METRICS}, nor a file of metrics")
        found: dict[str, list[dict[str, Any]]] = {}
        for number, text in enumerate(file.read_text().splitlines(), 1):
            line = _parse(text, file, number)
            found.setdefault(path.name if path.is_dir() else line.get("residual", path.stem), []).append(line)
        for name, lines in found.items():
            runs[f"{path}, {name}" if name in runs else name] = lines
    return runs


def _parse(text: str, file: Path, number: int) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ValueError(f"line {number} of {file} is no JSON: {error}") from error
    if not isinstance(line, dict) or not {"step", "loss"} <= line.keys():
        raise ValueError(f"line {number} of {file} has no step and loss: it is not of a training run")
    return line
