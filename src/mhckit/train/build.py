"""The model as a config wants it: made, compiled, spread over processes; and its optimiser."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mhckit.models import LanguageModel
from mhckit.modules import param_groups

from .config import TrainConfig
from .distributed import Place, copy_to_all, shard

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_SDPA_ON_CPU = ("auto", "flash", "math")


class Built(NamedTuple):
    """The model, and what is called in training: the model itself, or DDP around it."""

    model: LanguageModel
    module: nn.Module


def build(config: TrainConfig, here: Place) -> Built:
    """The same initial weights on any number of processes."""
    sharded = here.world > 1 and config.parallel == "fsdp"
    model = LanguageModel(
        config.model,
        seed=config.seed,
        recompute=config.recompute if isinstance(config.recompute, int) else config.recompute == "auto",
        loss=config.loss,
        device="meta" if sharded else here.device,
    )
    if config.compile == "blocks":
        compile_parts(model, whole_blocks=config.recompute == "off" and not sharded)
    if sharded:
        shard(model, here)
        model.to_empty(device=here.device)
        model.reset_parameters(config.seed)
    elif here.world > 1:
        return Built(model, copy_to_all(model, here))
    return Built(model, model)


def compile_parts(model: LanguageModel, *, whole_blocks: bool) -> None:
    """Compile in place, which changes no name in a state dict.

    Recompute sees the reads between sublayers, and FSDP2 hangs its hooks on connections: both need these outside of
    what is compiled.
    """
    blocks: Any = model.blocks
    for block in blocks:
        for part in (block,) if whole_blocks else (block.attn, block.mlp):
            part.compile()


def make_optimiser(config: TrainConfig, model: LanguageModel, here: Place) -> torch.optim.AdamW:
    groups = param_groups(model, weight_decay=config.weight_decay)
    fused = here.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def attention_backend(config: TrainConfig, here: Place) -> contextlib.AbstractContextManager[Any]:
    """Around every forward pass; backward follows what forward chose."""
    if here.device.type == "cpu" and config.sdpa not in _SDPA_ON_CPU:
        raise ValueError(f"sdpa must be one of {', '.join(_SDPA_ON_CPU)} on a CPU, got {config.sdpa!r}")
    if config.sdpa == "auto":
        return contextlib.nullcontext()
    return sdpa_kernel(SDPA_BACKENDS[config.sdpa])
