"""A page: title, facts, sections, with its style and its script inside and nothing outside."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from .parts import Part
from .text import escape


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Part]
    lead: str = ""

    def html(self, anchor: str) -> str:
        lead = f'<p class="lead">{escape(self.lead)}</p>' if self.lead else ""
        inside = "".join(part.html() for part in self.parts)
        return f'<section id="{anchor}"><h2>{escape(self.title)}</h2>{lead}{inside}</section>'


@dataclass(frozen=True)
class Page:
    """One HTML file. Facts are shown below the title: what this is, where and when it was made."""

    title: str
    sections: Sequence[Section]
    subtitle: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)

    def html(self) -> str:
        style, script = _own_file("page.css"), _own_file("page.js")
        anchors = [f"section-{index}" for index in range(1, len(self.sections) + 1)]
        named = list(zip(anchors, self.sections, strict=True))
        links = "".join(f'<a href="#{anchor}">{escape(section.title)}</a>' for anchor, section in named)
        body = "".join(section.html(anchor) for anchor, section in named)
        subtitle = f'<p class="subtitle">{escape(self.subtitle)}</p>' if self.subtitle else ""
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark"><meta name="generator" content="mhckit">'
            f'<link rel="icon" href="data:,"><title>{escape(self.title)}</title><style>{style}</style></head>\n'
            f"<body><header><h1>{escape(self.title)}</h1>{subtitle}{self._facts()}</header>\n"
            f'<nav aria-label="sections">{links}</nav>\n<main>{body}</main>\n'
            f"<footer>Made by mhckit. This file is all there is: it loads nothing.</footer>\n"
            f"<script>{script}</script></body></html>\n"
        )

    def write(self, path: Path) -> Path:
        """The file, whole or not at all; returns its path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            draft.write_bytes(self.html().encode("utf-8"))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        return path

    def _facts(self) -> str:
        if not self.facts:
            return ""
        items = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in self.facts.items()
        )
        return f'<dl class="facts">{items}</dl>'


def _own_file(name: str) -> str:
    return files("mhckit.report").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Nothing may be loaded; what runs is this one script, known by its hash, whatever else might get into the page."""
    allowed = f"style-src {_hash(style)}; script-src {_hash(script)}"
    return f"default-src 'none'; img-src data:; {allowed}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
