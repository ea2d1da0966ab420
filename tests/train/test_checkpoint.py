"""Checkpoints of one process: they resume to the bit, and what is damaged or foreign is refused and left alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import CONFIG, assert_same, contents, make, snapshot, train
from torch import nn
from torch.optim import SGD, AdamW

from mhckit.train.checkpoint import latest, load, save
from mhckit.train.manifest import MANIFEST


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def saved(folder: Path) -> Path:
    model, optimizer = make()
    train(model, optimizer, 2)
    return save(folder, 2, model, optimizer, config=CONFIG)


def test_resumes_to_the_bit(folder: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 3)
    path = save(folder, 3, model, optimizer, config=CONFIG)
    at_save = contents(model, optimizer)
    train(model, optimizer, 3)

    other, other_optimizer = make(seed=1)
    train(other, other_optimizer, 1)
    torch.manual_seed(7)
    assert path == folder / "step-00000003" == latest(folder)
    assert load(path, other, other_optimizer, config=CONFIG) == 3
    assert_same(contents(other, other_optimizer), at_save)
    train(other, other_optimizer, 3)
    assert_same(contents(other, other_optimizer), contents(model, optimizer))


def test_options_of_the_optimizer_come_back(folder: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 1)
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.5 + index
    path = save(folder, 1, model, optimizer, config=CONFIG)
    other, other_optimizer = make(seed=1)
    load(path, other, other_optimizer, config=CONFIG)
    for got, want in zip(other_optimizer.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in got.items() if k != "params"} == {k: v for k, v in want.items() if k != "params"}


@pytest.mark.parametrize("steps", [0, 2])
def test_saving_changes_nothing(folder: Path, steps: int) -> None:
    """Neither before the first step, when the optimizer has no state."""
    model, optimizer = make()
    train(model, optimizer, steps)
    before = contents(model, optimizer)
    save(folder, steps, model, optimizer, config=CONFIG)
    assert_same(contents(model, optimizer), before)


def test_a_checkpoint_from_before_the_first_step(folder: Path) -> None:
    model, optimizer = make()
    path = save(folder, 0, model, optimizer, config=CONFIG)
    other, other_optimizer = make(seed=1)
    train(other, other_optimizer, 2)
    assert load(path, other, other_optimizer, config=CONFIG) == 0
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        torch.manual_seed(3)
        train(one, its_optimizer, 2)
    assert_same(contents(other, other_optimizer), contents(model, optimizer))


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

    def step(self, optimizer: torch.optim.Optimizer, *modules: nn.Module) -> None:
        optimizer.zero_grad()
        for module in modules:
            module(torch.randn(2, 3)).sum().backward()
        optimizer.step()


def test_parameters_that_no_gradient_has_reached(folder: Path) -> None:
    """They have no state then, and count their steps from the first one later."""
    model, other = PartlyUsed(), PartlyUsed()
    optimizer, other_optimizer = AdamW(model.parameters()), AdamW(other.parameters())
    model.step(optimizer, model.used)
    path = save(folder, 1, model, optimizer, config={})
    load(path, other, other_optimizer, config={})
    again = save(folder, 2, other, other_optimizer, config={})
    load(again, other, other_optimizer, config={})
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        torch.manual_seed(3)
        one.step(its_optimizer, one.used, one.idle)
    assert_same(contents(other, other_optimizer), contents(model, optimizer))
    assert contents(other, other_optimizer)["idle.weight.step"] == 1


def test_an_optimizer_without_state(folder: Path) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    load(save(folder, 1, model, optimizer, config={}), other, SGD(other.parameters(), lr=0.1), config={})
    assert torch.equal(other.weight, model.weight)


def test_keeps_as_many_as_asked(folder: Path) -> None:
    model, optimizer = make()
    (folder / "other").mkdir(parents=True)
    (folder / "step-1").touch()
    for step in range(1, 6):
        save(folder, step, model, optimizer, config=CONFIG, keep=3)
    assert sorted(path.name for path in folder.iterdir()) == [
        "other",
        *(f"step-0000000{n}" for n in (3, 4, 5)),
        "step-1",
    ]
    save(folder, 6, model, optimizer, config=CONFIG, keep=1)
    assert sorted(path.name for path in folder.iterdir()) == ["other", "step-00000006", "step-1"]


def test_steps_are_compared_as_numbers(folder: Path) -> None:
    model, optimizer = make()
    save(folder, 99_999_999, model, optimizer, config=CONFIG)
    assert latest(folder) == folder / "step-99999999"
    save(folder, 100_000_000, model, optimizer, config=CONFIG)
    assert latest(folder) == folder / "step-100000000"


def test_latest_takes_complete_ones_alone(folder: Path, saved: Path) -> None:
    assert latest(folder / "nowhere") is None
    shutil.copytree(saved, folder / "step-00000009.unfinished")
    shutil.copytree(saved, folder / "step-00000008")
    (folder / "step-00000008" / MANIFEST).unlink()
    shutil.copytree(saved, folder / "best-00000007")
    assert latest(folder) == saved


def test_what_was_left_unfinished_is_removed_by_the_next_save(folder: Path, saved: Path) -> None:
    shutil.copytree(saved, folder / "step-00000009.unfinished")
    shutil.copytree(saved, folder / "step-00000001.unfinished")
    shutil.copytree(saved, folder / "mine.unfinished")
    save(folder, 9, *make(), config=CONFIG)
    assert sorted(path.name for path in folder.iterdir()) == ["mine.unfinished", "step-00000002", "step-00000009"]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _refused(path: Path, message: str, config: dict[str, Any] = CONFIG) -> None:
    """A ValueError of this message, and nothing changed: neither on disk nor in memory."""
    model, optimizer = make(seed=1)
    train(model, optimizer, 1)
    before, files = contents(model, optimizer), snapshot(path.parent)
    with pytest.raises(ValueError, match=message):
        load(path, model, optimizer, config=config)
    assert_same(contents(model, optimizer), before)
    assert snapshot(path.parent) == files


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is corrupt: {} must have [0-9]+ bytes, got"),
        (lambda path: path.write_bytes(b""), "is corrupt: {} must have [0-9]+ bytes, got 0"),
        (_flip, "is corrupt: the contents of {} are not those that were written"),
        (Path.unlink, "is corrupt: {} is missing"),
    ],
    ids=["truncated", "empty", "bit", "missing"],
)
def test_a_damaged_file_is_refused(saved: Path, name: str, damage: Callable[[Path], None], message: str) -> None:
    damage(saved / name)
    _refused(saved, message.format(name))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-20], "manifest.json is corrupt, or not of mhckit"),
        (lambda text: text.replace('"step": 2', '"step": 3'), "manifest.json is corrupt: its digest"),
        (lambda text: text.replace('"dim": 8', '"dim": 9'), "manifest.json is corrupt: its digest"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "it is of a mhckit checkpoint, version 2"),
        (lambda text: '{"name": "another program"}', "manifest.json is corrupt, or not of mhckit"),
        (lambda text: "[]", "manifest.json is corrupt, or not of mhckit"),
        (lambda text: "\0\xff", "manifest.json is corrupt, or not of mhckit"),
    ],
    ids=["truncated", "step", "config", "version", "foreign", "list", "binary"],
)
def test_a_damaged_manifest_is_refused(saved: Path, damage: Callable[[str], str], message: str) -> None:
    manifest = saved / MANIFEST
    changed = damage(manifest.read_text())
    assert changed != manifest.read_text()
    manifest.write_text(changed, encoding="latin-1")
    _refused(saved, message)


def test_what_is_no_checkpoint_is_refused(folder: Path, saved: Path) -> None:
    _refused(folder, "checkpoints is no checkpoint of mhckit: it has no manifest.json; it holds step-00000002")
    _refused(folder / "step-00000003", "there is no checkpoint")
    (folder / "empty").mkdir()
    _refused(folder / "empty", "empty is no checkpoint of mhckit: it has no manifest.json$")
    (saved / MANIFEST).unlink()
    _refused(saved, "is incomplete: it has no manifest.json, which is written last")


def test_another_config_is_refused_by_the_names_of_its_fields(saved: Path) -> None:
    other = json.loads(json.dumps(CONFIG))
    other["model"] |= {"dim": 16, "layers": 3}
    other["model"].pop("tied")
    other["seed"] = 4
    _refused(
        saved,
        "another config: model.dim is 8 there and 16 here; model.layers is 1 there and 3 here; "
        "model.tied is False there and absent here; seed is absent there and 4 here$",
        other,
    )
    many = {f"field{index}": index for index in range(20)}
    _refused(saved, "field7 is absent there and 7 here; and 12 more$", CONFIG | many)


def test_tuples_in_a_config_are_lists(folder: Path) -> None:
    model, optimizer = make()
    path = save(folder, 1, model, optimizer, config={"betas": (0.9, 0.95)})
    assert load(path, model, optimizer, config={"betas": (0.9, 0.95)}) == 1
    with pytest.raises(TypeError, match="config must hold numbers, strings, lists and dicts alone"):
        save(folder, 2, model, optimizer, config={"path": Path()})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Linear(3, 4), r"of another model: weight must be \(4, 3\), got \(3, 3\)"),
        (nn.Linear(3, 3, bias=False), "of another model: of the weights, it has, unlike the model, model.bias"),
        (nn.Bilinear(3, 3, 3), r"of another model: weight must be \(3, 3, 3\), got \(3, 3\)"),
        (nn.Sequential(nn.Linear(3, 3)), "of another model: of the weights, it lacks model.0.bias, model.0.weight"),
    ],
)
def test_another_model_of_the_same_config_is_refused(folder: Path, other: nn.Module, message: str) -> None:
    model = nn.Linear(3, 3)
    path = save(folder, 1, model, AdamW(model.parameters()), config={})
    before = contents(other, AdamW(other.parameters()))
    with pytest.raises(ValueError, match=message):
        load(path, other, AdamW(other.parameters()), config={})
    assert_same(contents(other, AdamW(other.parameters())), before)


def test_another_optimizer_is_refused(folder: Path) -> None:
    model = PartlyUsed()
    optimizer = AdamW(model.parameters())
    model.step(optimizer, model.used, model.idle)
    path = save(folder, 1, model, optimizer, config={})
    with pytest.raises(ValueError, match=r"of the optimizer state, it has, unlike the model, optimizer\.state\.idle"):
        load(path, model, SGD(model.parameters(), lr=1, momentum=0.9), config={})
    backwards = AdamW(reversed(list(model.parameters())))
    with pytest.raises(ValueError, match="must have the optimizer's groups of parameters"):
        load(path, model, backwards, config={})


def test_options_that_the_checkpoint_does_not_know_stay(folder: Path) -> None:
    """As between two versions of torch."""
    model, optimizer = make()
    train(model, optimizer, 1)
    path = save(folder, 1, model, optimizer, config=CONFIG)
    optimizer.param_groups[0]["new"] = 5
    load(path, model, optimizer, config=CONFIG)
    assert optimizer.param_groups[0]["new"] == 5


def test_nothing_of_others_is_overwritten(folder: Path, saved: Path) -> None:
    model, optimizer = make()
    files = snapshot(folder)
    for step in (1, 2):
        with pytest.raises(ValueError, match=f"step {step} cannot be saved beside .*step-00000002"):
            save(folder, step, model, optimizer, config=CONFIG)
    with pytest.raises(ValueError, match="another config: corpus is 'none' there and 'other' here"):
        save(folder, 3, model, optimizer, config=CONFIG | {"corpus": "other"}, keep=1)
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        save(folder, 3, model, optimizer, config=CONFIG, keep=0)
    with pytest.raises(ValueError, match=r"must be one, and .* is a file"):
        save(saved / MANIFEST, 3, model, optimizer, config=CONFIG)
    assert snapshot(folder) == files


def test_a_checkpoint_with_a_damaged_manifest_is_not_deleted(folder: Path, saved: Path) -> None:
    _flip(saved / MANIFEST)
    content = snapshot(saved)
    for step in (3, 4, 5):
        save(folder, step, *make(), config=CONFIG, keep=1)
    assert snapshot(saved) == content
    assert latest(folder) == folder / "step-00000005"


def test_a_failed_save_is_an_error_and_leaves_the_rest(
    folder: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = snapshot(folder)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torch.save", full)
        with pytest.raises(RuntimeError, match=r"step-00000003\.unfinished could not be written"):
            save(folder, 3, *make(), config=CONFIG)
    assert {name: content for name, content in snapshot(folder).items() if ".unfinished" not in name} == files
    assert save(folder, 3, *make(), config=CONFIG) == latest(folder)
