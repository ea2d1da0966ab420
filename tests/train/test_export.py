"""Safetensors: whole weights and the config, from a model or a checkpoint, in one go."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from checkpointed import CONFIG, MODEL, assert_same, make, snapshot, train
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from mhckit.models import LanguageModel, ModelConfig
from mhckit.train.checkpoint import export_safetensors, save


@pytest.fixture
def run(tmp_path: Path) -> tuple[LanguageModel, Path]:
    """A model, and its checkpoint."""
    model, optimizer = make()
    train(model, optimizer, 2)
    return model, save(tmp_path / "checkpoints", 2, model, optimizer, config=CONFIG)


@pytest.fixture
def trained(run: tuple[LanguageModel, Path]) -> LanguageModel:
    return run[0]


@pytest.fixture
def checkpoint(run: tuple[LanguageModel, Path]) -> Path:
    return run[1]


def _metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def _rebuilt(file: Path) -> LanguageModel:
    """The model from nothing but the file."""
    model = LanguageModel(ModelConfig(**json.loads(_metadata(file)["config"])), seed=5)
    model.load_state_dict(load_file(file))
    return model


def test_a_checkpoint_and_its_model_give_the_same_file_but_for_the_step(
    tmp_path: Path, trained: LanguageModel, checkpoint: Path
) -> None:
    of_model = export_safetensors(trained, tmp_path / "new" / "model.safetensors")
    of_checkpoint = export_safetensors(str(checkpoint), str(tmp_path / "checkpoint.safetensors"))
    for file in (of_model, of_checkpoint):
        assert_same(load_file(file), dict(trained.state_dict()))
        assert _rebuilt(file).config == MODEL
        assert _metadata(file)["format"] == "pt"
    assert "step" not in _metadata(of_model)
    assert _metadata(of_checkpoint)["step"] == "2"
    tokens = torch.randint(MODEL.vocab_size, (2, 5))
    assert torch.equal(_rebuilt(of_checkpoint)(tokens), trained(tokens))


def test_a_compiled_model_has_the_same_names(tmp_path: Path, trained: LanguageModel) -> None:
    file = export_safetensors(torch.compile(trained), tmp_path / "file")
    assert_same(load_file(file), dict(trained.state_dict()))


def test_a_config_may_be_given(tmp_path: Path, trained: LanguageModel, checkpoint: Path) -> None:
    for source in (trained, checkpoint, nn.Linear(2, 2)):
        file = export_safetensors(source, tmp_path / "file", config={"own": 1})
        assert json.loads(_metadata(file)["config"]) == {"own": 1}
    with pytest.raises(ValueError, match="no dataclass in its attribute config: give config="):
        export_safetensors(nn.Linear(2, 2), tmp_path / "file")


def test_an_existing_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, trained: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "export" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"old")

    def fail(_: object, path: Path, **__: object) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fail)
        with pytest.raises(OSError, match="no space left"):
            export_safetensors(trained, file)
    assert snapshot(file.parent) == {"model.safetensors": b"old"}
    export_safetensors(trained, file)
    assert_same(load_file(file), dict(trained.state_dict()))
    assert list(snapshot(file.parent)) == ["model.safetensors"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, checkpoint: Path) -> None:
    damaged = checkpoint / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is corrupt: __0_0\.distcp must have"):
        export_safetensors(checkpoint, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_safetensors_is_asked_for_by_name(
    tmp_path: Path, trained: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'mhckit\[train\]'"):
        export_safetensors(trained, tmp_path / "file")
