"""What a training run is, as one frozen value; every way to make one is validated alike.

A field here is an option of ``mhckit train`` and a key of its YAML files: there is no second list.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from mhckit.models import MODEL_PRESETS, ModelConfig

from .fields import convert, option

RUN, DATA, OPTIMISER, SPEED, REPORTS = "Run", "Data", "Optimiser", "Speed and memory", "Reports and checkpoints"

# Two runs that differ in one of these are two runs; the rest may change when a run goes on.
IDENTITY = (
    "model",
    "data",
    "tokenizer",
    "seq_len",
    "batch_size",
    "seed",
    "lr",
    "schedule",
    "warmup_steps",
    "decay_steps",
    "final_lr",
    "weight_decay",
    "betas",
    "eps",
    "grad_clip",
)
_POSITIVE = ("seq_len", "batch_size", "grad_accum", "max_steps", "max_minutes", "lr", "eps", "log_every", "keep")
_NOT_NEGATIVE = (
    "warmup_steps",
    "decay_steps",
    "final_lr",
    "weight_decay",
    "grad_clip",
    "eval_every",
    "health_every",
    "checkpoint_every",
    "eval_batches",
    "seed",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run; the defaults are those of the preset tiny.

    ``batch_size`` counts the sequences of an optimiser step over all processes and micro-batches: the same config
    trains the same model on any number of processes, and with any ``grad_accum``.
    """

    model: ModelConfig = field(default=MODEL_PRESETS["tiny"], metadata={"panel": "Model"})

    run_name: str = option("tiny", RUN, "Folder of the run; by default made of preset and residual.")
    out: str = option("runs", RUN, "Folder of all runs.")
    resume: Literal["auto", "never", "always"] = option(
        "auto", RUN, "auto goes on with a run that is there already; never and always insist on one."
    )
    max_steps: int = option(200, RUN, "Optimiser steps in all.")
    max_minutes: float | None = option(None, RUN, "Stop after this time, with a checkpoint to go on from.")
    seed: int = option(0, RUN, "Of the initial weights and the order of the data.")
    device: Literal["auto", "cpu", "cuda"] = option("auto", RUN, "auto is a GPU where there is one.")

    data: str | None = option(None, DATA, "Text file or folder of text; by default Python's standard library.")
    tokenizer: str | None = option(None, DATA, "A tokenizer.json of `tokenizers`; by default tokens are bytes.")
    seq_len: int = option(128, DATA, "Tokens per sequence.")
    batch_size: int = option(8, DATA, "Sequences per optimiser step, over all processes and micro-batches.")
    grad_accum: int = option(1, DATA, "Micro-batches that each process makes of its part of a batch.")

    lr: float = option(4e-3, OPTIMISER, "Peak learning rate of AdamW.")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = option(
        "cosine", OPTIMISER, "After warm-up; wsd is constant, then linear for the last decay-steps."
    )
    warmup_steps: int = option(20, OPTIMISER, "Steps of linear warm-up.")
    decay_steps: int | None = option(None, OPTIMISER, "Steps of decay at the end of wsd; by default a fifth of all.")
    final_lr: float = option(0.1, OPTIMISER, "What is left of the learning rate after decay, as a fraction.")
    weight_decay: float = option(0.1, OPTIMISER, "Of matrices; norms, biases and gates have none.")
    betas: tuple[float, float] = option((0.9, 0.95), OPTIMISER, "Of AdamW.")
    eps: float = option(1e-8, OPTIMISER, "Of AdamW.")
    grad_clip: float = option(1.0, OPTIMISER, "Largest norm of all gradients together; 0 clips nothing.")

    loss: Literal["full", "chunked", "fused"] = option("full", SPEED, "How cross-entropy is computed.")
    sdpa: Literal["auto", "flash", "efficient", "math", "cudnn"] = option("auto", SPEED, "Backend of attention.")
    recompute: Literal["off", "auto"] | int = option(
        "off", SPEED, "Rebuild streams in backward: off, auto, or the number of sublayers in a group."
    )
    compile: Literal["none", "blocks"] = option("none", SPEED, "torch.compile of each block, or of its sublayers.")
    parallel: Literal["fsdp", "ddp"] = option(
        "fsdp", SPEED, "Processes of torchrun hold the model in parts (FSDP2), or a copy each (DDP)."
    )
    memory_log: bool = option(False, SPEED, "Allocated and reserved bytes in every line of the metrics.")
    memory_snapshot: bool = option(False, SPEED, "memory.pickle of the first steps, for pytorch.org/memory_viz.")

    log_every: int = option(10, REPORTS, "Steps between reports; losses stay on the device in between.")
    eval_every: int = option(100, REPORTS, "Steps between validations; 0 for none.")
    eval_batches: int = option(8, REPORTS, "Batches in a validation.")
    health_every: int = option(50, REPORTS, "Steps between samples of the health of mHC; 0 for none.")
    checkpoint_every: int = option(100, REPORTS, "Steps between checkpoints; 0 for one at the end alone.")
    keep: int = option(2, REPORTS, "Checkpoints that are kept.")

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, convert(each.name, getattr(self, each.name), hints[each.name]))
        if not isinstance(self.model, ModelConfig):
            raise TypeError(f"model must be a ModelConfig, got {type(self.model).__name__}")
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive, got {value}")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must not be negative, got {value}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")
        if isinstance(self.recompute, int) and self.recompute < 1:
            raise ValueError(f"recompute must be off, auto or a positive int, got {self.recompute}")
        if not self.run_name or "/" in self.run_name or self.run_name.startswith("."):
            raise ValueError(f"run_name must be the name of a folder inside {self.out}, got {self.run_name!r}")

    def _check_combinations(self) -> None:
        if self.batch_size % self.grad_accum:
            raise ValueError(
                f"batch_size must be a multiple of grad_accum, got {self.batch_size} and {self.grad_accum}"
            )
        if self.schedule != "constant" and self.warmup_steps > self.max_steps:
            raise ValueError(f"warmup_steps must fit in max_steps, got {self.warmup_steps} and {self.max_steps}")
        if self.recompute != "off" and self.model.recipe is None:
            raise ValueError("recompute rebuilds streams, and residual='plain' has none: leave it off")
        if self.model.dtype == "float16":
            raise ValueError("dtype='float16' needs loss scaling, which the trainer does not do: take bfloat16")
        if self.eval_every and not self.eval_batches:
            raise ValueError("eval_batches must be positive where eval_every is, got 0")

    def replace(self, **fields: Any) -> TrainConfig:
        return dataclasses.replace(self, **fields)

    def to_dict(self) -> dict[str, Any]:
        """As YAML and JSON can hold it."""
        return {**dataclasses.asdict(self), "betas": list(self.betas)}
