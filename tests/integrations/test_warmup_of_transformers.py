"""A warm-up finds the connections and heads of patched models, and launches what these launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny import FAMILIES, tiny, token_ids
from torch import Tensor

import mhckit
from mhckit.integrations.transformers import apply
from mhckit.kernels import _warmup
from mhckit.modules._chains import TOKENS, Kinds, find_chains, run_chain

CPU = torch.device("cpu")


def _kernels(run: Callable[[], object]) -> set[Any]:
    with mhckit.backend("triton"):
        launches = _warmup.recorded(run)
    return {
        (kernel.__name__, tuple(arg.dtype if isinstance(arg, Tensor) else arg for arg in args), str(constants))
        for kernel, _grid, args, constants in launches
    }


@pytest.mark.parametrize("across_layers", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step(family: str, across_layers: bool) -> None:
    model = apply(tiny(family), across_layers=across_layers)
    ids = token_ids()[:1, :TOKENS]
    assert ids.numel() == TOKENS
    launched = _kernels(lambda: model(input_ids=ids).logits.sum().backward())
    warmed = set[Any]().union(
        *(_kernels(partial(run_chain, chain, Kinds(torch.float32), CPU)) for chain in find_chains(model))
    )
    assert len(launched) > 10 and launched - warmed == set()
    assert len(warmed - launched) <= 2, "the embedding's expansion, which these models leave to torch"
