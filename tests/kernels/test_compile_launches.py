"""Launches that were not made are compiled, once, to what later ones look up: for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mhckit.kernels._hopper_launch import HAS_GLUON

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

FORMS = """
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from triton import AsyncCompileMode, knobs

from triton.runtime.errors import OutOfResources

from hopper import Driver, launched, launched_from
from mhckit.kernels import _launcher, _write_project
from mhckit.kernels._write_project_hopper import write_project_hopper_kernel

heard = []
knobs.compilation.listener = lambda **facts: heard.append(facts["src"].name)
torch.cuda.current_device = lambda: 0
torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda device: 0


def write_project(tokens, channels=256):
    x, f = torch.zeros(tokens, 4, channels).bfloat16(), torch.zeros(tokens, channels).bfloat16()
    _write_project.write_project(x, f, None, torch.zeros(tokens, 4), None, torch.zeros(8, 4 * channels), None)


write_project(5)
assert launched == [(1, 2, 1)], "few tokens: a program for every sum"
assert sorted(heard) == ["write_project_hopper_kernel", "write_project_kernel"], heard
assert len(launched_from) == 2 and threading.get_ident() not in launched_from, "side by side"
write_project(64 * 132)
write_project(64 * 132)
assert launched[1:] == [(132, 1, 1)] * 2, launched
write_project(6)
assert len(launched) == 4 and len(heard) == 2, "nothing is compiled for another number of tokens"
kernels = [key[0] for key in _launcher._compiled]
assert kernels == [_write_project.write_project_kernel, write_project_hopper_kernel]

write_project(0, channels=1280)
assert len(launched) == 4, "nothing is launched for no tokens"

heard.clear()
with ThreadPoolExecutor(1) as pool, AsyncCompileMode(pool):
    write_project(5, channels=384)
assert len(launched) == 5 and len(heard) == 2, "in the threads of a caller that has some"

Driver.most_threads = 256
write_project(5, channels=512)
assert len(launched) == 6, "a form that the device is too small for does not stop the other"
try:
    write_project(64 * 132, channels=512)
    raise SystemExit("what does not fit was not noticed")
except OutOfResources:
    assert len(launched) == 6
"""


ANY_TOKENS = """
import torch
from triton import knobs

from hopper import launched
from mhckit.kernels._gradients import CollapseGradient, ProjectionGradient, Write
from mhckit.kernels._launch import packed_dz_width
from mhckit.kernels._pack import empty_phi_parts
from mhckit.kernels._streams_bwd import hopper_phi_layout, write_streams_bwd
from mhckit.kernels._write_project import write_project

heard = []
knobs.compilation.listener = lambda **facts: heard.append(facts["src"].name)
torch.cuda.current_device = lambda: 0
torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda device: 0
rows, channels = N * (N + 2), 2048


def forward(tokens):
    x, f = (torch.zeros(tokens, *rest, channels, dtype=torch.bfloat16) for rest in ((N,), ()))
    write_project(x, f, None, torch.zeros(tokens, N), torch.zeros(tokens, N, N), torch.zeros(rows, N * channels), None)


def backward(tokens):
    x, f = (torch.zeros(tokens, *rest, channels, dtype=torch.bfloat16) for rest in ((N,), ()))
    post, k = torch.zeros(tokens, N), torch.zeros(tokens)
    dz = torch.zeros(tokens, packed_dz_width(rows), dtype=torch.bfloat16)
    write = Write(f, None, post, torch.zeros(tokens, N, N))
    layout = hopper_phi_layout(x, x, f, write, rows)
    parts = empty_phi_parts(torch.zeros(rows, N * channels), N, layout)
    write_streams_bwd(x, x, CollapseGradient(f, post), ProjectionGradient(dz, k, None, parts, rows), write, False)


kernels = {"streams_bwd_hopper_kernel": backward}
if N == 8:
    kernels = {"write_project_eight_kernel": forward, "streams_bwd_eight_kernel": backward}
for kernel, call in kernels.items():
    launched.clear()
    heard.clear()
    for tokens in (1, 7, 128, 4097, 64 * 132, 0):
        call(tokens)
    assert launched == [(1, 2, 1), (1, 2, 1), (2, 2, 1), (65, 2, 1), (132, 1, 1)], launched
    assert heard == [kernel], "once, however many tokens there are and programs share the channels"
