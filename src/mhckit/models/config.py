"""The shape of a language model, as one frozen value, and shapes with a name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from mhckit.recipe import Recipe

PLAIN = "plain"
# What the kinds of residual connection are called besides the presets of recipes.
RECIPE_NAMES = {"mhc": "paper"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
HIDDEN_MULTIPLE = 256


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model's shape; validated on construction.

    Attributes:
        vocab_size: number of different tokens.
        dim: C, the width of the residual.
        layers: blocks, of two sublayers each.
        heads, kv_heads: of queries, and of keys and values (kv_heads None: as many).
        hidden: width inside the MLP; None takes 8/3 of dim, rounded up to a multiple of 256.
        residual: "plain"; "mhc" (the paper's) or the name of any preset of Recipe, such as "hc" or "deepseek_v4"; or a
            Recipe's key, as ``Recipe.key`` writes it. A Recipe becomes its key.
        streams: N, for a residual given by name; a Recipe brings its own.
        rope_theta: base of the rotary embedding.
        norm_eps: of every RMSNorm of the model.
        tied: the embedding is the output projection, too.
        dtype: of the activations. Parameters are float32 and are cast where they are used.
    """

    vocab_size: int = 256
    dim: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int | None = None
    hidden: int | None = None
    residual: str | Recipe = "mhc"
    streams: int = 4
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tied: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.residual, Recipe):
            object.__setattr__(self, "streams", self.residual.streams)
            object.__setattr__(self, "residual", _name_of(self.residual))
        for name in ("vocab_size", "dim", "layers", "heads", "streams"):
            _check_count(name, getattr(self, name))
        for name in ("kv_heads", "hidden"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"dim must be heads times an even width (rotary embedding turns pairs), got dim={self.dim}, "
                f"heads={self.heads}"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not self.norm_eps > 0 or not self.rope_theta > 0:
            raise ValueError(f"norm_eps and rope_theta must be positive, got {self.norm_eps} and {self.rope_theta}")
        if self.recipe is not None and self.recipe.streams != self.streams:
            raise ValueError(
                f"streams must be those of the residual's recipe, {self.recipe.streams}, got {self.streams}"
            )

    @property
    def recipe(self) -> Recipe | None:
        """The math of the residual connection; None for the plain one."""
        residual = str(self.residual)
        if residual == PLAIN:
            return None
        if "=" in residual:
            return Recipe.from_key(residual)
        name = RECIPE_NAMES.get(residual, residual)
        if name not in Recipe.presets():
            known = ", ".join((PLAIN, *RECIPE_NAMES, *Recipe.presets()))
            raise ValueError(f"residual must be one of {known}, or a Recipe's key, got {self.residual!r}")
        return Recipe.preset(name, streams=self.streams)

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden_dim(self) -> int:
        if self.hidden is not None:
            return self.hidden
        return -(-self.dim * 8 // 3 // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE

    @property
    def activation_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def scaled(self, factor: float) -> ModelConfig:
        """A smaller or larger model of the same proportions: width by whole heads, and depth."""
        if not factor > 0:
            raise ValueError(f"scale must be positive, got {factor}")
        heads = max(1, round(self.heads * factor))
        divisors = [each for each in range(1, heads + 1) if heads % each == 0]
        return dataclasses.replace(
            self,
            dim=heads * self.head_dim,
            heads=heads,
            kv_heads=min(divisors, key=lambda each: abs(each - self.key_value_heads * factor)),
            hidden=None if self.hidden is None else max(1, round(self.hidden * factor / 64)) * 64,
            layers=max(1, round(self.layers * factor)),
        )

    def replace(self, **fields: Any) -> ModelConfig:
        return dataclasses.replace(self, **fields)

    def parameters(self) -> int:
        """How many numbers the model learns, hyper-connections not counted."""
        attention = self.dim * self.head_dim * 2 * (self.heads + self.key_value_heads)
        block = attention + 3 * self.dim * self.hidden_dim + 2 * self.dim
        return self.layers * block + (1 if self.tied else 2) * self.vocab_size * self.dim + self.dim


def _name_of(recipe: Recipe) -> str:
    return recipe.key or "mhc"


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")


# 3b, 9b and 27b have the width and depth of the models of the mHC paper (arXiv 2512.24880), dense instead of MoE.
MODEL_PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(dim=96, layers=3, heads=4, hidden=256),
    "deep": ModelConfig(dim=512, layers=24, heads=8, hidden=1536),
    "120m": ModelConfig(vocab_size=32768, dim=768, layers=12, heads=12, hidden=2048, tied=True),
    "1b": ModelConfig(vocab_size=32768, dim=2048, layers=16, heads=16, kv_heads=8, hidden=8192),
    "3b": ModelConfig(vocab_size=32768, dim=1280, layers=12, heads=10, kv_heads=5),
    "9b": ModelConfig(vocab_size=32768, dim=1920, layers=18, heads=15, kv_heads=5),
    "27b": ModelConfig(vocab_size=32768, dim=2560, layers=30, heads=20, kv_heads=5),
}
