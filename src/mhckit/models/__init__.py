"""A decoder-only language model whose residual connection is the only thing that differs between two of its kind."""

from .config import MODEL_PRESETS, ModelConfig
from .language_model import LanguageModel

__all__ = ["MODEL_PRESETS", "LanguageModel", "ModelConfig"]
