"""What was measured inside a model: plain numbers and text, without torch, that go to JSON and come back.

JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
Matrix = list[list[float]]


@dataclass(frozen=True)
class Spread:
    """Quantiles of a per-token number: least, 5%, 25%, median, 75%, 95%, most."""

    quantiles: tuple[float, ...]


@dataclass(frozen=True)
class Sublayer:
    """One hyper-connection. Matrices are [N][N]: the row is the stream written to, the column the stream read from."""

    name: str  # the module's path in the model; may be hostile text
    mean: Matrix  # H averaged over tokens
    of_token: Matrix  # H of the chosen token
    composite: Matrix  # mean over tokens of H_l ... H_1, from the first sublayer to this one
    pre: list[Spread]  # N
    post: list[Spread]  # N
    reads: list[float]  # N: share of each stream in what the sublayer reads (mean |pre| |x_i| norms, sums to 1, or 0)
    writes: list[float]  # N: share of each stream in what it writes (mean |post|, sums to 1, or 0)
    row_error: float  # max over tokens and rows of |row sum - 1|
    column_error: float
    error_by_iteration: list[float]  # max row/column error after 1, 2, ... iterations of Sinkhorn; [] for other maps
    gain_forward: float  # from the first sublayer to this one (max absolute row sum), max over tokens
    gain_backward: float  # from the last one back to this one (max absolute column sum)
    identity_distance: float
    uniform_distance: float
    similarity: float  # mean cosine between pairs of streams after this sublayer
    nonfinite: int


@dataclass(frozen=True)
class Finding:
    """Something worth saying about the model or a sublayer of it."""

    level: str  # "wrong", "note" or "good"
    where: str  # name of a sublayer, or "" for the model
    text: str  # plain language, with the number
    threshold: str  # "column sums off by more than 1e-2"


@dataclass(frozen=True)
class Inspection:
    """A model, seen through the tokens of one text."""

    name: str  # what was inspected, as the user gave it
    kind: str  # "run", "checkpoint" or "transformers"
    recipe: dict[str, Any]
    streams: int
    tokens: int
    token: int  # index of the chosen token
    token_text: str  # that token as text, if known
    text: str  # beginning of the text that was read
    loss: float | None
    sublayers: list[Sublayer]
    mixing_depth: int | None  # sublayers after which the mean composite is near uniform; None if never
    findings: list[Finding]
    facts: dict[str, str]  # versions, device, dtype, parameters, step, date ...


def to_json(inspection: Inspection) -> str:
    return json.dumps(_finite(dataclasses.asdict(inspection)), allow_nan=False)


def from_json(text: str) -> Inspection:
    """The inspection that `to_json` wrote."""
    try:
        data = json.loads(text)
        sublayers = [_sublayer(each) for each in data.pop("sublayers")]
        findings = [Finding(**each) for each in data.pop("findings")]
        loss = data.pop("loss")
        loss = None if loss is None else float(loss)
        inspection = Inspection(**data, sublayers=sublayers, findings=findings, loss=loss)
        _check_kinds(inspection, _KINDS)
        for sublayer in sublayers:
            _check_kinds(sublayer, {"name": str, "nonfinite": int})
            _check_sizes(sublayer, inspection.streams)
        for finding in findings:
            _check_kinds(finding, {"level": str, "where": str, "text": str, "threshold": str})
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"this is no report that mhckit inspect wrote: {error!r}") from error
    return inspection


_KINDS = {
    **dict.fromkeys(("name", "kind", "token_text", "text"), str),
    **dict.fromkeys(("streams", "tokens", "token"), int),
    **dict.fromkeys(("recipe", "facts"), dict),
    "mixing_depth": (int, type(None)),
}


def _check_kinds(value: object, kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        if not isinstance(getattr(value, name), kind):
            raise TypeError(f"{name} is {getattr(value, name)!r:.40}")


def _check_sizes(sublayer: Sublayer, streams: int) -> None:
    """What pictures of a sublayer rely on: N streams everywhere, and single numbers."""
    matrices = (sublayer.mean, sublayer.of_token, sublayer.composite)
    quantiles = [spread.quantiles for spread in (*sublayer.pre, *sublayer.post)]
    per_stream = (*matrices, *(row for matrix in matrices for row in matrix), sublayer.pre, sublayer.post,
                  sublayer.reads, sublayer.writes)  # fmt: skip
    sized = {len(each) for each in per_stream} == {streams} and {len(each) for each in quantiles} == {len(QUANTILES)}
    numbers = [getattr(sublayer, name) for name in _NUMBERS] + [*sublayer.error_by_iteration]
    for each in (*(row for matrix in matrices for row in matrix), *quantiles, sublayer.reads, sublayer.writes):
        numbers += each
    if not sized or not all(isinstance(each, float) for each in numbers):
        raise ValueError(f"the numbers of {sublayer.name!r:.40} are not those of {streams} streams")


_NUMBERS = ("row_error", "column_error", "gain_forward", "gain_backward", "identity_distance", "uniform_distance",
            "similarity")  # fmt: skip


def _sublayer(data: dict[str, Any]) -> Sublayer:
    data = {name: value if name in ("name", "nonfinite") else _floats(value) for name, value in data.items()}
    for name in ("pre", "post"):
        data[name] = [Spread(tuple(spread["quantiles"])) for spread in data[name]]
    return Sublayer(**data)


def _floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_floats(each) for each in value]
    if isinstance(value, dict):
        return {name: _floats(each) for name, each in value.items()}
    return float(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
