"""The wheel holds what it should and imports where nothing but torch is installed."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from mhckit.native._build import SOURCES

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (built,) = target.glob("*.whl")
    return built


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "mhckit/py.typed" in names and "mhckit/doctor/committed.json" in names
    assert {f"mhckit/native/{source}" for source in SOURCES} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"mhckit", f"mhckit-{metadata.version('mhckit')}.dist-info"}


def test_core_depends_on_torch_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("METADATA"))
        text = archive.read(name).decode()
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert required == ["Requires-Dist: torch>=2.6"]
    extras = re.findall(r"^Provides-Extra: (.*)$", text, re.MULTILINE)
    assert sorted(extras) == ["cli", "dev", "docs", "train", "transformers", "viz"]


def _closure(distribution: str) -> set[str]:
    """Installed distributions that this one needs, itself included."""
    found: set[str] = set()
    waiting = [distribution]
    while waiting:
        name = waiting.pop()
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # a requirement of another platform
        found.add(name)
        wanted = [re.split(r"[ ;<>=!~\[(]", line)[0] for line in requires if "extra ==" not in line]
        waiting += [name for name in wanted if name not in found]
    return found


def test_imports_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """A fresh virtual environment that holds the wheel, torch and what torch needs, and nothing else."""
    environment, torch_alone = tmp_path / "venv", tmp_path / "torch_alone"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=300)
    python = environment / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    torch_alone.mkdir()
    for name in _closure("torch"):
        for file in metadata.files(name) or ():
            top = file.parts[0]
            if top not in ("..", "bin", "__pycache__") and not (torch_alone / top).exists():
                (torch_alone / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    code = f"""
import sys
sys.path.append({str(torch_alone)!r})
import mhckit, torch
assert mhckit.__file__.startswith({str(environment)!r}), mhckit.__file__
h, streams = mhckit.HyperConnection(8)(mhckit.Streams.expand(torch.randn(3, 8), 4))
streams.write(h).tensor.sum().backward()
for name in ("rich", "typer", "transformers", "hypothesis"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(name + " leaked into the clean environment")
print(mhckit.__version__)
"""
    done = subprocess.run([str(python), "-I", "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == metadata.version("mhckit")
