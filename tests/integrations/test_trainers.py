"""What trains and places models of transformers sees no difference: Trainer, PEFT, accelerate's hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import send_to_device
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES, VOCABULARY, logits_and_gradients, tiny, token_ids
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import mhckit
from mhckit.integrations.transformers import apply, restore
from mhckit.testing import relative_error

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


class _Sequences(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = (torch.arange(12) * (index + 3)) % VOCABULARY
        return dict(input_ids=ids, labels=ids)


def _trained(family: str, folder: Path, change: Any) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        gradient_checkpointing=True,
        disable_tqdm=True,
        seed=5,
        dataloader_pin_memory=False,
    )
    model = change(tiny(family, own_initialisation=True))
    trainer = Trainer(model=model, args=arguments, train_dataset=_Sequences())
    trainer.train()
    return trainer


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer(family: str, tmp_path: Path) -> None:
    plain, patched = (_trained(family, tmp_path / change.__name__, change) for change in (restore, apply))
    curves = [[row["loss"] for row in trainer.state.log_history if "loss" in row] for trainer in (plain, patched)]
    assert curves[0][-1] < curves[0][0] and len(curves[0]) == 6
    torch.testing.assert_close(torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=1e-4, atol=0)
    start = dict(tiny(family, own_initialisation=True).named_parameters())
    trained = {name: p for name, p in patched.model.named_parameters() if "_hc." in name}
    assert trained and not any(torch.equal(parameter, start[name]) for name, parameter in trained.items())
    saved = type(patched.model).from_pretrained(tmp_path / "apply" / "checkpoint-6")
    assert torch.equal(saved.lm_head.weight, patched.model.lm_head.weight)


_TARGETS = {
    "deepseek_v4": ["q_a_proj", "kv_proj"],
    "glm5_next": ["o_proj", "down_proj"],
    "hy_v4": ["q_a_proj", "o_proj"],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapted_first", [False, True])
def test_lora_beside_the_connections(family: str, adapted_first: bool) -> None:
    config = LoraConfig(target_modules=_TARGETS[family], r=2, init_lora_weights=False)
    ids = token_ids()

    def adapted(change: Any) -> Any:
        torch.manual_seed(3)
        model = tiny(family)
        return change(get_peft_model(model, config)) if adapted_first else get_peft_model(change(model), config)

    plain, patched = (logits_and_gradients(adapted(change), ids) for change in (restore, apply))
    assert relative_error(patched[0], plain[0]) < 1e-5
    assert plain[1] and all("lora_" in name for name in plain[1])
    assert patched[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        assert relative_error(patched[1][name], gradient) < 1e-4, name


def test_streams_go_where_accelerate_sends_them() -> None:
    streams = mhckit.Streams(torch.zeros(2, 4, 8), mhckit.Mix(torch.zeros(2, 4), torch.zeros(2, 4), None))
    sent = send_to_device(streams, "meta")
    assert sent.x.is_meta and sent.mix.pre.is_meta and sent.mix.res is None


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_of_accelerate_around_the_modules(family: str) -> None:
    """They replace the forward of an instance; both orders of coming and going leave the right one."""
    model, ids = tiny(family), token_ids()
    plain = model(input_ids=ids).logits
    hooked = [m for m in model.modules() if "Hyper" in type(m).__name__ or "DecoderLayer" in type(m).__name__]
    for module in hooked:
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    apply(model)
    assert 0 < relative_error(model(input_ids=ids).logits, plain) < 1e-5
    restore(model)
    assert torch.equal(model(input_ids=ids).logits, plain)
    apply(model)
    for module in hooked:
        remove_hook_from_module(module)
    assert 0 < relative_error(model(input_ids=ids).logits, plain) < 1e-5
    assert torch.equal(restore(model)(input_ids=ids).logits, plain)
