"""FSDP2 on two processes: the gradients' norms and the scales are those of the whole parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from processes import WORLD, run_in_two
from stream_network import Network, batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

from mhckit.health import Health, mean_mixing_matrices
from mhckit.health._gradients import norms_and_nonfinite

OF_PARAMETERS = ("grad_norm", "scale_pre", "scale_post", "scale_res", "nonfinite_gradients")


def _compare(rank: int) -> None:
    torch.manual_seed(0)
    single, sharded = Network("deepseek_v4"), Network("deepseek_v4")
    sharded.load_state_dict(single.state_dict())
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in sharded.blocks[:-1]:
        fully_shard(block.connection, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)  # with the last block's connection, and the head

    rows = batch(WORLD, 5)
    whole, part, of_rank = Health(single), Health(sharded), Health(single)
    with whole.sample():
        single(rows).square().mean().backward()
    with part.sample():
        loss = sharded(rows[rank]).square().mean()
    loss.backward()
    with of_rank.sample():
        single(rows[rank])

    got, expected, expected_here = part.metrics(), whole.metrics(), of_rank.metrics()
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert not isinstance(value, DTensor), name
        wanted = expected[name] if name.endswith(OF_PARAMETERS) else expected_here[name]
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-6, msg=name)
    torch.testing.assert_close(mean_mixing_matrices(sharded, rows), mean_mixing_matrices(single, rows))

    waiting = DTensor.from_local(torch.full((3,), 1.0 + rank), mesh, [Partial()], run_check=False)
    norms, _ = norms_and_nonfinite([waiting, torch.full((3,), 3.0)])
    torch.testing.assert_close(norms, torch.full((2,), 27**0.5))


def test_fsdp2(tmp_path: Path) -> None:
    run_in_two(_compare, tmp_path)
