"""A decoder-only language model: RMSNorm, rotary positions, grouped queries, SwiGLU, and any residual connection.

Two models that differ in ``config.residual`` alone have the same weights under the same names, hyper-connections apart,
and start from the same values.
"""

from __future__ import annotations

import contextlib
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from mhckit.modules import HyperConnection, HyperHead, recompute
from mhckit.modules._base import set_values

from .config import ModelConfig
from .loss import Loss, check_loss, next_token_loss
from .residual import PlainConnection, make_connection, make_head, rms_norm, start
from .sublayers import MLP, Attention, Linear, rotation

INIT_STD = 0.02


class Block(nn.Module):
    """Attention and MLP, each between a read of the streams and a write."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attn_connection = make_connection(config, 2 * index)
        self.attn = Attention(config)
        self.mlp_connection = make_connection(config, 2 * index + 1)
        self.mlp = MLP(config)

    def forward(self, streams: Any, rotation_SD: Tensor) -> Any:
        h, streams = self.attn_connection(streams)
        streams = streams.write(self.attn(h, rotation_SD))
        h, streams = self.mlp_connection(streams)
        return streams.write(self.mlp(h))


class LanguageModel(nn.Module):
    """Tokens [B, S] to hidden states [B, S, C], which `logits` turns into predictions; with targets, to the mean loss.

    Args:
        config: the shape.
        seed: of the initial weights.
        recompute: keep, of the streams, only those at the start of each group of sublayers (`mhckit.recompute`);
            an int is the size of a group.
        loss: how it is computed, see `loss.py`.
        device: where the parameters are made; "meta" makes none, and `reset_parameters` comes later.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        recompute: bool | int = False,
        loss: Loss = "full",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(recompute, int) or recompute < 0:
            raise ValueError(f"recompute must be a bool or a positive int, got {recompute!r}")
        self.streams = None if config.recipe is None else config.recipe.streams
        if recompute and self.streams is None:
            raise ValueError("recompute rebuilds streams, and residual='plain' has none: leave it out")
        check_loss(loss)
        self.config, self.recompute = config, recompute
        self.loss: Loss = loss
        with torch.device(device) if device is not None else contextlib.nullcontext():
            self.embedding = nn.Embedding(config.vocab_size, config.dim)
            self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
            self.head = make_head(config)
            self.norm_weight = nn.Parameter(torch.ones(config.dim))
            self.output = None if config.tied else Linear(config.dim, config.vocab_size)
        if device is None or torch.device(device).type != "meta":
            self.reset_parameters(seed)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        h = self.embedding(tokens).to(self.config.activation_dtype)
        angles = rotation(tokens.shape[1], self.config, tokens.device)
        streams: Any = start(h, self.streams)
        with self._rebuilding():
            for block in self.blocks:
                streams = block(streams, angles)
            h = self.head(streams)
        h = rms_norm(h, self.norm_weight, self.config.norm_eps)
        return h if targets is None else next_token_loss(h, self.output_weight, targets, self.loss)

    @property
    def output_weight(self) -> Tensor:
        """[V, C]."""
        return self.embedding.weight if self.output is None else self.output.weight

    def logits(self, h: Tensor) -> Tensor:
        return nn.functional.linear(h, self.output_weight.to(h.dtype))

    def _rebuilding(self) -> contextlib.AbstractContextManager[Any]:
        if not self.recompute:
            return contextlib.nullcontext()
        return recompute(self.blocks, every=None if self.recompute is True else self.recompute)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Initial values, each parameter's from its name: the same for every kind of residual and any sharding."""
        output_std = INIT_STD / (2 * self.config.layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, (Linear, nn.Embedding)):
                writes = name.endswith((".out", ".down"))
                _normal(module.weight, output_std if writes else INIT_STD, f"{seed}.{name}")
            elif isinstance(module, PlainConnection):
                nn.init.ones_(module.out_norm_weight)
            elif isinstance(module, (HyperConnection, HyperHead)):
                module.reset_parameters()
                for kind in ("phi", "fn"):
                    if getattr(module, kind, None) is not None:
                        _normal(getattr(module, kind), INIT_STD, f"{seed}.{name}.{kind}")
        nn.init.ones_(self.norm_weight)


def _normal(parameter: Any, std: float, key: str) -> None:
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(key.encode()))
    values = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    set_values(parameter, values.normal_(std=std, generator=generator))
