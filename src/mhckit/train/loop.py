"""The training loop: steps, and between them reports, validation and checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mhckit.models import LanguageModel
from mhckit.modules import warmup

from .build import build, make_optimiser
from .config import TrainConfig
from .data import Corpus, load_corpus
from .distributed import Place, place
from .ending import leave_report
from .memory import MemorySnapshot
from .metrics import MetricsWriter
from .progress import Reporter, Silence, make_reporter
from .run_folder import Line, RunFolder
from .step import Stepper
from .stop import StopWish
from .window import Window

TOKENS = ".tokens"  # no run can have this name
VOCABULARY_MULTIPLE = 64


class Trainer:
    """Trains a language model as a config says; `mhckit train` in Python.

        lines = Trainer(TrainConfig(max_steps=100)).run()

    Started by torchrun, every process does the same call, and they train one model together. A run whose folder has a
    checkpoint goes on from there, with the bits of a run that was never interrupted.

    Args:
        config: of the run; `load_config` makes one from presets and files.
        on_log: called in the first process with every line of metrics, a dict of numbers.
        show: print progress, in the first process.
    """

    def __init__(self, config: TrainConfig, *, on_log: Callable[[Line], None] | None = None, show: bool = True) -> None:
        self.config, self.on_log, self.show = config, on_log, show
        self.folder = RunFolder(config)
        self.model: LanguageModel | None = None

    def run(self) -> list[Line]:
        """All lines of the run's metrics, also those from before it was interrupted."""
        with place(self.config.device) as here, StopWish(self.config.max_minutes) as wish:
            return self._run(here, wish)

    def _run(self, here: Place, wish: StopWish) -> list[Line]:
        corpus = self._load_corpus(here)
        config = self.config = with_vocabulary(self.config, corpus)
        self.folder.check(config)
        here.wait_for_all()  # before the first one writes where the others look
        built = build(config, here)
        self.model = built.model
        optimiser = make_optimiser(config, built.model, here)
        stepper = Stepper(config, here, corpus, built, optimiser)
        saver = _Saver(self.folder, config, corpus, built.model, optimiser)
        done = saver.load()
        first = here.rank == 0
        lines = self.folder.begin(config, done) if first else []
        with contextlib.ExitStack() as open_ones:
            reporter = make_reporter(config.run_name, config.max_steps, done) if first and self.show else Silence()
            open_ones.callback(reporter.close)
            writer = MetricsWriter(self.folder, done, self.on_log) if first else None
            if writer is not None:
                open_ones.callback(writer.close)
            reporter.say(_greeting(self.folder.path, config, here, done))
            if done < config.max_steps:
                warm_up(config, here, built.model, reporter)
            snapshot = MemorySnapshot(self._snapshot_file(here), here.device)
            open_ones.callback(snapshot.close)
            loop = _Loop(config, here, stepper, saver, writer, reporter, wish, snapshot)
            try:
                lines += loop.run(done)
            except FloatingPointError as error:
                leave_report(self.folder, stepper, reporter.say, str(error))
                raise
            leave_report(self.folder, stepper, reporter.say)
            here.wait_for_all()
        return lines

    def _snapshot_file(self, here: Place) -> Path | None:
        return self.folder.memory_snapshot if self.config.memory_snapshot and here.rank == 0 else None

    def _load_corpus(self, here: Place) -> Corpus:
        """The first process makes the tokens, and the others find them."""
        config, cache = self.config, Path(self.config.out) / TOKENS
        if here.rank:
            here.wait_for_all()
        corpus = load_corpus(
            config.data, tokenizer=config.tokenizer, cache=cache, show_progress=self.show and not here.rank
        )
        if not here.rank:
            here.wait_for_all()
        return corpus


