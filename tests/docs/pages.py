"""The pages of the documentation, and the blocks of code on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"

# Code that a page's examples need and its readers do not: a comment of HTML in the page.
SETUP = re.compile(r"<!-- run first\n(.*)-->\s*", re.DOTALL)

_TITLE = re.compile(r'title="([^"]*)"')


class Block(NamedTuple):
    """Some code on a page; without a language, or only indented, its language is "none"."""

    page: Path
    line: int
    language: str
    title: str
    code: str

    @property
    def place(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    return list(_blocks(page, page.read_text(encoding="utf-8")))


def _blocks(page: Path, text: str) -> Iterator[Block]:
    for token in MarkdownIt().parse(text):
        line = 1 + (token.map[0] if token.map else 0)
        if token.type == "fence":
            language, _, options = token.info.partition(" ")
            title = _TITLE.search(options)
            yield Block(page, line, language or "none", title[1] if title else "", token.content)
        elif token.type == "code_block":
            yield Block(page, line, "none", "", token.content)
        elif token.type == "html_block" and "run first" in token.content:
            setup = SETUP.fullmatch(token.content)
            assert setup is not None, f"{name_of(page)}:{line}: setup must be '<!-- run first', code, '-->'"
            yield Block(page, line, "python", "", setup[1])


ALL_BLOCKS = [block for page in [README, *PAGES] for block in blocks_of(page)]
