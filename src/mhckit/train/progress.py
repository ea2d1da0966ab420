"""What a person sees of a run: a bar in a terminal, lines anywhere else."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

from .run_folder import Line


class Reporter(Protocol):
    """Shows lines of metrics as they are read."""

    def show(self, line: Line) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class Silence:
    """For every process but the first."""

    def show(self, line: Line) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Lines(Silence):
    """Plain text, for files and pipes."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def show(self, line: Line) -> None:
        self.say(f"step {line['step']}/{self._steps}  {describe(line)}")

    def say(self, text: str) -> None:
        print(text, flush=True)


class Bar:
    """rich's progress bar, with the latest numbers beside it."""

    def __init__(self, name: str, steps: int, done: int, console: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task(name, total=steps, completed=done, numbers="")
        self._progress.start()

    def show(self, line: Line) -> None:
        self._progress.update(self._task, completed=line["step"], numbers=describe(line))
        if "validation_loss" in line:
            self.say(f"step {line['step']}: validation loss {line['validation_loss']:.4f}")

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)

    def close(self) -> None:
        self._progress.stop()


def make_reporter(name: str, steps: int, done: int) -> Reporter:
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        console = Console()
        if console.is_terminal:
            return Bar(name, steps, done, console)
    return Lines(steps)


def describe(line: Line) -> str:
    """The numbers of a line that a person looks at."""
    parts = [f"loss {line['loss']:.4f}", f"grad {line['grad_norm']:.2f}"]
    if "validation_loss" in line:
        parts.append(f"validation {line['validation_loss']:.4f}")
    parts.append(f"{_thousands(line['tokens_per_second'])} tokens/s")
    if line["mfu"] is not None:
        parts.append(f"MFU {line['mfu']:.1%}")
    parts.append(f"{line['memory_bytes'] / 2**30:.2f} GiB")
    return "  ".join(parts)


def _thousands(value: float) -> str:
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{suffix}"
    return f"{value:.0f}"
