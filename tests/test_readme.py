"""The README's example runs as written, and its map names what exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_example_runs_as_written() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["loss"].isfinite()
    for module in ("layers", "hcs", "head"):
        assert all(parameter.grad is not None for parameter in names[module].parameters())


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
