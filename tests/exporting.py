"""A network of mhckit's modules, exported once and compiled ahead of time, and then run where its source is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from recipes import every_recipe
from torch import Tensor, nn

from mhckit import HyperConnection, HyperHead, Streams

# Sinkhorn; a pre of the sublayer before; no residual matrix; no projection, so that results are absent.
RECIPES = ("deepseek_v4", "deepseek_v41", "hy_v4", "paper-static")
DIM, READS = 24, 3
EXPORTED_WITH = (2, 11)
RUN_WITH = ((2, 11), (1, 1), (3, 7), (1, 200), (5, 0))

RUN = """
import sys
import torch
import mhckit  # registers the operators
package, cases = sys.argv[1:]
network = torch._inductor.aoti_load_package(package)
for h, want in torch.load(cases):
    got = network(h)
    assert got.shape == want.shape and got.dtype == want.dtype and got.device == want.device
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9)
    assert error < float(2e-2 if want.dtype == torch.bfloat16 else 1e-5), (tuple(h.shape), float(error))
absent = [name for name in sys.modules if name in ("exporting", "mhckit.models", "mhckit.testing")]
assert not absent, absent
print(network.__class__.__name__, "ran")
"""


class Chain(nn.Module):
    """Reads and writes of one recipe: with a norm, a bias that is left to the write, and reads of another dtype."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        kind = every_recipe()[recipe]
        options: dict[str, Any] = dict(norm=True, out_dtype=torch.float32)
        self.connections = nn.ModuleList(HyperConnection(DIM, kind, layer_index=i, **options) for i in range(READS))
        self.head = HyperHead(DIM, kind)
        self.f_bias = nn.Parameter(torch.randn(DIM))
        self.streams = kind.streams

    def forward(self, h: Tensor) -> Tensor:
        streams = Streams.expand(h, self.streams)
        for connection in self.connections:
            read, streams = connection(streams)
            streams = streams.write(read.tanh().to(h.dtype), self.f_bias.to(h.dtype))
        return self.head(streams)


class Network(nn.Module):
    """A chain per recipe, after each other: [batch, length, C] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.chains = nn.ModuleList(Chain(recipe) for recipe in RECIPES)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))

    def forward(self, h: Tensor) -> Tensor:
        for chain in self.chains:
            h = chain(h)
        return h


def exported(network: nn.Module, h: Tensor) -> torch.export.ExportedProgram:
    """For any batch and any length."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    with torch.no_grad():
        return torch.export.export(network, (h,), dynamic_shapes=({0: batch, 1: length},))


def inputs(dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn(*shape, DIM, dtype=dtype, device=device) for shape in RUN_WITH]


@torch.no_grad()
def check_in_another_process(network: nn.Module, dtype: torch.dtype, device: str, folder: Path) -> None:
    """Compile what was exported, and compare what a process without this file computes with eager mode."""
    program = exported(network, torch.randn(*EXPORTED_WITH, DIM, dtype=dtype, device=device))
    quickly = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # of the C++ between the kernels
    path = str(folder / "network.pt2")
    package = torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=quickly)
    cases = folder / "cases.pt"
    torch.save([(h, network(h)) for h in inputs(dtype, device)], cases)
    script = folder / "run.py"  # beside which Python looks for modules
    script.write_text(RUN)
    command = [sys.executable, "-X", "faulthandler", script, package, cases]  # a process that crashes says where
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "ran" in done.stdout, f"exit {done.returncode}: {done.stdout}{done.stderr[-3000:]}"
