"""Kernels that were compiled before are found: by a package elsewhere, in a folder that is read-only or was moved."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from read_only import make_read_only, python, snapshot
from triton import knobs
from triton.runtime.cache import FileCacheManager

import mhckit
from mhckit.kernels.shipped import ShippedCache

MANAGER = "mhckit.kernels.shipped:ShippedCache"
CODE = """
import os, sys
from pathlib import Path
from hopper import CPU
import torch, mhckit
from mhckit.kernels import _warmup

for folder in os.environ["READ_ONLY"].split():
    try:
        Path(folder, "file").touch()
        raise SystemExit(f"{folder} can be written: this test cannot fail")
    except PermissionError:
        pass
print(Path(mhckit.__file__).parent)
for width in sys.argv[1:]:
    with mhckit.backend("triton"):
        launches = _warmup.recorded(lambda: mhckit.expand(torch.zeros(3, int(width)), 4))
    print(*_warmup.compile_launches(launches, CPU, 1))
"""


def _compile(tmp_path: Path, *widths: int, package: Path, read_only: str = "", **environment: str) -> list[list[int]]:
    """Kernels, compiled, and loaded, of the expansion of each width, in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    path = os.pathsep.join([str(package.parent), str(Path(__file__).parent)])
    script = tmp_path / "compile.py"
    script.write_text(CODE)
    done = subprocess.run(
        python(script, *widths),
        env=inherited | environment | {"PYTHONPATH": path, "READ_ONLY": read_only},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    used, *counts = done.stdout.splitlines()
    assert Path(used) == package
    return [[int(count) for count in line.split()] for line in counts]


def test_other_processes_compile_nothing(tmp_path: Path) -> None:
    here = Path(mhckit.__file__).parent
    kernels, moved, own = (tmp_path / name for name in ("kernels", "moved", "own"))
    assert _compile(tmp_path, 64, package=here, TRITON_CACHE_DIR=str(kernels)) == [[1, 1, 0]]

    elsewhere = tmp_path / "elsewhere" / "mhckit"
    shutil.copytree(here, elsewhere, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile)
    make_read_only(kernels)
    before = snapshot(kernels)
    where = {"package": elsewhere, "TRITON_CACHE_DIR": str(kernels), "read_only": str(kernels)}
    assert _compile(tmp_path, 64, **where) == [[1, 0, 1]]
    assert snapshot(kernels) == before

    kernels.rename(moved)
    before = snapshot(moved)
    shipped = {"MHCKIT_KERNELS": str(moved), "TRITON_CACHE_MANAGER": MANAGER, "read_only": str(moved)}
    where = {"package": elsewhere, "TRITON_CACHE_DIR": str(own), **shipped}
    assert _compile(tmp_path, 64, 72, **where) == [[1, 0, 1], [1, 1, 0]], "what was not shipped is compiled"
    made = {path.name for path in own.rglob("*.cubin")}
    assert made == {"broadcast_kernel.cubin"} and len(list(own.iterdir())) == 1
    assert _compile(tmp_path, 64, 72, **where) == [[1, 0, 1], [1, 0, 1]], "and found in Triton's own folder"
    assert snapshot(moved) == before


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """One that was shipped, with a kernel in it, and Triton's own."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "built"))
    built = FileCacheManager("key")
    built.put_group("a.json", {name: built.put(name, name) for name in ("a.json", "a.cubin")})
    (tmp_path / "built").rename(tmp_path / "shipped")
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "own"))
    monkeypatch.setenv("MHCKIT_KERNELS", str(tmp_path / "shipped"))
    return tmp_path / "shipped", tmp_path / "own"


def test_what_was_shipped_is_found_by_name(folders: tuple[Path, Path]) -> None:
    shipped, own = folders
    cache = ShippedCache("key")
    assert cache.get_file("a.cubin") == str(shipped / "key" / "a.cubin")
    assert cache.get_group("a.json") == {name: str(shipped / "key" / name) for name in ("a.json", "a.cubin")}
    assert not own.exists(), "nothing is written for what is there"


@pytest.mark.parametrize("broken", ["a.cubin", "__grp__a.json"])
def test_what_was_shipped_in_part_is_compiled_again(broken: str, folders: tuple[Path, Path]) -> None:
    """A file is missing, or the list of them is cut short."""
    shipped, own = folders
    path = shipped / "key" / broken
    if broken.startswith("__grp__"):
        path.write_text(path.read_text()[:-3])
    else:
        path.unlink()
    cache = ShippedCache("key")
    assert cache.get_group("a.json") is None
    files = {name: cache.put(name, name) for name in ("a.json", "a.cubin")}
    cache.put_group("a.json", files)
    assert cache.get_group("a.json") == {name: str(own / "key" / name) for name in files}


def test_what_is_missing_is_tritons_own(folders: tuple[Path, Path]) -> None:
    shipped, own = folders
    before = snapshot(shipped)
    cache = ShippedCache("key")
    assert cache.get_file("b.cubin") is None and cache.get_group("b.json") is None
    path = cache.put(b"code", "b.cubin")
    cache.put_group("b.json", {"b.cubin": path})
    assert Path(path) == own / "key" / "b.cubin" and Path(path).read_bytes() == b"code"
    assert ShippedCache("key").get_group("b.json") == {"b.cubin": path}
    assert ShippedCache("other").get_file("a.cubin") is None
    assert snapshot(shipped) == before


def test_a_folder_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MHCKIT_KERNELS", raising=False)
    with pytest.raises(ValueError, match="MHCKIT_KERNELS must name its folder"):
        ShippedCache("key")
    monkeypatch.setenv("MHCKIT_KERNELS", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"a folder with compiled kernels, got '.*none'"):
        ShippedCache("key")
