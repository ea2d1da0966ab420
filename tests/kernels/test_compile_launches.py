"""Launches that were not made are compiled, once, to what later ones look up: for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = '''
import contextlib, threading
from types import SimpleNamespace

import torch, triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import _async_compile
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

import mhckit
from mhckit.kernels import _autotune, _runtime, _warmup

threads, device = set(), torch.device("cpu")


class Launcher:
    def __init__(self, src, metadata):
        threads.add(threading.get_ident())


class Driver:
    """Compiles for Hopper, and loads nothing."""

    launcher_cls = Launcher
    most_threads = 1024
    utils = SimpleNamespace(
        load_binary=lambda *binary: ("module", "function", 32, 0, Driver.most_threads),
        get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
    )
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


driver.set_active(Driver())
_runtime.check = lambda device: None
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.is_current_stream_capturing = lambda: False


def run():
    mhckit.expand(torch.zeros(3, 64, requires_grad=True), 4).sum().backward()


heard = []
knobs.compilation.listener = lambda **facts: heard.append(facts["cache_hit"])
with mhckit.backend("triton"):
    launches = _warmup.recorded(run)
kernels = {launch.kernel for launch in launches}
assert [launch.kernel.__name__ for launch in launches] == ["broadcast_kernel", "read_kernel"]

assert _warmup.compile_launches([*launches, *launches], device, 2) == (2, 2, 0)
assert len(threads) == 2 and threading.get_ident() not in threads
assert heard == [False, False], "whoever listened before still does"
for kernel, grid, args, constants in launches:
    ready = kernel.warmup(*args, grid=grid, **constants)
    assert ready.function == "function" and isinstance(ready.run, Launcher), "loaded, not only compiled"
assert heard == [False, False], "a launch finds what was compiled"
assert _warmup.compile_launches(launches, device) == (2, 0, 0)

for kernel in kernels:
    kernel.device_caches.clear()
assert _warmup.compile_launches(launches, device) == (2, 0, 2), "as in another process"


@triton.jit
def wrong(x):
    nonsense


bad = _warmup.Launch(wrong, (1,), (torch.zeros(3),), {})
try:
    _warmup.compile_launches([bad], device)
    raise SystemExit("an error was lost")
except triton.CompilationError:
    assert _async_compile.active_mode.get() is None

Driver.most_threads = 32
for kernel in kernels:
    kernel.device_caches.clear()
try:
    _warmup.compile_launches(launches, device)
    raise SystemExit("what does not fit was not noticed")
except OutOfResources:
    pass
_autotune.is_enabled = lambda: True
counts = _warmup.compile_launches(launches, device)
assert counts == (4, 2, 2), f"a search times three candidates, some of which may not fit: {counts}"
'''


def test_what_is_compiled_is_what_launches_look_up(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = tmp_path / "compile.py"
    script.write_text(CODE)  # Triton reads the source of kernels from a file
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
