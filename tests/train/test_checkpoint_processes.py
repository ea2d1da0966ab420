"""Checkpoints of two processes (gloo), sharded by FSDP2 or copied by DDP: other numbers of processes load them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpointed import CONFIG, MODEL, assert_same, contents, make, make_optimizer, snapshot, train
from processes import WORLD, run_in_two
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mhckit.models import LanguageModel
from mhckit.train.checkpoint import export_safetensors, latest, load, save


def _rows(rank: int) -> slice:
    return slice(2 * rank, 2 * rank + 2)


def _make_sharded(seed: int = 0) -> tuple[nn.Module, Optimizer]:
    model = LanguageModel(MODEL, seed=seed)
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, make_optimizer(model)


def _check_resumed(rank: int, directory: Path) -> None:
    folder = directory / "sharded"
    torch.manual_seed(rank)  # two states of the generator, to be kept apart
    model, optimizer = _make_sharded()
    train(model, optimizer, 2, _rows(rank))
    path = save(folder, 2, model, optimizer, config=CONFIG)
    at_save = contents(model, optimizer)
    torch.save(at_save, directory / f"sharded{rank}.pt")
    export_safetensors(model, directory / "model.safetensors")
    export_safetensors(path, directory / "checkpoint.safetensors")
    train(model, optimizer, 2, _rows(rank))
    want = contents(model, optimizer)

    model, optimizer = _make_sharded(seed=1)
    assert load(path, model, optimizer, config=CONFIG) == 2
    assert_same(contents(model, optimizer), at_save)
    train(model, optimizer, 2, _rows(rank))
    assert_same(contents(model, optimizer), want)
    save(folder, 4, model, optimizer, config=CONFIG)
    save(folder, 5, model, optimizer, config=CONFIG, keep=3)


def _check_loaded_from_one(rank: int, directory: Path) -> None:
    torch.manual_seed(9)
    model, optimizer = _make_sharded(seed=1)
    own = torch.get_rng_state()
    load(directory / "of_one" / "step-00000003", model, optimizer, config=CONFIG)
    want = torch.load(directory / "of_one.pt")
    got = contents(model, optimizer)
    assert torch.equal(got.pop("rng"), want.pop("rng") if rank == 0 else own), "rank 1 finds none and keeps its own"
    assert_same(got, {name: tensor for name, tensor in want.items() if name != "rng"})


def _check_copied(rank: int, directory: Path) -> None:
    model, optimizer = make()
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(0)
    train(wrapped, optimizer, 2, _rows(rank))
    path = save(directory / "copied", 2, wrapped, optimizer, config=CONFIG)
    want = contents(model, optimizer)
    if rank == 0:
        torch.save(want, directory / "copied.pt")
    other, other_optimizer = make(seed=1)
    load(path, DistributedDataParallel(other), other_optimizer, config=CONFIG)
    assert_same(contents(other, other_optimizer), want)
    export_safetensors(wrapped, directory / "copied.safetensors")


def _raises(message: str, function: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        function()


def _check_refused(rank: int, directory: Path) -> None:
    """What one process alone could notice is an error of both: neither waits for the other for ever."""
    folder = directory / "refused"
    model, optimizer = _make_sharded()
    train(model, optimizer, 1, _rows(rank))
    path = save(folder, 1, model, optimizer, config=CONFIG)
    _raises("step 1 cannot be saved", lambda: save(folder, 1, model, optimizer, config=CONFIG))
    _raises("corpus is", lambda: load(path, model, optimizer, config=CONFIG | {"corpus": "x"}))
    _raises("no checkpoint", lambda: load(folder / "nowhere", model, optimizer, config=CONFIG))
    _raises("no checkpoint", lambda: export_safetensors(folder / "nowhere", directory / "file"))
    dist.barrier()
    if rank == 0:
        damaged = path / "__1_0.distcp"
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    dist.barrier()
    before = contents(model, optimizer)
    _raises("contents of __1_0.distcp are not", lambda: load(path, model, optimizer, config=CONFIG))
    assert_same(contents(model, optimizer), before)
    # A folder that the processes do not share, as on two machines: what the other wrote is not there.
    unshared = directory / f"machine{rank}"
    _raises("__1_0.distcp was written by another process", lambda: save(unshared, 1, model, optimizer, config=CONFIG))
    assert latest(unshared) is None


def _check_all(rank: int, directory: Path) -> None:
    """One after the other: to start two processes takes longer than all of it."""
    for check in (_check_resumed, _check_loaded_from_one, _check_copied, _check_refused):
        check(rank, directory)
        (directory / f"{check.__name__}{rank}").touch()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left, which made all their own checks before."""
    made = tmp_path_factory.mktemp("two")
    model, optimizer = make()
    train(model, optimizer, 3)
    save(made / "of_one", 3, model, optimizer, config=CONFIG)
    torch.save(contents(model, optimizer), made / "of_one.pt")
    run_in_two(_check_all, made, made)
    return made


def test_two_processes_resume_to_the_bit(directory: Path) -> None:
    assert (directory / "_check_resumed0").exists() and (directory / "_check_resumed1").exists()
    steps = sorted(path.name for path in (directory / "sharded").iterdir())
    assert steps == ["step-00000002", "step-00000004", "step-00000005"]
    files = snapshot(directory / "sharded" / "step-00000002").keys()
    assert {name for name in files if name.endswith(".distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    states = [torch.load(directory / f"sharded{rank}.pt")["rng"] for rank in range(WORLD)]
    assert not torch.equal(*states)


def test_one_process_loads_what_two_wrote(directory: Path) -> None:
    model, optimizer = make(seed=1)
    assert load(directory / "sharded" / "step-00000002", model, optimizer, config=CONFIG) == 2
    assert_same(contents(model, optimizer), torch.load(directory / "sharded0.pt"))


def test_ddp_saves_what_a_plain_model_loads(directory: Path) -> None:
    model, optimizer = make(seed=1)
    load(directory / "copied" / "step-00000002", model, optimizer, config=CONFIG)
    assert_same(contents(model, optimizer), torch.load(directory / "copied.pt"))
    assert_same(load_file(directory / "copied.safetensors"), dict(model.state_dict()))


@pytest.mark.parametrize("source", ["model", "checkpoint"])
def test_exports_are_whole(directory: Path, source: str) -> None:
    exported = load_file(directory / f"{source}.safetensors")
    want = torch.load(directory / "sharded0.pt")
    assert_same(exported, {name: want[name] for name in make()[0].state_dict()})