def with_vocabulary(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """The model has a row for every token that the corpus may have."""
    if config.model.vocab_size >= corpus.vocab_size:
        return config
    size = math.ceil(corpus.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return config.replace(model=config.model.replace(vocab_size=size))


def warm_up(config: TrainConfig, here: Place, model: LanguageModel, reporter: Reporter) -> None:
    """Compile the kernels of a step at once, rather than each when it is first launched."""
    if here.device.type == "cuda" and config.model.recipe is not None:
        done = warmup(model, dtype=config.model.activation_dtype, recompute=bool(model.recompute), device=here.device)
        reporter.say(str(done))


def _greeting(path: Path, config: TrainConfig, here: Place, done: int) -> str:
    if done >= config.max_steps:
        return f"{path} has all {config.max_steps} steps: more with max-steps, or another run with another run-name"
    what = f"{config.model.parameters() / 1e6:.1f}M parameters, {config.model.residual}, {config.model.dtype}"
    where = f"{here.world} x {here.device.type}" if here.world > 1 else str(here.device)
    return f"{path}: {what}, {where}, {'from step ' + str(done) if done else 'from the start'}"


class _Saver:
    """Checkpoints of one run. What writes them takes a second to import, for which ``--help`` should not wait."""

    def __init__(
        self,
        folder: RunFolder,
        config: TrainConfig,
        corpus: Corpus,
        model: LanguageModel,
        optimiser: torch.optim.Optimizer,
    ) -> None:
        self._folder, self._keep = folder.checkpoints, config.keep
        self._state: Any = (model, optimiser)
        self._config = {"model": config.to_dict()["model"], "corpus": corpus.digest}

    def load(self) -> int:
        """The step of the latest checkpoint, after loading it; 0 without one."""
        from . import checkpoint

        path = checkpoint.latest(self._folder)
        return 0 if path is None else checkpoint.load(path, *self._state, config=self._config)

    def save(self, step: int) -> Path:
        from . import checkpoint

        return checkpoint.save(self._folder, step, *self._state, config=self._config, keep=self._keep)


class _Loop:
    """Steps from where a run stands to its end."""

    def __init__(
        self,
        config: TrainConfig,
        here: Place,
        stepper: Stepper,
        saver: _Saver,
        writer: MetricsWriter | None,
        reporter: Reporter,
        wish: StopWish,
        snapshot: MemorySnapshot,
    ) -> None:
        self._config, self._here, self._stepper, self._saver = config, here, stepper, saver
        self._writer, self._reporter, self._wish, self._snapshot = writer, reporter, wish, snapshot

    def run(self, done: int) -> list[Line]:
        config, lines = self._config, []
        window = Window(config, self._here)
        for number in range(done + 1, config.max_steps + 1):
            window.add(number, self._stepper.step(number))
            self._snapshot.after_step()
            # The first one alone, so that its compilation slows no other line down. A wish to stop is granted at once
            # where there is no other process to ask.
            if number == done + 1 or self._report_due(number) or (self._here.world == 1 and self._wish):
                new, stop = window.read(bool(self._wish))
                lines += new
                self._report(number, new)
                if self._due(number, config.checkpoint_every) or stop or number == config.max_steps:
                    self._saver.save(number)
                if stop and number < config.max_steps:
                    self._reporter.say(f"stopped after step {number}; the same command goes on from there")
                    break
                window.restart()
        return lines

    def _report_due(self, number: int) -> bool:
        config = self._config
        periods = (config.log_every, config.eval_every, config.checkpoint_every)
        return number == config.max_steps or any(self._due(number, period) for period in periods)

    def _due(self, number: int, period: int) -> bool:
        return period > 0 and number % period == 0

    def _report(self, number: int, lines: list[Line]) -> None:
        config = self._config
        if config.eval_every and (self._due(number, config.eval_every) or number == config.max_steps):
            lines[-1]["validation_loss"] = float(self._stepper.validate())
        if self._writer is not None:
            self._writer.write(lines)
        self._reporter.show(lines[-1])
        for line in lines:
            if not (math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])):
                raise FloatingPointError(
                    f"step {line['step']} has loss {line['loss']} and gradient norm {line['grad_norm']}: the run "
                    "cannot go on; the checkpoint before it is whole. A lower lr, more warmup_steps or a smaller "
                    "grad_clip may help"
                )
