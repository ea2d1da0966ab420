"""The README's example runs as written, its map names what exists, and the code on all pages is Python."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_example_runs_as_written() -> None:
    example, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["loss"].isfinite()
    for module in ("layers", "hcs", "head"):
        assert all(parameter.grad is not None for parameter in names[module].parameters())


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_code_imports_what_exists(page: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mhckit"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_commands_are_targets() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in re.findall(r"^make ([a-z-]+)", README, re.MULTILINE):
        assert command in targets


def test_map_of_the_code_names_what_exists() -> None:
    (tree,) = re.findall(r"## Map of the code\n.*?```\n(.*?)```", README, re.DOTALL)
    folder: list[str] = []
    lines = tree.splitlines()
    for line in lines:
        depth = (len(line) - len(line.lstrip())) // 2
        folder = [*folder[:depth], line.split()[0]]
        assert ROOT.joinpath(*folder).exists(), line
    assert len(lines) > 15
