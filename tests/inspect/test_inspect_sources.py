"""Every kind of source gives the same model; what is no source is refused in a line, and nothing is changed or run."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from hostile import Bomb, describe_otherwise, sign
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import SHAPE, healthy, snapshot
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.checkpoint import metadata

from mhckit.inspect import Inspection, inspect_source
from mhckit.inspect.open import open_source
from mhckit.models import LanguageModel, ModelConfig
from mhckit.train import TrainConfig, Trainer
from mhckit.train.checkpoint import export_safetensors, save
from mhckit.train.manifest import MANIFEST, _digest

STEPS = 2


def look(source: Path | str, **options: Any) -> Inspection:
    return inspect_source(str(source), **{"tokens": 40, "device": "cpu", **options})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `mhckit train`."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "text.txt").write_text("streams are read, and written, and mixed. " * 40)
    config = TrainConfig(
        model=SHAPE, data=str(folder / "text.txt"), out=str(folder / "runs"), run_name="small", device="cpu",
        seq_len=16, batch_size=2, max_steps=STEPS, warmup_steps=1, eval_every=0, health_every=0, checkpoint_every=1,
    )  # fmt: skip
    Trainer(config, show=False).run()
    return folder / "runs" / "small"


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy, for a test to damage."""
    return shutil.copytree(original, tmp_path / "small")


@pytest.fixture
def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / f"step-{STEPS:08d}"


@pytest.fixture
def export(checkpoint: Path, tmp_path: Path) -> Path:
    return export_safetensors(checkpoint, tmp_path / "model.safetensors")


def test_a_run_its_checkpoint_and_its_export_are_the_same_model(run: Path, checkpoint: Path, export: Path) -> None:
    before = snapshot(run)
    of_run, of_checkpoint = look(run), look(checkpoint)
    of_file = look(export, config=run / "config.yaml")
    assert snapshot(run) == before, "nothing is written into the source"
    assert (of_run.kind, of_checkpoint.kind, of_file.kind) == ("run", "checkpoint", "checkpoint")
    assert of_run.sublayers == of_checkpoint.sublayers == of_file.sublayers
    assert of_run.loss == of_checkpoint.loss == of_file.loss
    assert of_run.facts["step"] == of_checkpoint.facts["step"] == of_file.facts["step"] == str(STEPS)
    assert of_run.name == str(run) and of_run.recipe["streams"] == SHAPE.streams
    # Sequences as long as those of the training, and no longer.
    assert of_run.tokens == 32 and of_run.facts["tokens"] == "2 x 16, bytes"


def test_another_checkpoint_of_a_run_is_another_model(run: Path) -> None:
    first = look(run / "checkpoints" / "step-00000001")
    assert first.facts["step"] == "1" and first.sublayers != look(run).sublayers


def test_an_export_alone_says_that_its_tokenizer_is_a_guess(export: Path) -> None:
    inspection = look(export)
    assert inspection.tokens == 40
    assert "no tokenizer was found" in inspection.facts["tokens"]


