"""What a section of a page is made of. Each part knows its own HTML; all text is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .charts import Drawing, Key
from .text import attributes, escape

_LEVELS = {"wrong": "wrong", "note": "worth knowing", "good": "fine"}


class Part(Protocol):
    def html(self) -> str: ...


@dataclass(frozen=True)
class Paragraph:
    text: str

    def html(self) -> str:
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Finding:
    """One thing that was found: ``level`` is wrong, note or good; ``select`` a choice in the matrices of this page."""

    level: str
    text: str
    where: str = ""
    threshold: str = ""
    select: int | None = None


@dataclass(frozen=True)
class Findings:
    findings: Sequence[Finding]

    def html(self) -> str:
        return f'<ul class="findings">{"".join(map(self._item, self.findings))}</ul>'

    def _item(self, finding: Finding) -> str:
        level = finding.level if finding.level in _LEVELS else "note"
        where = "" if finding.where in finding.text else f"<code>{escape(finding.where)}</code>"
        if finding.select is not None:
            where = f'<a href="#matrices"{attributes(data_select=finding.select)}>{where or "show its matrices"}</a>'
        threshold = (
            f'<span class="threshold">Threshold: {escape(finding.threshold)}</span>' if finding.threshold else ""
        )
        said = f'<span class="said">{escape(finding.text)}</span>'
        name = f'<strong class="level">{_LEVELS[level]}</strong>'
        return f'<li class="{level}">{name}<div>{said} {where} {threshold}</div></li>'


@dataclass(frozen=True)
class Table:
    """Rows of text. Columns after the first are numbers unless ``numbers`` is off; ``marked`` rows stand out."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    numbers: bool = True
    marked: frozenset[int] = frozenset()

    def html(self) -> str:
        caption = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in self.columns)
        body = "".join(self._row(index, row) for index, row in enumerate(self.rows))
        kind = "numbers" if self.numbers else "words"
        table = f'<table class="{kind}">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        name = attributes(aria_label=self.caption or ", ".join(self.columns))
        return f'<div class="scroll" tabindex="0" role="region"{name}>{table}</div>'

    def _row(self, index: int, row: Sequence[object]) -> str:
        first, *rest = row
        cells = f'<th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        return f"<tr{attributes(class_='marked' if index in self.marked else None)}>{cells}</tr>"


@dataclass(frozen=True)
class Figure:
    """A drawing with its title, what it shows in words for who cannot see it, and a caption. ``wide`` ones scroll."""

    drawing: Drawing
    title: str
    alt: str
    caption: str = ""
    wide: bool = False

    def html(self) -> str:
        width, height = self.drawing.size
        name = attributes(aria_label=f"{self.title}. {self.alt}")
        size = attributes(width=width, height=height) if self.wide else ""
        svg = f'<svg role="img" viewBox="0 0 {width:g} {height:g}"{size}{name}>{self.drawing.svg}</svg>'
        if self.wide:
            svg = f'<div class="scroll" tabindex="0" role="region"{attributes(aria_label=self.title)}>{svg}</div>'
        legend = _legend(self.drawing.legend)
        caption = _caption(f"{self.caption} {self.drawing.note}".strip(), self.drawing.remark)
        return f"<figure><h3>{escape(self.title)}</h3>{legend}{svg}{caption}</figure>"


@dataclass(frozen=True)
class Columns:
    """Parts side by side where there is room, below each other where there is not."""

    parts: Sequence[Part]

    def html(self) -> str:
        return f'<div class="columns">{"".join(part.html() for part in self.parts)}</div>'


@dataclass(frozen=True)
class Group:
    """Parts below each other under a heading of their own."""

    title: str
    parts: Sequence[Part]

    def html(self) -> str:
        return f'<div class="group"><h3>{escape(self.title)}</h3>{"".join(part.html() for part in self.parts)}</div>'


@dataclass(frozen=True)
class Details:
    """A part that is folded away until it is asked for."""

    summary: str
    part: Part

    def html(self) -> str:
        return f"<details><summary>{escape(self.summary)}</summary>{self.part.html()}</details>"


@dataclass(frozen=True)
class Choice:
    """One of several parts, chosen by name. Without a script all are there, one below the other."""

    label: str
    options: Sequence[tuple[str, Part]]

    def html(self) -> str:
        names = "".join(f"<option>{escape(name)}</option>" for name, _ in self.options)
        parts = "".join(f'<div class="option">{part.html()}</div>' for _, part in self.options)
        select = f'<label class="control">{escape(self.label)} <select>{names}</select></label>'
        return f'<div class="choice">{select}{parts}</div>'


def _legend(keys: Sequence[Key]) -> str:
    if not keys:
        return ""
    swatch = '<svg aria-hidden="true" viewBox="0 0 22 8"><path class="{}" d="M1 4H21"/></svg>'
    items = []
    for key in keys:
        classes = key.classes if key.classes == "guide" else f"line {key.classes}"
        items.append(f"<li>{swatch.format(classes)}<span>{escape(key.name)}</span></li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _caption(caption: str, remark: str) -> str:
    remark = f' <strong class="remark">{escape(remark)}</strong>' if remark else ""
    return f"<figcaption>{escape(caption)}{remark}</figcaption>" if caption or remark else ""
