"""Checkpoints that are not trusted: resuming and exporting run nothing that is in them."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import CONFIG, assert_same, contents, make, train
from hostile import Bomb, describe_otherwise
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

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


@pytest.mark.parametrize(
    ("read", "name"),
    [(_resume, "model.embedding.weight"), (_export, "model.embedding.weight"), (_resume, "rng.0.cpu")],
)
def test_a_tensor_that_is_described_as_an_object(read: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    """Exported, the weight would have been missing."""
    checkpoint = _saved(tmp_path)
    describe_otherwise(checkpoint, lambda it: it.state_dict_metadata.update({name: BytesStorageMetadata()}))
    with pytest.raises(ValueError, match=f"{name} must be a tensor, and is a pickled object"):
        read(checkpoint)


def test_options_that_would_run_code(tmp_path: Path, made: Path) -> None:
    checkpoint = _saved(tmp_path, note=Bomb(made))
    model, optimizer = make(seed=1)
    optimizer.param_groups[0]["note"] = None
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"loaded: optimizer\.param_groups\.0\.note was refused, and nothing of it was run"
    ):
        load(checkpoint, model, optimizer, config=CONFIG)
    assert not made.exists()
    assert_same(dict(model.state_dict()), before)
    _export(checkpoint)
    assert not made.exists(), "pickled objects are no weights"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_options_are_those_that_were_judged(tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To torch's safe unpickler UserDict is Python 2's name of collections, to the one that is not safe a module."""
    (tmp_path / "UserDict.py").write_text(f"open({str(made)!r}, 'w').close()\nclass OrderedDict: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = _saved(tmp_path, note="to be replaced")
    _replace(checkpoint, "optimizer.param_groups.0.note", _legacy(b"\x80\x04cUserDict\nOrderedDict\n)R."))
    model, optimizer = make(seed=1)
    optimizer.param_groups[0]["note"] = None
    load(checkpoint, model, optimizer, config=CONFIG)
    assert not made.exists()
    assert type(optimizer.param_groups[0]["note"]) is OrderedDict


def _legacy(pickled: bytes) -> bytes:
    """A file of torch.save in its older format, which holds the pickle as it is."""
    sizes = {"short": 2, "int": 4, "long": 4}
    facts = {"protocol_version": 1001, "little_endian": True, "type_sizes": sizes}
    before = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, facts)
    return b"".join(pickle.dumps(each, 2) for each in before) + pickled + pickle.dumps([], 2)


def _replace(checkpoint: Path, name: str, content: bytes) -> None:
    (data,) = checkpoint.glob("*.distcp")
    end = data.stat().st_size
    data.write_bytes(data.read_bytes() + content)

    def point_there(description: Any) -> None:
        (info,) = (info for index, info in description.storage_data.items() if index.fqn == name)
        info.offset, info.length = end, len(content)

    describe_otherwise(checkpoint, point_there)


def test_options_of_a_class_that_is_allowed(tmp_path: Path) -> None:
    checkpoint = _saved(tmp_path, policy=Policy())
    model, optimizer = make(seed=1)
    optimizer.param_groups[0]["policy"] = None
    with pytest.raises(ValueError, match="add_safe_globals"):
        load(checkpoint, model, optimizer, config=CONFIG)
    with torch.serialization.safe_globals([Policy]):
        load(checkpoint, model, optimizer, config=CONFIG)
    assert isinstance(optimizer.param_groups[0]["policy"], Policy)
