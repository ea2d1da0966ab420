"""DDP on two processes: a step on halves of a batch is the step of one process on all of it."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from processes import WORLD, Block, Model, run_in_two
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mhckit import HyperConnection, Recipe, Streams

DIM, RATE = 8, 0.5


def _check_step(rank: int, preset: str) -> None:
    recipe = Recipe.preset(preset)
    single, local = Model(DIM, recipe), Model(DIM, recipe)
    if rank == 0:  # DDP hands these to the other process
        local.load_state_dict(single.state_dict())
    model = DistributedDataParallel(local)
    batch, target = torch.randn(2 * WORLD, 3, DIM), torch.randn(2 * WORLD, 3, DIM)
    before = copy.deepcopy(single.state_dict())
    for one, rows in ((model, slice(2 * rank, 2 * rank + 2)), (single, slice(None))):
        optimizer = torch.optim.SGD(one.parameters(), lr=RATE, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            (one(batch[rows]) - target[rows]).square().mean().backward()
            optimizer.step()
    for (name, parameter), want in zip(local.named_parameters(), single.parameters(), strict=True):
        assert not torch.equal(want, before[name]), name
        torch.testing.assert_close(parameter, want, msg=lambda message, name=name: f"{name}: {message}")


def test_a_step_equals_that_of_one_process(tmp_path: Path) -> None:
    run_in_two(_check_step, tmp_path, "deepseek_v4")


class Body(nn.Module):
    """From Streams to Streams, with a connection that nothing uses."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(DIM, recipe, index, f_bias=index == 0) for index in range(2)))
        self.unused = HyperConnection(DIM, recipe)

    def forward(self, streams: Streams) -> Streams:
        return self.blocks(streams)


def _check_streams(rank: int) -> None:
    """DDP looks for the tensors in a module's results, here in Streams, to tell which parameters they need.

    It takes none of the parameters themselves among them: the f_bias of the last sublayer must not wait there.
    """
    recipe = Recipe.preset("deepseek_v4")
    single, local = Body(recipe), Body(recipe)
    local.load_state_dict(single.state_dict())
    model = DistributedDataParallel(local, find_unused_parameters=True)
    batch = torch.randn(WORLD, 3, DIM)
    streams = model(Streams.expand(batch[rank : rank + 1], recipe.streams))
    assert isinstance(streams, Streams)
    assert streams.f is not None
    streams.tensor.square().mean().backward()
    single(Streams.expand(batch, recipe.streams)).tensor.square().mean().backward()
    for (name, parameter), plain in zip(local.named_parameters(), single.parameters(), strict=True):
        if name.startswith("unused."):
            assert plain.grad is None
            assert parameter.grad is None or not parameter.grad.any()
        else:
            torch.testing.assert_close(parameter.grad, plain.grad, msg=lambda message, name=name: f"{name}: {message}")


def test_a_module_from_streams_to_streams(tmp_path: Path) -> None:
    run_in_two(_check_streams, tmp_path)
