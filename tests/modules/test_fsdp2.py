"""FSDP2 on two processes (gloo, CPU): Streams cross its hooks, mHC parameters stay float32, gradients agree."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.spawn import spawn

from mhckit import HyperConnection, HyperHead, Recipe, Streams

RECIPE = Recipe.preset("deepseek_v4")
DIM, WORLD = 8, 2


class Block(nn.Module):
    """One sublayer; what reaches it is pending Streams."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.connection = HyperConnection(DIM, RECIPE, layer_index=index)
        self.sublayer = nn.Linear(DIM, DIM)

    def forward(self, streams: Streams) -> Streams:
        self.seen = {
            "mix": None if streams.mix is None else streams.mix.pre.dtype,
            "phi": self.connection.phi.dtype,
            "weight": self.sublayer.weight.dtype,
        }
        h, streams = self.connection(streams)
        return streams.write(self.sublayer(h.to(self.sublayer.weight.dtype)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index) for index in range(3))
        self.head = HyperHead(DIM, RECIPE)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        streams = Streams.expand(h, RECIPE.streams)
        for block in self.blocks:
            streams = block(streams)
        return self.head(streams)


def _train(rank: int, directory: str, lowered: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/init", rank=rank, world_size=WORLD)
    try:
        torch.manual_seed(0)
        model, single = Model(), Model()
        single.load_state_dict(model.state_dict())
        keep = MixedPrecisionPolicy(cast_forward_inputs=False)
        cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False) if lowered else keep
        mesh = init_device_mesh("cpu", (WORLD,))
        for block in model.blocks:
            fully_shard(block.connection, mesh=mesh, mp_policy=keep)
            fully_shard(block, mesh=mesh, mp_policy=cast)
        fully_shard(model.head, mesh=mesh, mp_policy=keep)
        fully_shard(model, mesh=mesh, mp_policy=keep)
        batch = torch.randn(WORLD, 5, DIM)
        loss = model(batch[rank]).square().mean()
        loss.backward()
        single(batch).square().mean().backward()
        seen = [block.seen for block in model.blocks]
        weight_dtype = torch.bfloat16 if lowered else torch.float32
        assert [s["weight"] for s in seen] == [weight_dtype] * 3, seen
        assert [s["phi"] for s in seen] == [torch.float32] * 3, seen
        assert [s["mix"] for s in seen] == [None, torch.float32, torch.float32], seen
        tolerance = 5e-2 if lowered else 1e-5
        for (name, sharded), plain in zip(model.named_parameters(), single.parameters(), strict=True):
            gradient = sharded.grad.full_tensor()
            difference = (gradient - plain.grad).norm() / plain.grad.norm().clamp(min=1e-6)
            assert difference < tolerance, (name, difference)
        torch.optim.AdamW(model.parameters()).step()
        _initialise_after_sharding(mesh, keep)
        if rank == 0:
            Path(directory, "done").touch()
    finally:
        dist.destroy_process_group()


def _initialise_after_sharding(mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """The flow for models too large for one device: made on meta, sharded, then given memory and values."""
    for make in (lambda: HyperConnection(DIM, RECIPE, layer_index=1), lambda: HyperHead(DIM, RECIPE)):
        with torch.device("meta"):
            module = make()
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.to_empty(device="cpu")
        module.reset_parameters()
        name = "bias" if isinstance(module, HyperConnection) else "base"
        assert torch.equal(getattr(module, name).full_tensor(), getattr(make(), name))


def _spawn(directory: Path, lowered: bool) -> None:
    spawn(_train, args=(str(directory), lowered), nprocs=WORLD)
    assert (directory / "done").exists()


def test_gradients_equal_a_single_process(tmp_path: Path) -> None:
    _spawn(tmp_path, lowered=False)


def test_mixed_precision_leaves_the_connection_in_float32(tmp_path: Path) -> None:
    _spawn(tmp_path, lowered=True)
