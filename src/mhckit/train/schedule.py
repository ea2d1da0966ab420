"""The learning rate as a function of the step alone: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from .config import TrainConfig

WSD_DECAY = 0.2


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """What the peak learning rate is multiplied by at a step, counted from 1."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    begin = config.warmup_steps
    if config.schedule == "wsd":
        decay = math.ceil(config.max_steps * WSD_DECAY) if config.decay_steps is None else config.decay_steps
        begin = max(begin, config.max_steps - decay)
    if step <= begin:
        return 1.0
    progress = min(1.0, (step - begin) / (config.max_steps - begin))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.final_lr + (1 - config.final_lr) * left
