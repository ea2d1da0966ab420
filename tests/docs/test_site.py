"""The site builds without a warning, loads nothing from elsewhere, and its pages name what exists."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from pages import DOCS, PAGES, ROOT, name_of
from typer.testing import CliRunner

from mhckit.cli import app

sys.path.insert(0, str(ROOT / "tools"))
draw_concepts: Any = importlib.import_module("draw_concepts")

LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
# Packages whose public names the reference describes, and the page that does.
REFERENCE = {
    "mhckit": ("recipe", "modules", "operators"),
    "mhckit.integrations.transformers": ("transformers",),
    "mhckit.distributed": ("distributed",),
    "mhckit.models": ("training",),
    "mhckit.train": ("training",),
    "mhckit.health": ("health",),
}


def build(target: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(target)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


class _Loads(HTMLParser):
    """Addresses that a browser fetches by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") == "canonical":
            return
        self.addresses += [value for name, value in attrs if value and name == LOADING.get(tag)]


def test_builds_without_a_warning(tmp_path: Path) -> None:
    """One test for all that needs the site: each worker would build its own."""
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check_that_nothing_is_loaded_from_elsewhere(tmp_path)
    check_search(tmp_path)
    for page, words in {"modules": "Connects one sublayer to the streams", "operators": "the new streams"}.items():
        assert words in (tmp_path / "api" / f"{page}.html").read_text(encoding="utf-8")


def check_that_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        parser = _Loads()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.addresses, page
        for address in parser.addresses:
            assert not re.match(r"(https?:)?//", address), (page.name, address)
            if page.name != "404.html":  # it may be shown at any address, and so has absolute ones
                assert (page.parent / address.partition("?")[0].partition("#")[0]).is_file(), (page.name, address)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def check_search(site: Path) -> None:
    """A page from disk may fetch no JSON and start no worker: the index is a script, and so is what takes its place."""
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ") and "Sinkhorn" in index
    assert "assets/iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


def test_a_broken_link_is_a_warning(tmp_path: Path) -> None:
    """Of a site with our settings and two pages."""
    text = (ROOT / "mkdocs.yml").read_text()
    settings = text[text.index("validation:") : text.index("not_in_nav:")]
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text(f"site_name: links\nplugins: []\n{settings}")
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    for links, warnings in ((["other.md"], 0), (["other.md#nowhere", "nowhere.md", "/other.md"], 3)):
        (tmp_path / "docs" / "index.md").write_text("# Page\n\n" + " ".join(f"[link]({link})" for link in links))
        done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
        assert (bool(done.returncode), done.stderr.count("WARNING")) == (warnings > 0, warnings), done.stderr


@pytest.mark.parametrize("name", draw_concepts.DRAWINGS)
def test_drawings_are_what_the_script_makes(name: str) -> None:
    committed = (draw_concepts.FOLDER / name).read_text(encoding="utf-8")
    assert committed == draw_concepts.DRAWINGS[name](), f"{name} differs: python tools/draw_concepts.py"


def test_every_drawing_is_made_and_shown() -> None:
    made = {path.name for path in draw_concepts.FOLDER.iterdir()}
    shown = {name for page in PAGES for name in re.findall(r"images/concepts/([\w.-]+)\)", page.read_text())}
    assert made == shown == set(draw_concepts.DRAWINGS)


def test_the_last_matrix_is_doubly_stochastic() -> None:
    matrix = draw_concepts.normalised([[5.0, 1.0], [2.0, 3.0]], 20)
    assert all(abs(sum(line) - 1) < 1e-6 for line in (*matrix, *zip(*matrix, strict=True)))


def test_links_lead_somewhere() -> None:
    """By paths in the repository: where the files are browsed, too."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), (name_of(page), target)


@pytest.mark.parametrize("package", REFERENCE)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    text = "".join((DOCS / "api" / f"{page}.md").read_text() for page in REFERENCE[package])
    described = set(re.findall(r"^::: mhckit\.[\w.]*?(\w+)$", text, re.MULTILINE))
    module: ModuleType = importlib.import_module(package)
    assert set(module.__all__) <= described


def test_every_system_is_in_the_reference() -> None:
    described = re.findall(r"^::: mhckit\.compat\.(\w+)$", (DOCS / "api" / "compat.md").read_text(), re.MULTILINE)
    folder = ROOT / "src" / "mhckit" / "compat"
    assert set(described) == {path.stem for path in folder.iterdir() if not path.name.startswith(("_", "."))}


def test_every_command_and_exit_code_is_described() -> None:
    text = (DOCS / "command-line.md").read_text()
    for name in _names(typer.main.get_command(app), "mhckit"):
        assert re.search(rf"^(## |\| )`{name}[ `]", text, re.MULTILINE), name
    from mhckit.cli.root import EXIT_CODES

    described = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    assert described == re.findall(r"^ +(\d+) ", EXIT_CODES, re.MULTILINE)


def test_options_that_are_described_exist() -> None:
    """In the section of a command, outside of its examples, which are parsed."""
    text = (DOCS / "command-line.md").read_text()
    sections = re.findall(r"^## `mhckit (\w+)`\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    described = [(name, option) for name, section in sections for option in re.findall(r"`(--[a-z-]+)", section)]
    assert len(described) > 30
    helps = {name: CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output for name, _ in sections}
    for name, option in described:
        assert re.search(rf"{option}\b(?!-)", helps[name]), f"mhckit {name} has no {option}"


def _names(command: Any, name: str) -> list[str]:
    """Of all commands inside this one."""
    inside = {f"{name} {each}": found for each, found in getattr(command, "commands", {}).items()}
    return [*inside, *(deeper for each, found in inside.items() for deeper in _names(found, each))]


def test_tests_that_pages_name_exist() -> None:
    named = [found for page in PAGES for found in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text())]
    assert len(named) > 20
    for file, test in named:
        text = (ROOT / file).read_text()
        assert not test or f"def {test}(" in text, f"{file} has no {test}"
