"""Text on its way into a page: what comes from a checkpoint may be anything, and must stay text."""

from __future__ import annotations

import html
import json
import math
import re
from typing import Any

# What HTML must not contain or UTF-8 cannot say: control characters, halves of surrogate pairs, noncharacters.
_NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_VISIBLE = str.maketrans({"\n": "↵", "\r": "↵", "\t": "⇥", " ": "␣", "\u2028": "↵", "\u2029": "↵"})


def escape(text: object) -> str:
    """Text as HTML, for the inside of an element or of a quoted attribute."""
    return html.escape(_NO_TEXT.sub("\ufffd", str(text)), quote=True)


def attributes(**values: object) -> str:
    """Attributes of an element, with a space before each; ``class_`` is class, ``data_tip`` is data-tip."""
    named = ((name.rstrip("_").replace("_", "-"), value) for name, value in values.items() if value is not None)
    return "".join(f' {name}="{escape(value)}"' for name, value in named)


def json_in_html(data: Any) -> str:
    """JSON for a script element: no character in it can end the element. Numbers that are none become strings."""
    text = json.dumps(_with_strings(data), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def number(value: float | None, digits: int = 3) -> str:
    """A number as a person reads it; also one that is none."""
    if value is None:
        return "not measured"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.{digits}g}"


def visible(text: str) -> str:
    """White space as signs: a token may be nothing else."""
    return text.translate(_VISIBLE)


def _with_strings(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _with_strings(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_with_strings(value) for value in data]
    return number(data) if isinstance(data, float) and not math.isfinite(data) else data
