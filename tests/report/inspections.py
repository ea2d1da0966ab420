"""Inspections with numbers that are easy to tell apart and were measured nowhere."""

from __future__ import annotations

import math
from typing import Any

from mhckit.inspect.measured import Finding, Inspection, Spread, Sublayer

HOSTILE = "</script><img src=x onerror=alert(1)>\"'\u2028&amp;<b>"


def sublayer(index: int, streams: int = 4, **changes: Any) -> Sublayer:
    off = 0.02 + 0.001 * index
    matrix = [[1 - (streams - 1) * off if to == of else off for of in range(streams)] for to in range(streams)]
    spread = [Spread((0.1, 0.2, 0.3, 0.4 + 0.01 * index, 0.5, 0.6, 0.7)) for _ in range(streams)]
    shares = [(stream + 1) / sum(range(1, streams + 1)) for stream in range(streams)]
    values: dict[str, Any] = {
        "name": f"blocks.{index}.attention",
        "mean": matrix,
        "of_token": [list(reversed(row)) for row in matrix],
        "composite": matrix,
        "pre": spread,
        "post": spread,
        "reads": shares,
        "writes": list(reversed(shares)),
        "row_error": 1e-6,
        "column_error": 1e-3 * (index + 1),
        "error_by_iteration": [0.1, 0.01, 0.001],
        "gain_forward": 1.0 + 0.01 * index,
        "gain_backward": 1.2 - 0.01 * index,
        "identity_distance": 0.1,
        "uniform_distance": 0.6,
        "similarity": 0.5,
        "nonfinite": 0,
    }
    return Sublayer(**{**values, **changes})


def broken(index: int) -> Sublayer:
    """What a model that has diverged leaves."""
    nothing = [[math.nan] * 4] * 4
    spread = [Spread((math.nan,) * 7)] * 4
    return sublayer(
        index, mean=nothing, composite=nothing, pre=spread, reads=[math.nan] * 4, gain_forward=math.inf,
        row_error=math.nan, error_by_iteration=[math.nan] * 3, similarity=math.nan, nonfinite=48,
    )  # fmt: skip


def inspection(layers: int = 3, streams: int = 4, **changes: Any) -> Inspection:
    values: dict[str, Any] = {
        "name": "runs/sample",
        "kind": "run",
        "recipe": {"residual_map": "sinkhorn", "iterations": 20},
        "streams": streams,
        "tokens": 64,
        "token": 5,
        "token_text": " the",
        "text": "some text",
        "loss": 2.5,
        "sublayers": [sublayer(index, streams) for index in range(layers)],
        "mixing_depth": 2,
        "findings": [
            Finding("good", "", "all is well", "nothing above 1"),
            Finding("wrong", f"blocks.{layers - 1}.attention", "column sums off by 0.08", "more than 1e-2"),
        ],
        "facts": {"torch": "2.0", "device": "cpu"},
    }
    return Inspection(**{**values, **changes})


def hostile() -> Inspection:
    """Text that wants to be HTML or a script, wherever a checkpoint can put it."""
    return inspection(
        name=HOSTILE, token_text=HOSTILE, text=HOSTILE, facts={HOSTILE: HOSTILE}, recipe={HOSTILE: HOSTILE},
        sublayers=[sublayer(0, name=HOSTILE), sublayer(1, name=HOSTILE + "2")],
        findings=[Finding("wrong", HOSTILE, HOSTILE, HOSTILE)],
    )  # fmt: skip
