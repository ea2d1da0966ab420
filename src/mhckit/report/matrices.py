"""Heat maps of many matrices: one at a time, chosen by name, above all of them as small multiples.

They are drawn by the page's script from numbers: a deep model has hundreds, and pictures of them would be slow to load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .text import attributes, escape, json_in_html

Matrix = Sequence[Sequence[float]]
_DIGITS = 4
_ONE = 1.001  # what rounding makes of 1 still counts as such
_FAINT = 0.05  # what has either sign and is smaller than that has no strong colour, such as two matrices' difference


@dataclass(frozen=True)
class Stack:
    """Matrices of one kind, one for each name of the choice."""

    title: str
    matrices: Sequence[Matrix]
    caption: str = ""

    def data(self) -> dict[str, object]:
        values = [value for matrix in self.matrices for row in matrix for value in row if math.isfinite(value)]
        signed = any(value < -1e-6 for value in values)
        largest = max((abs(value) for value in values), default=1.0)
        limit = 1.0 if not signed and largest <= _ONE else max(_rounded(largest), _FAINT)
        matrices = [[[_rounded(value) for value in row] for row in matrix] for matrix in self.matrices]
        return {"title": self.title, "caption": self.caption, "limit": limit, "matrices": matrices}


@dataclass(frozen=True)
class Matrices:
    """Stacks side by side with one choice for all.

    Args:
        label: what a choice is called: "sublayer".
        names: of the choices.
        stacks: each as long as the names.
        row, column: what these are: "to stream", "from stream".
        anchor: the id that findings link to; one of a page may have it.
    """

    label: str
    names: Sequence[str]
    stacks: Sequence[Stack]
    row: str
    column: str
    anchor: str | None = None

    def __post_init__(self) -> None:
        for stack in self.stacks:
            if len(stack.matrices) != len(self.names):
                raise ValueError(f"{stack.title!r} must have {len(self.names)} matrices, got {len(stack.matrices)}")

    def html(self) -> str:
        options = "".join(f'<option value="{i}">{i + 1}: {escape(name)}</option>' for i, name in enumerate(self.names))
        kinds = "".join(f'<option value="{i}">{escape(stack.title)}</option>' for i, stack in enumerate(self.stacks))
        data = {"label": self.label, "names": list(self.names), "row": self.row, "column": self.column}
        data = json_in_html({**data, "stacks": [stack.data() for stack in self.stacks]})
        label = escape(self.label)
        return (
            f'<div class="matrices"{attributes(id=self.anchor)}><script type="application/json">{data}</script>'
            "<noscript><p>Heat maps are drawn by a script, and scripts are off here.</p></noscript>"
            f'<div class="control">{self._button("before", "&lsaquo;")}'
            f'<label>{label} <select class="which">{options}</select></label>'
            f'{self._button("after", "&rsaquo;")}</div><div class="panels" aria-live="polite"></div>'
            f'<label class="control">all at once: <select class="kind">{kinds}</select></label>'
            '<div class="overview"></div></div>'
        )

    def _button(self, where: str, sign: str) -> str:
        name = attributes(aria_label=f"{self.label} {where}")
        return f'<button type="button" class="{where}"{name}>{sign}</button>'


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else value
