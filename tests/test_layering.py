"""Imports point one way, and importing mhckit needs and changes nothing it should not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mhckit

PACKAGE = Path(mhckit.__file__).parent

# cli -> doctor, bench, train, inspect -> modules -> ops -> (lazily) kernels -> native; doctor -> bench;
# inspect -> train; integrations, compat -> modules; report: pages, imports nothing.
MAY_IMPORT: dict[str, set[str]] = {
    "recipe": set(),
    "ops": {"recipe"},
    "native": set(),
    "kernels": {"native", "ops", "recipe"},
    "modules": {"ops", "recipe"},
    "distributed": {"modules", "ops", "recipe"},
    "models": {"modules", "recipe"},
    "health": {"modules", "ops"},
    "report": set(),
    "train": {"", "health", "models", "modules", "report"},
    "inspect": {"", "health", "integrations", "models", "modules", "ops", "recipe", "report", "train"},
    "integrations": {"modules", "ops", "recipe"},
    "compat": {"", "modules", "ops", "recipe"},
    "testing": {"", "recipe"},
    "bench": {"", "integrations", "kernels", "models", "ops", "recipe", "report", "testing"},
    "doctor": {"", "bench", "kernels", "ops", "testing"},
    "cli": {"", "bench", "doctor", "inspect", "train"},
    "__main__": {"cli"},
    "": {"modules", "ops", "recipe"},
}
THIRD_PARTY: dict[str, set[str]] = {
    "recipe": set(),
    "ops": {"torch"},
    "native": {"torch"},
    "kernels": {"torch", "triton"},
    "modules": {"torch"},
    "distributed": {"torch"},
    "models": {"torch"},
    "health": {"torch"},
    "train": {"matplotlib", "rich", "safetensors", "tensorboard", "tokenizers", "torch", "typer", "yaml"},
    "report": {"matplotlib"},
    "inspect": {"matplotlib", "rich", "safetensors", "tokenizers", "torch", "transformers", "typer"},
    "integrations": {"torch", "transformers"},
    "compat": {"torch"},
    "testing": {"torch"},
    # Peers are optional: bench times those that happen to be installed.
    "bench": {"liger_kernel", "matplotlib", "rich", "tile_kernels", "torch", "transformers", "triton"},
    "doctor": {"rich", "torch"},
    "cli": {"rich", "torch", "typer"},
    "__main__": set(),
    "": set(),
}
# Read switches, a folder's and a compiler's name from the environment; writes files to the disk for good.
MAY_USE_OS = ("_autotune.py", "_build.py", "_native.py", "shipped.py", "atomic.py")


def _area(path: Path) -> str:
    """The room a file is in: a package, a module of the top level, or "" for mhckit/__init__.py."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Absolute names of what a file imports, wherever in the file."""
    package = ["mhckit", *path.relative_to(PACKAGE).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            names.add(".".join([*parent, *([node.module] if node.module else [])]))
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    area = _area(path)
    assert area in MAY_IMPORT, f"say in this test what mhckit.{area} may import"
    for name in _imports(path):
        top, *rest = name.split(".")
        if top == "mhckit":
            target = rest[0] if rest else ""
            assert target == area or target in MAY_IMPORT[area], f"{area or 'mhckit'} imports {name}"
        elif top not in sys.stdlib_module_names:
            assert top in THIRD_PARTY[area], f"{area or 'mhckit'} imports {name}"
        assert top != "os" or path.name in MAY_USE_OS, f"{area or 'mhckit'} could read the environment"


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)


def test_cold_import_without_triton() -> None:
    """With Triton made impossible to import, mhckit imports, runs and learns."""
    _run(
        """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ImportError("triton is not installed")
sys.meta_path.insert(0, Blocker())
import torch, mhckit
h, streams = mhckit.HyperConnection(8)(mhckit.Streams.expand(torch.randn(3, 8), 4))
streams.write(h).tensor.sum().backward()
assert "triton" not in sys.modules
"""
    )


def test_import_changes_nothing() -> None:
    """No patching, no default changed, no accelerator touched, no kernel loaded."""
    _run(
        """
import os, sys, torch
before = (torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
          torch.get_float32_matmul_precision(), dict(os.environ))
patched = {name: getattr(torch.nn.functional, name) for name in dir(torch.nn.functional)}
import mhckit
after = (torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
         torch.get_float32_matmul_precision(), dict(os.environ))
assert before == after
assert all(getattr(torch.nn.functional, name) is value for name, value in patched.items())
assert not torch.cuda.is_initialized()
assert not any(name.startswith(("triton", "mhckit.kernels", "mhckit.testing", "transformers")) for name in sys.modules)
"""
    )


def test_public_names() -> None:
    assert all(hasattr(mhckit, name) for name in mhckit.__all__)
    assert sorted(mhckit.__all__, key=str.lower) == sorted(set(mhckit.__all__), key=str.lower)
