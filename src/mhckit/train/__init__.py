"""Training a language model: config, data, the loop, checkpoints."""

from .config import TrainConfig
from .loop import Trainer
from .presets import PRESETS, load_config

__all__ = ["PRESETS", "TrainConfig", "Trainer", "load_config"]
