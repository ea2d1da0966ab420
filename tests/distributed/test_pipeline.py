"""Streams across the boundary of a pipeline on two processes: the losses and gradients of one."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from processes import WORLD, Model, run_in_two
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from mhckit import HyperConnection, Mix, Recipe, Streams
from mhckit.distributed import pack_streams, unpack_streams

DIM, MICROBATCHES = 8, 2
# Older versions of torch leave it to the loss to divide by the number of microbatches.
SCALES = "scale_grads" in inspect.signature(ScheduleGPipe).parameters
RECIPES = {
    "written": Recipe.preset("deepseek_v4"),
    "parts": Recipe.preset("deepseek_v41"),
    "parts without res": Recipe.preset("deepseek_v41", residual="identity"),
}


class First(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.recipe, self.block = model.recipe, model.blocks[0]

    def forward(self, h: Tensor) -> tuple[Tensor, ...]:
        return pack_streams(self.block(Streams.expand(h, self.recipe.streams)), self.recipe)


class Last(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.recipe, self.blocks, self.head = model.recipe, model.blocks[1:], model.head

    def forward(self, *tensors: Tensor) -> Tensor:
        streams = unpack_streams(tensors, self.recipe)
        for block in self.blocks:
            streams = block(streams)
        return self.head(streams)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _run_stage(rank: int, stage: nn.Module, batch: Tensor, target: Tensor) -> list[Tensor]:
    """One step of the schedule; losses of the microbatches, on the last process."""
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, WORLD, torch.device("cpu")),
        n_microbatches=MICROBATCHES,
        loss_fn=lambda *args: _loss(*args) / (1 if SCALES else MICROBATCHES),
    )
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=target, losses=losses)
    return losses


def _check_pipeline(rank: int, name: str) -> None:
    recipe = RECIPES[name]
    single = Model(DIM, recipe, depth=3)
    model = Model(DIM, recipe, depth=3)
    model.load_state_dict(single.state_dict())
    batch, target = torch.randn(4, 3, DIM), torch.randn(4, 3, DIM)
    want = _loss(single(batch), target)
    want.backward()
    losses = _run_stage(rank, First(model) if rank == 0 else Last(model), batch, target)
    if rank == WORLD - 1:
        torch.testing.assert_close(torch.stack(losses).mean() * (1 if SCALES else MICROBATCHES), want)
    mine = ("blocks.0.",) if rank == 0 else ("blocks.1.", "blocks.2.", "head.")
    checked = 0
    for (parameter_name, parameter), plain in zip(model.named_parameters(), single.parameters(), strict=True):
        if parameter_name.startswith(mine):
            assert plain.grad.any(), parameter_name
            torch.testing.assert_close(parameter.grad, plain.grad, msg=lambda m, n=parameter_name: f"{n}: {m}")
            checked += 1
        else:
            assert parameter.grad is None, parameter_name
    assert checked > 5


@pytest.mark.parametrize("name", RECIPES)
def test_two_stages_equal_one_process(name: str, tmp_path: Path) -> None:
    if RECIPES[name].shifted and not SCALES:
        pytest.skip("pipelining of older versions of torch hangs over gloo with more than one tensor")
    run_in_two(_check_pipeline, tmp_path, name)


def _pending(recipe: Recipe, f_bias: Tensor | None = None) -> Streams:
    h, streams = HyperConnection(DIM, recipe)(Streams.expand(torch.randn(3, DIM), recipe.streams))
    return streams.write(h.sin(), f_bias)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
def test_there_and_back(name: str, bias: bool) -> None:
    recipe = RECIPES[name]
    start = Streams(torch.randn(3, recipe.streams, DIM))
    assert [tensor is start.x for tensor in pack_streams(start, recipe)] == [True]
    assert unpack_streams([start.x], recipe).x is start.x
    streams = _pending(recipe, torch.randn(DIM) if bias else None)
    tensors = pack_streams(streams, recipe)
    back = unpack_streams(tensors, recipe)
    torch.testing.assert_close(back.tensor, streams.tensor, rtol=0, atol=1e-6 if bias else 0)
    assert len(tensors) == (1 if not recipe.shifted else 4 + (recipe.residual != "identity"))
    if recipe.shifted:
        assert back.mix.pre is streams.mix.pre


def test_errors() -> None:
    shifted, plain = RECIPES["parts"], RECIPES["written"]
    _, read = HyperConnection(DIM, shifted)(torch.randn(3, shifted.streams, DIM))
    for recipe in (shifted, plain):
        with pytest.raises(ValueError, match="nothing was written"):
            pack_streams(read, recipe)
    tensors = pack_streams(_pending(shifted), shifted)
    with pytest.raises(ValueError, match=r"1 tensor for this recipe, got 5"):
        unpack_streams(tensors, plain)
    with pytest.raises(ValueError, match=r"1 or 5 tensors for this recipe, got 4"):
        unpack_streams(tensors[:4], shifted)
    assert isinstance(unpack_streams(tensors, shifted).mix, Mix)
