"""Checkpoints that are not trusted: resuming and exporting run nothing that is in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import CONFIG, assert_same, contents, make, train
from hostile import Bomb, describe_otherwise

from mhckit.train.checkpoint import export_safetensors, load, save


class Policy:
    """An option of an optimizer that is no plain data, though harmless."""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return tmp_path / "made by the pickle"


def _saved(tmp_path: Path, **options: Any) -> Path:
    model, optimizer = make()
    train(model, optimizer, 1)
    optimizer.param_groups[0].update(options)
    return save(tmp_path / "checkpoints", 1, model, optimizer, config=CONFIG)


def _resume(checkpoint: Path) -> Any:
    model, optimizer = make(seed=1)
    before = contents(model, optimizer)
    try:
        load(checkpoint, model, optimizer, config=CONFIG)
    except ValueError:
        assert_same(contents(model, optimizer), before)
        raise
    return optimizer


def _export(checkpoint: Path) -> None:
    export_safetensors(checkpoint, checkpoint.parent / "weights.safetensors")


@pytest.mark.parametrize("read", [_resume, _export])
def test_a_description_that_would_run_code(read: Callable[[Path], None], tmp_path: Path, made: Path) -> None:
    checkpoint = _saved(tmp_path)
    describe_otherwise(checkpoint, lambda description: setattr(description, "planner_data", Bomb(made)))
    with pytest.raises(ValueError, match=r"\.metadata was refused, and nothing of it was run: it names pathlib\.\w+"):
        read(checkpoint)
    assert not made.exists()


@pytest.mark.parametrize("read", [_resume, _export])
def test_a_description_without_a_part_of_a_weight(read: Callable[[Path], None], tmp_path: Path) -> None:
    """Resumed, the model would have kept what it was initialised with."""
    checkpoint = _saved(tmp_path)
    describe_otherwise(checkpoint, _forget_a_weight)
    with pytest.raises(ValueError, match=r"of the \d+ values of model\.\S+, 0 are there"):
        read(checkpoint)


def _forget_a_weight(description: Any) -> None:
    next(facts for name, facts in description.state_dict_metadata.items() if name.startswith("model.")).chunks.clear()


def test_options_that_would_run_code(tmp_path: Path, made: Path) -> None:
    checkpoint = _saved(tmp_path, note=Bomb(made))
    model, optimizer = make(seed=1)
    optimizer.param_groups[0]["note"] = None
    with pytest.raises(ValueError, match=r"param_groups\S* was refused, and nothing of it was run"):
        load(checkpoint, model, optimizer, config=CONFIG)
    assert not made.exists()
    _export(checkpoint)
    assert not made.exists(), "pickled objects are no weights"


def test_options_of_a_class_that_is_allowed(tmp_path: Path) -> None:
    checkpoint = _saved(tmp_path, policy=Policy())
    model, optimizer = make(seed=1)
    optimizer.param_groups[0]["policy"] = None
    with pytest.raises(ValueError, match="add_safe_globals"):
        load(checkpoint, model, optimizer, config=CONFIG)
    with torch.serialization.safe_globals([Policy]):
        load(checkpoint, model, optimizer, config=CONFIG)
    assert isinstance(optimizer.param_groups[0]["policy"], Policy)
