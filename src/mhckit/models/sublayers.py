"""What the residual connects: attention and the MLP. B batch, S positions, C channels, H heads, D width of a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import ModelConfig


class Linear(nn.Linear):
    """Without a bias. The weight is kept in float32 and cast to the dtype of what it multiplies."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight.to(input.dtype))


class Attention(nn.Module):
    """Causal, with rotary positions and grouped queries; `scaled_dot_product_attention` chooses the kernel."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.key_value_heads, config.head_dim
        self.qkv = Linear(config.dim, (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.out = Linear(config.dim, config.dim)

    def forward(self, h_BSC: Tensor, rotation_SD: Tensor) -> Tensor:
        qkv_BHSD = self.qkv(h_BSC).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv_BHSD.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        attended_BHSD = functional.scaled_dot_product_attention(
            rotate(q, rotation_SD), rotate(k, rotation_SD), v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return self.out(attended_BHSD.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.dim, 2 * config.hidden_dim)
        self.down = Linear(config.hidden_dim, config.dim)

    def forward(self, h: Tensor) -> Tensor:
        gate, up = self.gate_up(h).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


def rotation(positions: int, config: ModelConfig, device: torch.device) -> Tensor:
    """cos and sin of every position's angles, side by side: [S, D], in float32."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def rotate(x_BHSD: Tensor, rotation_SD: Tensor) -> Tensor:
    """Turn the pairs (d, d + D/2) of each position by its angles."""
    cos, sin = rotation_SD.chunk(2, -1)
    first, second = x_BHSD.to(torch.promote_types(x_BHSD.dtype, torch.float32)).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x_BHSD.dtype)
