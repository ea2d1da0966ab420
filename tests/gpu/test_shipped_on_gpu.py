"""A process that is given compiled kernels compiles none: without a C compiler, with the package elsewhere, and with
the kernels in a folder that is read-only, and then in one that was moved.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from read_only import make_read_only, python, snapshot

import mhckit

WIDTH = 136
FIRST_CALL = f"""
import time
import torch
from triton import knobs
import mhckit
from mhckit import HyperConnection, Streams

hits = []
knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
connections = [HyperConnection({WIDTH}, "deepseek_v4", norm=True, layer_index=i, device="cuda") for i in range(2)]
h = torch.randn(5, {WIDTH}, device="cuda", dtype=torch.bfloat16)


@torch.no_grad()
def reads():
    streams = Streams.expand(h, 4)
    for connection in connections:
        read, streams = connection(streams)
        streams = streams.write(read.tanh())
    return read.float()


torch.cuda.synchronize()
start = time.perf_counter()
got = reads()
torch.cuda.synchronize()
seconds = time.perf_counter() - start
assert hits and all(hits), hits
with mhckit.backend("reference"):
    want = reads()
assert (got - want).norm() < 2e-2 * want.norm()
print(mhckit.__file__)
print(f"{{len(hits)}} kernels loaded, 0 compiled; expansion, first read and first junction took {{seconds:.2f}} s")
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A folder with what inference needs, compiled by the command line."""
    folder = tmp_path / "kernels"
    options = ["--dim", str(WIDTH), "--recipe", "deepseek_v4", "--norm", "--inference", "--cache", str(folder)]
    command = [sys.executable, "-m", "mhckit", "warmup", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    counted = re.match(r"(\d+) kernels in [\d.]+ s: (\d+) compiled, 0 loaded from disk", done.stdout)
    assert counted and int(counted[1]) == int(counted[2]) > 3, done.stdout
    print(done.stdout)
    make_read_only(folder)
    return folder


def _first_call(folder: Path, **environment: str) -> None:
    package = folder / "mhckit"
    if not package.exists():
        shutil.copytree(Path(mhckit.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    script = folder / "first_call.py"
    script.write_text(FIRST_CALL)
    settings = {"PYTHONPATH": str(folder), "CC": str(folder / "no-compiler"), **environment}
    done = subprocess.run(python(script), env=os.environ | settings, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    used, told = done.stdout.splitlines()
    assert Path(used).parent == package
    print(told)


def test_the_first_junction_compiles_nothing(kernels: Path, tmp_path: Path) -> None:
    """Its time is printed: pytest -s."""
    before = snapshot(kernels)
    _first_call(tmp_path, TRITON_CACHE_DIR=str(kernels))
    assert snapshot(kernels) == before

    moved, own = tmp_path / "moved", tmp_path / "own"
    kernels.rename(moved)
    before = snapshot(moved)
    manager = "mhckit.kernels.shipped:ShippedCache"
    _first_call(tmp_path, MHCKIT_KERNELS=str(moved), TRITON_CACHE_MANAGER=manager, TRITON_CACHE_DIR=str(own))
    assert snapshot(moved) == before and not own.exists()
