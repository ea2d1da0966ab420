"""Launches of operators: each kernel is compiled for Hopper, as a GPU would be asked to, decoded once, and run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import crosscompile

from .decode import Decoded
from .launch import Parameter, Ready, run
from .ptx import parse


class GPU:
    """names: of the kernels that were launched, in order."""

    def __init__(self, seed: int) -> None:
        self.names: list[str] = []
        self._seed = seed
        self._ready: dict[crosscompile.Launch, Ready] = {}

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.names.append(kernel.__name__)
        if 0 in grid:
            return
        launch = crosscompile.launch_of(kernel, args, constants)
        if launch not in self._ready:
            binary = crosscompile.build(launch, "sm_90")
            self._ready[launch] = Ready(Decoded(parse(binary.asm["ptx"])), binary.metadata.shared)
        bound = dict(zip(kernel.arg_names, args, strict=False)) | constants
        tiles = crosscompile.tiles_of(kernel, args, constants)
        parameters = [
            Parameter(bound[name], kind == "fp32", tiles.get(name))
            for name, kind in launch.signature
            if kind != "constexpr"
        ]
        run(self._ready[launch], grid, parameters, self._seed)


@contextlib.contextmanager
def emulated(seed: int = 0) -> Iterator[GPU]:
    """Operators on CPU tensors launch their kernels on an emulated GPU; seed: of the order of warps."""
    gpu = GPU(seed)
    with crosscompile.launches_go_to(gpu.launch):
        yield gpu
