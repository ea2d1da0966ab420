"""Models of transformers as sources: from safetensors, without any code of their own."""

from __future__ import annotations

import heapq
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers, which `make` installs")

import torch
from safetensors.torch import load_file, save_file
from small_models import snapshot
from tiny import VOCABULARY, tiny
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from mhckit.health import Health
from mhckit.inspect import Inspection, inspect_source
from mhckit.integrations.transformers import apply


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("deepseek_v4", num_hidden_layers=2)


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Saved, and nothing to be had from the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def look(folder: Path) -> Inspection:
    return inspect_source(str(folder), tokens=32, device="cpu")


def test_a_saved_model_computes_what_it_did(model: PreTrainedModel, folder: Path) -> None:
    before = snapshot(folder)
    inspection = look(folder)
    assert snapshot(folder) == before
    assert inspection.kind == "transformers" and inspection.recipe["iterations"] == 7
    assert [each.name for each in inspection.sublayers] == [
        f"model.layers.{layer}.{kind}_hc" for layer in range(2) for kind in ("attn", "ffn")
    ]
    text = Path(heapq.__file__).read_bytes()[:32]
    ids = torch.tensor([[byte % VOCABULARY for byte in text]])
    with torch.no_grad():
        plain = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert inspection.loss == pytest.approx(float(plain), abs=1e-4), "as transformers itself computes it"
    assert "no tokenizer was found" in inspection.facts["tokens"] and "modulo" in inspection.facts["tokens"]
    assert inspection.token_text == "" and all(each.error_by_iteration for each in inspection.sublayers)
    patched = apply(tiny("deepseek_v4", num_hidden_layers=2))
    health = Health(patched)
    with torch.no_grad(), health.sample():
        patched(input_ids=ids, use_cache=False)
    numbers = health.per_sublayer()
    seen = [each.column_error for each in inspection.sublayers]
    assert seen == pytest.approx(numbers["column_error_max"].tolist(), abs=1e-5)


def test_its_tokenizer_is_used(folder: Path) -> None:
    letters = {chr(code): code - 32 for code in range(32, 127)}
    Tokenizer(models.BPE(letters | {"\n": 95, "th": 96}, [("t", "h")])).save(str(folder / "tokenizer.json"))
    inspection = look(folder)
    assert "tokenizer.json" in inspection.facts["tokens"] and "no tokenizer" not in inspection.facts["tokens"]
    assert len(inspection.token_text) in (1, 2)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights[next(name for name in weights if "layers.0" in name and "attn" in name and name.endswith("base"))]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights of its model: model\.layers\.0\.attn_hc"):
        look(folder)


def test_corrupt_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"the safetensors of .* could not be loaded"):
        look(folder)


def test_pickled_weights_are_not_opened(folder: Path, model: PreTrainedModel) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"the safetensors of .* could not be loaded"):
        look(folder)


def test_code_of_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (folder / "modeling_own.py").write_text(f"open({str(made)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    names = {name: "modeling_own.Own" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": names}))
    with pytest.raises(ValueError, match=r"no config\.json that transformers can use"):
        look(folder)
    assert not made.exists()
    # A known type is loaded with the code of transformers, whatever else the folder offers.
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": names}))
    assert look(folder).sublayers
    assert not made.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "wide"}, r"no config\.json that transformers can use.*hidden_size"),
        ({"num_hidden_layers": 3}, r"no config\.json that transformers can use.*num_hidden_layers"),
        ({"hidden_size": -4}, r"no model can be made from the config\.json of .*negative dimension"),
        ({"vocab_size": 0}, r"no model can be made from the config\.json of "),
    ],
)
def test_a_config_that_makes_no_model(folder: Path, change: dict[str, object], message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        look(folder)


def test_models_without_hyper_connections_are_refused_before_their_weights_are_read(folder: Path) -> None:
    shutil.rmtree(folder)
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8)).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no hyper-connections that mhckit knows.*deepseek_v4.*this one has: gpt2"):
        look(folder)


def test_a_name_that_is_not_here_and_not_on_the_hub(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are no runs: `make demo` leaves some in the checkout."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no file or folder runs/nothing, and as a name on the Hugging Face hub"):
        inspect_source("runs/nothing", device="cpu")
