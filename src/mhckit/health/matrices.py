"""How the streams of a model are mixed, on average."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._collect import collecting


@torch.no_grad()
def mean_mixing_matrices(model: nn.Module, *inputs: Any) -> Tensor:
    """H [out, in] of every sublayer, averaged over the tokens of ``model(*inputs)``: [L, N, N].

    The model is run once, in evaluation mode. A sublayer that does not mix its streams has the identity.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with collecting(model) as collected:
            model(*inputs)
    finally:
        for module, training in modes:
            module.training = training
    device = next(iter(collected.mixes.values())).pre.device
    matrices = []
    for mix in collected.mixes.values():
        identity = torch.eye(mix.pre.shape[-1], dtype=mix.pre.dtype, device=device)
        matrices.append(identity if mix.res is None else mix.res.flatten(0, -3).mean(0).to(device))
    return torch.stack(matrices)
