"""One process or many: the group, and the model spread over it by FSDP2 or copied by DDP, all of it PyTorch's own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import get_node_local_rank
from torch.nn.parallel import DistributedDataParallel

from mhckit.models import LanguageModel

# A thread of gloo gives the tensors of the last message back after the message has arrived, and needs the interpreter's
# lock for that. Nothing joins these threads, and one that asks for the lock while the interpreter ends aborts it.
SECONDS_TO_LET_GO = 0.25


class Place(NamedTuple):
    """This process among all, and its device."""

    rank: int
    world: int
    device: torch.device

    def wait_for_all(self) -> None:
        if self.world > 1:
            dist.barrier()


@contextlib.contextmanager
def place(device: str) -> Iterator[Place]:
    """Joins the other processes where torchrun started this one, and leaves them at the end.

    A group that is there already is used, and left alone.
    """
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' needs a CUDA GPU, and torch.cuda.is_available() is False")
    ours = not dist.is_initialized() and dist.is_torchelastic_launched()
    many = ours or dist.is_initialized()
    own_device = _own_device(kind, many)
    if ours:
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    try:
        yield Place(dist.get_rank() if many else 0, dist.get_world_size() if many else 1, own_device)
    finally:
        if ours:
            dist.destroy_process_group()
            time.sleep(SECONDS_TO_LET_GO)


def _own_device(kind: str, many: bool) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", get_node_local_rank(0) if many else torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device


def shard(model: LanguageModel, here: Place) -> None:
    """FSDP2: every block a unit, gathered in the dtype of the activations; hyper-connections stay float32.

    They are units of their own for that, both of a block together, and reduce their gradients in float32 like the rest.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes long to import, and few need it

    mesh = init_device_mesh(here.device.type, (here.world,))
    keep = MixedPrecisionPolicy(cast_forward_inputs=False)
    dtype = model.config.activation_dtype
    lowered = dtype.itemsize < torch.float32.itemsize
    cast = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks: Any = model.blocks
    for block in blocks:
        if lowered:
            fully_shard([block.attn_connection, block.mlp_connection], mesh=mesh, mp_policy=keep)
        fully_shard(block, mesh=mesh, mp_policy=cast if lowered else keep)
    fully_shard(model, mesh=mesh, mp_policy=keep)


def copy_to_all(model: LanguageModel, here: Place) -> DistributedDataParallel:
    devices = [here.device] if here.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


@contextlib.contextmanager
def gradients_reduced(module: nn.Module, *, now: bool) -> Iterator[None]:
    """Around forward and backward of a micro-batch; all but the last of a step only add to gradients."""
    if isinstance(module, DistributedDataParallel) and not now:
        with module.no_sync():
            yield
        return
    set_sync: Any = getattr(module, "set_requires_gradient_sync", None)  # FSDP2 adds it to the class
    if set_sync is not None:
        set_sync(now)
    yield


@contextlib.contextmanager
def forward_alone(module: nn.Module) -> Iterator[None]:
    """Around forward passes without backward.

    After a forward pass FSDP2 leaves the root's parameters whole, for a backward pass that here does not come: their
    gradients would be out of sight until the next one.
    """
    with torch.no_grad():
        yield
    reshard: Any = getattr(module, "reshard", None)
    if reshard is not None:
        reshard()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that no longer is spread over processes."""
    full_tensor = getattr(tensor, "full_tensor", None)  # of a DTensor
    return tensor if full_tensor is None else full_tensor()


def mean_over_processes(tensor: Tensor, here: Place) -> Tensor:
    """Of a tensor on each; stays on the device."""
    if here.world > 1:
        dist.all_reduce(tensor)  # a sum: gloo has no mean
        tensor /= here.world
    return tensor