"""


CALL = """
import threading

import torch
import triton
import triton.language as tl
from triton import knobs

from hopper import launched, launched_from
from mhckit.kernels import _launcher, _plan
from mhckit.ops._register import empty

heard, calls, held = [], [], []
knobs.compilation.listener = lambda **facts: heard.append(facts["src"].name)
torch.cuda.current_device = lambda: 0
torch._C._cuda_getDevice = lambda: None  # as the index of the CPU
torch._C._cuda_getCurrentRawStream = lambda device: 0
_plan._may_repeat, _plan._empty_strided_cuda = lambda tensor: True, None


@triton.jit(do_not_specialize=["T"])
def copy(x, y, T, C: tl.constexpr):
    t = tl.arange(0, C)
    tl.store(y + t, tl.load(x + t, mask=t < T), mask=t < T)


@triton.jit(do_not_specialize=["T"])
def double(x, y, T, C: tl.constexpr):
    t = tl.arange(0, C)
    tl.store(y + t, 2 * tl.load(x + t, mask=t < T), mask=t < T)


@triton.jit
def wrong(x, C: tl.constexpr):
    nonsense


class Allocated(torch.Tensor):
    alive = most = 0

    def __del__(self):
        Allocated.alive -= 1


def host(x, broken=False):
    calls.append(len(launched))
    Allocated.alive += 1
    Allocated.most = max(Allocated.most, Allocated.alive)
    y, z = empty(x, *x.shape), empty(x, *x.shape)
    memory = torch.zeros(1).as_subclass(Allocated)
    _launcher.run(copy, (1,), x, y, x.shape[0], C=16)
    if broken:
        _launcher.run(wrong, (1,), x, C=16)
    _launcher.run(double, (1,), y, z, x.shape[0], C=16)
    return z


planned = _plan.Planned(host)
planned((torch.zeros(5),), none_for_absent=True)
assert sorted(heard) == ["copy", "double"] and len(launched_from) == 2, (heard, launched_from)
assert threading.get_ident() not in launched_from, "side by side, in threads"
assert len(launched) == 2 and calls == [0, 0, 0], "nothing is launched before all is compiled"
assert Allocated.most == 1, "what was allocated in vain is free when it is allocated again"
planned((torch.zeros(6),), none_for_absent=True)
assert len(launched) == 4 and calls == [0, 0, 0, 2] and len(heard) == 2, "a new size is called once"
planned((torch.zeros(6),), none_for_absent=True)
assert len(launched) == 6 and len(calls) == 4, "and then repeated"
torch.cuda.is_current_stream_capturing = lambda: True
planned((torch.zeros(6).half(),), none_for_absent=True)
assert len(launched) == 8 and len(calls) == 5, "a graph gets every launch once"
torch.cuda.is_current_stream_capturing = lambda: False
host(torch.zeros(6).double())
assert len(launched) == 10 and len(heard) == 6, "what nobody watches compiles as it launches"

try:
    planned((torch.zeros(7), True), none_for_absent=True)
    raise SystemExit("an error was lost")
except triton.CompilationError:
    assert _launcher._watching.kept is None and not _launcher._watching.compiled_only
planned((torch.zeros(8),), none_for_absent=True)
assert len(launched) == 14, "the copy before what failed, twice, then all of the next call"
"""

two_forms = pytest.mark.skipif(not HAS_GLUON, reason="a kernel for Hopper, of one version of Triton")


@pytest.mark.parametrize("code", [
    pytest.param(CODE, id="warm-up"),
    pytest.param(FORMS, id="forms of a first launch", marks=two_forms),
    pytest.param("N = 4" + ANY_TOKENS, id="any number of tokens", marks=two_forms),
    pytest.param("N = 8" + ANY_TOKENS, id="any number of tokens of eight streams", marks=two_forms),
    pytest.param(CALL, id="kernels of a first call"),
])  # fmt: skip
def test_what_is_compiled_is_what_launches_look_up(code: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    script = tmp_path / "compile.py"
    script.write_text(code)  # Triton reads the source of kernels from a file
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