def test_a_checkpoint_needs_no_run_around_it(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = checkpoint.rename(tmp_path / "elsewhere" / "moved")
    (tmp_path / "config.yaml").write_text("of: something else\n")
    assert look(moved).facts["step"] == str(STEPS)


def test_text_is_tokenised_as_in_training(run: Path, tmp_path: Path) -> None:
    words = {"the": 0, "stream": 1, "writes": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[attr-defined]
    tokenizer.save(str(tmp_path / "words.json"))
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("tokenizer: null", f"tokenizer: {tmp_path / 'words.json'}"))
    (tmp_path / "text.txt").write_text("the stream writes the stream")
    inspection = look(run, text=tmp_path / "text.txt", token=2)
    assert (inspection.tokens, inspection.token_text) == (5, "writes")
    assert "words.json" in inspection.facts["tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": 32}, r"token must be from 0 to 31, for 32 tokens were read, got 32"),
        ({"token": -1}, r"token must be from 0 to 31"),
        ({"tokens": 1}, "tokens must be at least 2"),
        ({"text": Path("nowhere.txt")}, r"the text must be a file, and there is no nowhere\.txt"),
        ({"tokenizer": Path("nowhere.json")}, r"there is no nowhere\.json"),
        ({"device": "tpu"}, "device must be auto, cpu or cuda, got 'tpu'"),
        ({"config": Path("x.yaml")}, "--config goes with a checkpoint"),
    ],
)
def test_options_that_do_not_fit(original: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        look(original, **options)


def test_a_text_must_be_text(original: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe text")
    with pytest.raises(ValueError, match="must be UTF-8"):
        look(original, text=tmp_path / "bytes")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="2 tokens or more, got 0"):
        look(original, text=tmp_path / "empty")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _without_metadata(path: Path) -> None:
    save_file(load_file(path), path)


def _of_integers(path: Path) -> None:
    with safe_open(path, "pt") as opened:
        facts = opened.metadata()
    save_file({name: weight.long() for name, weight in load_file(path).items()}, path, metadata=facts)


def _with_config(config: str) -> Callable[[Path], None]:
    return lambda path: save_file(load_file(path), path, metadata={"config": config})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "is no whole safetensors file"),
        (lambda path: path.write_bytes(b"something else"), "is no whole safetensors file"),
        (_without_metadata, "says no config in its metadata.*--config"),
        (_of_integers, r"must be of floating point, got torch\.int64"),
        (_with_config("{"), "no JSON"),
        (_with_config("[1]"), "holds no config of a language model"),
        (_with_config('{"dim": 16, "wings": 2}'), "holds no config of a language model of mhckit.*wings"),
        (
            _with_config(json.dumps({"dim": 32, "layers": 2, "heads": 2, "hidden": 16, "streams": 3})),
            r"does not fit its config: blocks\.0\.attn\.\w+\.weight must be \(.*\), got \(",
        ),
        (_with_config(json.dumps({"dim": 10**9, "heads": 2, "layers": 1})), "does not fit its config"),
        (_with_config(json.dumps({"layers": 10**9})), "does not fit its config: 1000000000 layers"),
    ],
)
def test_a_file_that_is_not_as_it_was_exported(export: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(export)
    damaged = export.read_bytes()
    with pytest.raises(ValueError, match=message):
        look(export)
    assert export.read_bytes() == damaged


def test_a_plain_residual_has_nothing_to_see(tmp_path: Path) -> None:
    plain = LanguageModel(ModelConfig(dim=8, layers=1, heads=2, hidden=8, residual="plain"))
    file = export_safetensors(plain, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="plain residual, and inspect looks at hyper-connections"):
        look(file)


def test_names_that_lead_nowhere(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "a run of mhckit train .*, or a model of transformers"
    with pytest.raises(ValueError, match=f"{wanted}.*the folder .* is none of them"):
        look(tmp_path)
    with pytest.raises(ValueError, match=f"{wanted}.*there is no .*missing"):
        look(tmp_path / "missing")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{wanted}.*there is no small/misspelt"):
        look("small/misspelt")  # no name on the hub, since there is a folder small
    (tmp_path / "weights.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=f"{wanted}.*another kind of file, and pickles are not opened"):
        look(tmp_path / "weights.pt")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match="a run without a complete checkpoint"):
        look(run)


def test_a_damaged_checkpoint(run: Path, checkpoint: Path) -> None:
    (data,) = checkpoint.glob("*.distcp")
    data.write_bytes(b"\0" + data.read_bytes()[1:])
    before = snapshot(run)
    with pytest.raises(ValueError, match="is corrupt: the contents of"):
        look(run)
    assert snapshot(run) == before


def test_a_checkpoint_that_would_run_code_is_refused_and_runs_none(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    made = tmp_path / "made by the pickle"
    describe_otherwise(checkpoint, lambda description: setattr(description, "planner_data", Bomb(made)))
    with pytest.raises(ValueError, match=r"was refused, and nothing of it was run: it names pathlib\.\w+"):
        look(run)
    assert not made.exists()
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert made.exists(), "the bomb works, where it is let off"


def test_pickled_weights_inside_a_checkpoint_are_refused(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The description says where a tensor lies; there, instead of the tensor, lies a pickle of something else."""
    made = tmp_path / "made by the pickle"
    (data,) = checkpoint.glob("*.distcp")
    torch.save(Bomb(made), data)

    def everything_is_there(description: Any) -> None:
        for info in description.storage_data.values():
            info.offset, info.length = 0, data.stat().st_size

    describe_otherwise(checkpoint, everything_is_there)
    with pytest.raises(ValueError, match="could not be read: Weights only load failed"):
        look(run)
    assert not made.exists()


def test_a_description_cannot_reach_for_other_files(run: Path, checkpoint: Path) -> None:
    def elsewhere(description: Any) -> None:
        for info in description.storage_data.values():
            info.relative_path = "../../config.yaml"

    describe_otherwise(checkpoint, elsewhere)
    with pytest.raises(ValueError, match="describes something else than this checkpoint"):
        look(run)


@pytest.mark.parametrize(
    "named",
    [
        b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n",
        b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\x00\x85R",  # a member of the Enum
        b"ctorch.serialization\n_get_layout\n",
        b"cpathlib\nPosixPath\n",
    ],
)
def test_a_description_cannot_change_what_it_names(checkpoint: Path, named: bytes) -> None:
    """BUILD with a pair sets attributes, of a class too; and the whole process would have the class."""
    (checkpoint / ".metadata").write_bytes(b"\x80\x02" + named + b"N}X\x06\x00\x00\x00hijackK\x01s\x86b.")
    sign(checkpoint)
    with pytest.raises(ValueError, match="was refused, and nothing of it was run: it changes"):
        look(checkpoint)
    changed = [metadata.MetadataIndex, metadata.StorageMeta, *metadata._MEM_FORMAT_ENCODING, PurePath]
    assert not any(hasattr(each, "hijack") for each in [*changed, torch.serialization._get_layout])


def _every_tensor(change: Callable[[Any], None]) -> Callable[[Any], None]:
    def damage(description: Any) -> None:
        for name, facts in description.state_dict_metadata.items():
            if name.startswith("model."):
                change(facts)

    return damage


def _without_half(facts: Any) -> None:
    (chunk,) = facts.chunks
    facts.chunks = [type(chunk)(chunk.offsets, torch.Size([chunk.sizes[0] // 2, *chunk.sizes[1:]]))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: facts.chunks.clear(), r"of the \d+ values of model\.\S+, 0 are there"),
        (_without_half, r"of the \d+ values of model\.\S+, \d+ are there"),
        (lambda facts: setattr(facts, "size", torch.Size([10**15, 1000])), "of the 10{18} values of"),
        (lambda facts: setattr(facts, "size", "three"), "was refused"),
        (lambda facts: setattr(facts, "properties", None), "could not be read"),
    ],
)
def test_a_description_of_tensors_that_are_not_there(
    checkpoint: Path, change: Callable[[Any], None], message: str
) -> None:
    """Where nothing is read, no memory may be shown that held something else before."""
    describe_otherwise(checkpoint, _every_tensor(change))
    with pytest.raises(ValueError, match=message):
        look(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": [1]}, "is not of mhckit"),
        ({"files": {"a": {"bytes": 1}}}, "is not of mhckit.*blake2b"),
        ({"files": {"../../config.yaml": {"bytes": 1, "blake2b": ""}}}, "is not of mhckit: it lists '../../config"),
        ({"files": {"/etc/passwd": {"bytes": 1, "blake2b": ""}}}, "is not of mhckit: it lists '/etc/passwd'"),
        ({"config": [1]}, "holds no config of a language model"),
        ({"config": {"model": {"vocab_size": 10**30}}}, "does not fit its config"),
    ],
)
def test_a_manifest_that_is_none(checkpoint: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    content = json.loads((checkpoint / MANIFEST).read_text()) | changes
    del content["digest"]
    moved = checkpoint.rename(tmp_path / "moved")
    (moved / MANIFEST).write_text(json.dumps(content | {"digest": _digest(content)}))
    with pytest.raises(ValueError, match=message):
        look(moved)


def test_a_manifest_that_is_too_deep_to_read(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is corrupt, or not of mhckit"):
        look(checkpoint)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"no pickle"), lambda path: path.write_bytes(b"")])
def test_a_description_that_is_no_pickle(checkpoint: Path, damage: Callable[[Path], None]) -> None:
    damage(checkpoint / ".metadata")
    sign(checkpoint)
    with pytest.raises(ValueError, match="was refused"):
        look(checkpoint)


def test_a_model_is_run_as_it_is(tmp_path: Path) -> None:
    """Weights and their dtype come through, and the model is not left to train."""
    model = healthy(dtype="bfloat16")
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"model": json.loads(json.dumps(vars(model.config)))}
    source = open_source(str(save(tmp_path / "checkpoints", 1, model, optimizer, config=config)), device="cpu")
    assert not source.model.training and source.facts["dtype"] == "bfloat16"
    for name, weight in model.state_dict().items():
        assert torch.equal(source.model.state_dict()[name], weight)
