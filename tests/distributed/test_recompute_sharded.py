"""Block recompute under FSDP2: what is rebuilt needs no parameters, which are sharded again by then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from processes import WORLD, run_in_two
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mhckit import HyperConnection, HyperHead
from mhckit.models import LanguageModel, ModelConfig
from mhckit.modules import _rebuild

CONFIG = ModelConfig(vocab_size=31, dim=16, layers=4, heads=2, hidden=24, dtype="bfloat16", residual="deepseek_v4")


@contextlib.contextmanager
def _rebuilt() -> Iterator[list[None]]:
    """An entry for every group that is rebuilt."""
    count: list[None] = []
    rebuild = _rebuild.Group._rebuild

    def counting(group: _rebuild.Group) -> None:
        count.append(None)
        rebuild(group)

    with mock.patch.object(_rebuild.Group, "_rebuild", counting):
        yield count


def _gradients(rank: int, recompute: bool | int) -> list[Tensor]:
    model = LanguageModel(CONFIG, recompute=recompute)
    own = MixedPrecisionPolicy(cast_forward_inputs=False)
    others = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False, output_dtype=torch.float32
    )
    for module in model.modules():
        if isinstance(module, (HyperConnection, HyperHead)) and list(module.parameters()):
            fully_shard(module, mp_policy=own)
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))
    fully_shard(model, mp_policy=others)
    tokens = torch.randint(0, CONFIG.vocab_size, (2 * WORLD, 9), generator=torch.Generator().manual_seed(0))
    tokens = tokens[2 * rank : 2 * rank + 2]
    with _rebuilt() as count:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert (len(count) > 0) == bool(recompute)
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [gradient.full_tensor() for gradient in gradients]


def _check(rank: int) -> None:
    kept = _gradients(rank, False)
    assert sum(gradient.abs().sum() for gradient in kept) > 0
    for recompute in (True, 3):
        for want, got in zip(kept, _gradients(rank, recompute), strict=True):
            assert torch.equal(want, got)


def test_gradients_are_the_same_bits(tmp_path: Path) -> None:
    run_in_two(_check, tmp_path)
