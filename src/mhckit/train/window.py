"""The steps since the last report: their numbers stay on the device until all are read at once."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from .config import TrainConfig
from .distributed import Place, mean_over_processes
from .memory import memory_details, peak_memory, reset_peak_memory
from .run_folder import Line
from .step import Done
from .throughput import flops_per_token, peak_flops


class _Step(NamedTuple):
    number: int
    done: Done
    memory: dict[str, float]


class Window:
    """Collects steps and turns them into lines of metrics."""

    def __init__(self, config: TrainConfig, here: Place) -> None:
        self._config, self._here = config, here
        self._tokens_per_step = config.batch_size * config.seq_len
        peak = peak_flops(here.device, config.model.dtype)
        flops = flops_per_token(config.model, config.seq_len)
        self._mfu_per_token = None if peak is None else flops / (peak * here.world)
        self.restart()

    def restart(self) -> None:
        """From here on time counts as time of steps."""
        self._steps: list[_Step] = []
        self._since = time.perf_counter()
        reset_peak_memory(self._here.device)

    def add(self, number: int, done: Done) -> None:
        memory: dict[str, float] = {"memory_bytes": peak_memory(self._here.device)}
        if self._config.memory_log:
            memory.update(memory_details(self._here.device))
        self._steps.append(_Step(number, done, memory))
        reset_peak_memory(self._here.device)

    def read(self, stop: bool) -> tuple[list[Line], bool]:
        """A line per step, and whether any process wants to stop: the one place where the device is waited for."""
        losses = torch.stack([step.done.loss for step in self._steps])
        wish = losses.new_tensor([float(stop)])
        *means, wishes = mean_over_processes(torch.cat([losses, wish]), self._here).tolist()
        norms = torch.stack([step.done.grad_norm for step in self._steps]).tolist()
        seconds = time.perf_counter() - self._since
        speed = len(self._steps) * self._tokens_per_step / seconds
        mfu = None if self._mfu_per_token is None else speed * self._mfu_per_token
        lines = []
        for step, loss, norm in zip(self._steps, means, norms, strict=True):
            line: Line = {"step": step.number, "loss": loss, "grad_norm": norm, "lr": step.done.lr}
            line |= {"tokens_per_second": speed, "mfu": mfu, **step.memory}
            if step.done.health:
                values = torch.stack(list(step.done.health.values())).tolist()
                line |= dict(zip(step.done.health, values, strict=True))
            lines.append(line)
        return lines, wishes > 0
