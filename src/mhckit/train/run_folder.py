"""The folder of a run: whose it is, and the lines that were written into it.

config.yaml      the config, resolved
metrics.jsonl    a line per step
tensorboard/     the same as scalars
checkpoints/     step-00000100, ...
report.html      a page of the run, when it has ended
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .config import IDENTITY, TrainConfig
from .presets import read_yaml, to_yaml

Line = dict[str, Any]
METRICS = "metrics.jsonl"


class RunFolder:
    """Paths of a run, and what may be done with them."""

    def __init__(self, config: TrainConfig) -> None:
        self.path = Path(config.out) / config.run_name
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / METRICS
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.report = self.path / "report.html"
        self.memory_snapshot = self.path / "memory.pickle"

    def check(self, config: TrainConfig) -> None:
        """ValueError if something else than this run is here. Changes nothing."""
        if self.config_file.is_file():
            self._check_same(config)
            if config.resume == "never":
                raise ValueError(f"{self.path} holds a run, and resume is 'never': take another run name")
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(f"{self.path} holds something that is no run of mhckit: take another run name")
        if config.resume == "always":
            raise ValueError(f"resume is 'always', and {self.path} holds no run to go on with")

    def _check_same(self, config: TrainConfig) -> None:
        there, here = read_yaml(self.config_file), config.to_dict()
        for name in IDENTITY:
            if there.get(name) != here[name]:
                old, new = _differing(there.get(name), here[name])
                raise ValueError(
                    f"{self.path} holds a run with {name} {old}, and this one has {new}: take another run name"
                )

    def begin(self, config: TrainConfig, step: int) -> list[Line]:
        """Make the folder this run's, with its lines up to a step, which are returned.

        Lines of steps that a run did after its last checkpoint, before it was killed, are done again.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        _replace(self.config_file, to_yaml(config))
        lines = [line for line in read_metrics(self.metrics_file) if line["step"] <= step]
        _replace(self.metrics_file, "".join(json.dumps(line) + "\n" for line in lines))
        return lines


def read_metrics(path: Path) -> list[Line]:
    """The lines of a run; one that was cut off when the run was killed is none."""
    if not path.is_file():
        return []
    *whole, _cut = path.read_text().split("\n")
    return [json.loads(text) for text in whole]


def _differing(old: Any, new: Any) -> tuple[Any, Any]:
    """Of two maps, the entries that differ."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return repr(old), repr(new)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return {name: old.get(name) for name in names}, {name: new.get(name) for name in names}


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(text)
    draft.replace(path)
