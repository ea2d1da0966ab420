"""A driver in place of a GPU's: compiles for Hopper, and loads nothing. For scripts, which importing it changes."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from mhckit.kernels import _runtime

CPU = torch.device("cpu")
launched_from: set[int] = set()  # threads that made launchers


launched: list[tuple[Any, ...]] = []  # grids


class Launcher:
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, src: Any, metadata: Any) -> None:
        launched_from.add(threading.get_ident())

    def __call__(self, *values: Any) -> None:
        launched.append(values[:3])

    launch = __call__


class Driver:
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
