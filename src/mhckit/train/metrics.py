"""Where lines of metrics go: a JSONL file, TensorBoard where it is installed, and whoever asked for them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .run_folder import Line, RunFolder


class MetricsWriter:
    """Of the first process; the others have none.

    Args:
        folder: of the run.
        step: the last step that is done already; what TensorBoard has of later ones is hidden.
        on_log: called with every line, a dict of numbers: what a tracker needs.
    """

    def __init__(self, folder: RunFolder, step: int, on_log: Callable[[Line], None] | None) -> None:
        self._file = folder.metrics_file.open("a")
        self._tensorboard = _tensorboard(folder.tensorboard, step)
        self._on_log = on_log

    def write(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self._file.write(json.dumps(line) + "\n")
            if self._tensorboard is not None:
                for name, value in line.items():
                    if name != "step" and value is not None:
                        self._tensorboard.add_scalar(name if "/" in name else f"train/{name}", value, line["step"])
            if self._on_log is not None:
                self._on_log(dict(line))
        self._file.flush()  # to the system, which keeps it if this process is killed

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _tensorboard(path: Path, step: int) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(path), purge_step=step + 1 if step else None)
