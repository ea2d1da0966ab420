"""Run a function in two processes that can talk to each other, and a small model for them to share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from mhckit import HyperConnection, HyperHead, Recipe, Streams

WORLD = 2
SECONDS = 120


def run_in_two(function: Callable[..., None], directory: Path, *args: Any) -> None:
    """Call function(rank, *args) in two processes of one gloo group; raises what they raise, and if they hang."""
    context: Any = spawn(_run, args=(function, str(directory), args), nprocs=WORLD, join=False)
    deadline = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"not done after {SECONDS} s"
    finally:
        for process in context.processes:
            process.kill()
    assert _both_done(directory)


def _run(rank: int, function: Callable[..., None], directory: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # A file, not a port, which another process could take meanwhile.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/init",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=SECONDS / 2),
    )
    torch.manual_seed(0)
    function(rank, *args)
    Path(directory, f"done{rank}").touch()
    _wait_for_both(Path(directory))  # before the connections to the other process close
    os._exit(0)  # taking a group down with DTensors around aborts now and then: "terminate called without ..."


def _both_done(directory: Path) -> bool:
    return all((directory / f"done{rank}").exists() for rank in range(WORLD))


def _wait_for_both(directory: Path) -> None:
    deadline = time.monotonic() + SECONDS / 2
    while not _both_done(directory) and time.monotonic() < deadline:
        time.sleep(0.01)


class Block(nn.Module):
    """One sublayer with its connection, from Streams to Streams."""

    def __init__(self, dim: int, recipe: Recipe, index: int, *, f_bias: bool = True) -> None:
        super().__init__()
        self.connection = HyperConnection(dim, recipe, layer_index=index, norm=True, projection_norm_weight=True)
        self.sublayer = nn.Linear(dim, dim, bias=f_bias)

    def forward(self, streams: Streams) -> Streams:
        h, streams = self.connection(streams)
        return streams.write(nn.functional.linear(h.tanh(), self.sublayer.weight), self.sublayer.bias)


class Model(nn.Module):
    """A small network of streams whose coefficients are far from their initial, almost constant values."""

    def __init__(self, dim: int, recipe: Recipe, depth: int = 2) -> None:
        super().__init__()
        self.recipe = recipe
        self.blocks = nn.ModuleList(Block(dim, recipe, index) for index in range(depth))
        self.head = HyperHead(dim, recipe)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)

    def forward(self, h: Tensor) -> Tensor:
        streams = Streams.expand(h, self.recipe.streams)
        for block in self.blocks:
            streams = block(streams)
        return self.head(streams)
