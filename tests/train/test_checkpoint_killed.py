"""kill -9 at any moment of a save: a complete checkpoint of consistent contents is found, and the next save works.

What is saved is the step, in every tensor and in the seed of the random generator.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.optim import SGD, Optimizer

from mhckit.train.checkpoint import UNFINISHED, latest, load, save

KEEP = 2
SMALL, LARGE = 4, 400_000  # numbers in the weight
RANDOM_KILLS, SECONDS = 12, 20
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def _make(size: int) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(size, 1)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def _tensors(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    return [*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]


def _save(folder: Path, step: int, model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        for tensor in _tensors(model, optimizer):
            tensor.fill_(step)
    torch.manual_seed(step)
    save(folder, step, model, optimizer, config={}, keep=KEEP)


def _load(folder: Path, size: int) -> int:
    """The step of the latest checkpoint, after a look at everything in it."""
    model, optimizer = _make(size)
    path = latest(folder)
    assert path is not None
    step = load(path, model, optimizer, config={})
    tensors = _tensors(model, optimizer)
    assert len(tensors) == 4
    assert path.name == f"step-{step:08d}"
    assert all(bool((tensor == step).all()) for tensor in tensors)
    got = torch.rand(3)
    assert torch.equal(got, torch.rand(3, generator=torch.Generator().manual_seed(step)))
    return step


def _fork(function: Callable[..., None], *args: Any) -> int:
    """The id of a process that does a call: a copy of this one, which has imported everything and runs no threads."""
    process = os.fork()
    if not process:
        try:
            function(*args)
            os._exit(0)
        except BaseException:  # whatever it is: the rest of the test is not for this process
            traceback.print_exc()
            os._exit(1)
    return process


def _ended(process: int) -> int:
    """0, or minus the signal that ended it."""
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code


def _save_and_die(folder: Path, step: int, after: int) -> None:
    """Is killed before it changes the folder for the n-th time. Every file that is opened counts, too."""
    model, optimizer = _make(SMALL)
    changes = 0

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal changes
        if event in CHANGES or (event == "open" and str(args[0]).startswith(str(folder))):
            changes += 1
            if changes == after:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    _save(folder, step, model, optimizer)


def _kill_before_each_change(_: int, directory: Path) -> None:
    torch.set_num_threads(1)
    start = directory / "start"
    for step in (1, 2):
        _save(start, step, *_make(SMALL))
    shutil.copytree(start / "step-00000001", start / f"step-00000000{UNFINISHED}")
    found, code, after = [], -signal.SIGKILL, 0
    while code:
        folder, after = directory / str(after), after + 1
        shutil.copytree(start, folder)
        code = _ended(_fork(_save_and_die, folder, 3, after))
        found.append(_load(folder, SMALL))
        _save(folder, 4, *_make(SMALL))
        assert _load(folder, SMALL) == 4
        assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in (found[-1], 4)]
    assert found == sorted(found), "the old one up to a moment, the new one from then on"
    assert found.count(2) > 10, "moments before the new one is complete"
    assert found.count(3) > 4, "moments while the old one is deleted, and the end"


def test_killed_before_each_change_of_the_folder(tmp_path: Path) -> None:
    spawn(_kill_before_each_change, args=(tmp_path,))


def _save_for_ever(folder: Path) -> None:
    model, optimizer = _make(LARGE)
    step = load(latest(folder), model, optimizer, config={})
    while True:
        step += 1
        _save(folder, step, model, optimizer)


def _kill_at_random(_: int, directory: Path) -> None:
    torch.set_num_threads(1)
    folder = directory / "checkpoints"
    _save(folder, 1, *_make(LARGE))
    moments, deadline = random.Random(0), time.monotonic() + SECONDS
    steps, cut_off = [1], 0
    while len(steps) <= RANDOM_KILLS and time.monotonic() < deadline:
        process = _fork(_save_for_ever, folder)
        time.sleep(moments.uniform(0, 0.3))
        os.kill(process, signal.SIGKILL)
        assert _ended(process) == -signal.SIGKILL
        steps.append(_load(folder, LARGE))
        cut_off += any(path.name.endswith(UNFINISHED) for path in folder.iterdir())
    assert len(steps) > 3, steps
    assert steps == sorted(steps), steps
    assert steps[-1] > 1, "no save was ever finished"
    assert cut_off, "no save was ever cut off"


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Those within the writing of a file are among them."""
    spawn(_kill_at_random, args=(tmp_path,))
