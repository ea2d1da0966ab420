"""One step of training, and validation: tensors in, tensors out, and no wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from mhckit.health import Health

from .build import Built, attention_backend
from .config import TrainConfig
from .data import Corpus, batch
from .distributed import Place, forward_alone, gradients_reduced, mean_over_processes, whole
from .schedule import learning_rate_factor


class Done(NamedTuple):
    """What a step leaves behind, on the device: the loss is of this process, the norm of all."""

    loss: Tensor
    grad_norm: Tensor
    lr: float
    health: dict[str, Tensor]


class Stepper:
    """Everything that a step needs, and nothing that it leaves: a step depends on its number and the weights alone."""

    def __init__(
        self, config: TrainConfig, here: Place, corpus: Corpus, built: Built, optimiser: torch.optim.Optimizer
    ) -> None:
        parts = here.world * config.grad_accum
        if config.batch_size % parts:
            raise ValueError(
                f"batch_size must be a multiple of {here.world} processes times grad_accum {config.grad_accum}, "
                f"got {config.batch_size}"
            )
        corpus.require(config.seq_len)
        self.config, self.here, self.corpus, self.optimiser = config, here, corpus, optimiser
        self.model, self.module = built
        self.micro_batch = config.batch_size // parts
        sampled = config.health_every and config.model.recipe is not None
        self.health = Health(self.model) if sampled else None

    def step(self, number: int) -> Done:
        """The step of a number, counted from 1: gradients of its whole batch, clipped, and AdamW."""
        config = self.config
        losses = []
        inputs = targets = None
        for index, (inputs, targets) in enumerate(self._micro_batches(self.corpus.train, number - 1)):
            with gradients_reduced(self.module, now=index == config.grad_accum - 1):
                with attention_backend(config, self.here):
                    loss = self.module(inputs, targets) / config.grad_accum
                loss.backward()
            losses.append(loss.detach())
        health = self._sample_health(inputs, targets) if self._due(number) else {}
        norm = self._clip()
        lr = config.lr * learning_rate_factor(number, config)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.optimiser.zero_grad()
        return Done(torch.stack(losses).sum(), norm, lr, health)

    def validate(self) -> Tensor:
        """The mean loss of the first batches of what is held out, always the same ones."""
        losses = []
        with forward_alone(self.model), attention_backend(self.config, self.here):
            for index in range(self.config.eval_batches):
                for inputs, targets in self._micro_batches(self.corpus.validation, index):
                    losses.append(self.model(inputs, targets))
        return mean_over_processes(torch.stack(losses).mean(), self.here)

    def _micro_batches(self, tokens: Tensor, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's part of a batch. To `batch` each micro-batch is a process: the whole stays the same."""
        config, accum = self.config, self.config.grad_accum
        for micro in range(accum):
            yield self._to_device(
                batch(
                    tokens,
                    seq_len=config.seq_len,
                    batch_size=self.micro_batch,
                    seed=config.seed,
                    step=step,
                    rank=self.here.rank * accum + micro,
                    world=self.here.world * accum,
                )
            )

    def _to_device(self, tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self.here.device.type != "cuda":
            return tensors
        inputs, targets = (tensor.pin_memory().to(self.here.device, non_blocking=True) for tensor in tensors)
        return inputs, targets

    def _clip(self) -> Tensor:
        """The norm of all gradients before they are clipped."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if self.config.grad_clip:
            return whole(clip_grad_norm_(parameters, self.config.grad_clip))
        return whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))

    def _due(self, number: int) -> bool:
        return self.health is not None and number % self.config.health_every == 0

    def _sample_health(self, inputs: Tensor | None, targets: Tensor | None) -> dict[str, Tensor]:
        """By a forward pass of its own: looking changes neither the step's bits nor its memory, compiled or not."""
        assert self.health is not None
        with forward_alone(self.model), self.health.sample(), attention_backend(self.config, self.here):
            self.model(inputs, targets)
        return self.health.metrics()
