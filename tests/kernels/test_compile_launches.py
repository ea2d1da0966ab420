"""Launches that were not made are compiled, once, to what later ones look up: for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import gc
import sys
import threading

import torch, triton
from triton import knobs
from triton.runtime import _async_compile
from triton.runtime.errors import OutOfResources

from hopper import CPU, Driver, Launcher, launched_from
import mhckit
from mhckit.kernels import _autotune, _warmup


def run():
    mhckit.expand(torch.zeros(3, 64, requires_grad=True), 4).sum().backward()


heard, collects = [], []


def listen(**facts):
    heard.append(facts["cache_hit"])
    collects.append(gc.isenabled())


knobs.compilation.listener = listen
with mhckit.backend("triton"):
    launches = _warmup.recorded(run)
kernels = {launch.kernel for launch in launches}
assert [launch.kernel.__name__ for launch in launches] == ["broadcast_kernel", "read_kernel"]

assert _warmup.compile_launches([*launches, *launches], CPU, 2) == (2, 2, 0)
assert len(launched_from) == 2 and threading.get_ident() not in launched_from
assert heard == [False, False], "whoever listened before still does"
breaks = (3, 11) <= sys.version_info < (3, 11, 8)
assert gc.isenabled() and collects == [not breaks] * 2, "a collection breaks ast.parse"
for kernel, grid, args, constants in launches:
    ready = kernel.warmup(*args, grid=grid, **constants)
    assert ready.function == "function" and isinstance(ready.run, Launcher), "loaded, not only compiled"
assert heard == [False, False], "a launch finds what was compiled"
assert _warmup.compile_launches(launches, CPU) == (2, 0, 0)

for kernel in kernels:
    kernel.device_caches.clear()
assert _warmup.compile_launches(launches, CPU) == (2, 0, 2), "as in another process"


@triton.jit
def wrong(x):
    nonsense


bad = _warmup.Launch(wrong, (1,), (torch.zeros(3),), {})
try:
    _warmup.compile_launches([bad], CPU)
    raise SystemExit("an error was lost")
except triton.CompilationError:
    assert _async_compile.active_mode.get() is None and gc.isenabled()

Driver.most_threads = 32
for kernel in kernels:
    kernel.device_caches.clear()
try:
    _warmup.compile_launches(launches, CPU)
    raise SystemExit("what does not fit was not noticed")
except OutOfResources:
    pass
_autotune.is_enabled = lambda: True
counts = _warmup.compile_launches(launches, CPU)
assert counts == (4, 2, 2), f"a search times three candidates, some of which may not fit: {counts}"
"""


def test_what_is_compiled_is_what_launches_look_up(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    script = tmp_path / "compile.py"
    script.write_text(CODE)  # Triton reads the source of kernels from a file
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
