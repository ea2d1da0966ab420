"""The README's example is short and trains everything, its links and its map name what exists.

That its code runs and its commands are understood: tests/docs.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_example_runs_as_written() -> None:
    example, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["loss"].isfinite()
    for module in ("layers", "hcs", "head"):
        assert all(parameter.grad is not None for parameter in names[module].parameters())


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_map_of_the_code_names_what_exists() -> None:
    (tree,) = re.findall(r"## Map of the code\n.*?```text[^\n]*\n(.*?)```", README, re.DOTALL)
    folder: list[str] = []
    lines = tree.splitlines()
    for line in lines:
        depth = (len(line) - len(line.lstrip())) // 2
        folder = [*folder[:depth], line.split()[0]]
        assert ROOT.joinpath(*folder).exists(), line
    assert len(lines) > 15
