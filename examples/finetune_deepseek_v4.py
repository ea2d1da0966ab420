"""Train a tiny DeepSeek-V4 of transformers on local text, its hyper-connections computed by mhckit.

    python examples/finetune_deepseek_v4.py --text README.md --steps 100

Bytes are the tokens, so nothing is downloaded. The one line that brings mhckit in is `apply(model)`; leave it out with
--plain, and the losses are the same to three digits. Needs mhckit[cli,transformers].
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import Dataset
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, Trainer, TrainingArguments, set_seed

from mhckit.integrations.transformers import apply


class Bytes(Dataset[dict[str, Any]]):
    """Neighbouring pieces of a text, `length` bytes each."""

    def __init__(self, text: bytes, length: int) -> None:
        if len(text) < length:
            raise typer.BadParameter(f"the text has {len(text)} bytes, fewer than one sequence of {length}")
        self.pieces = torch.tensor(list(text))[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(input_ids=self.pieces[index], labels=self.pieces[index])


def tiny_model() -> DeepseekV4ForCausalLM:
    return DeepseekV4ForCausalLM(
        DeepseekV4Config(
            vocab_size=256,
            hidden_size=64,
            moe_intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,
            q_lora_rank=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            o_groups=2,
            o_lora_rank=16,
            index_n_heads=2,
            index_head_dim=32,
            index_topk=16,
            sliding_window=32,
            num_nextn_predict_layers=0,
            partial_rotary_factor=0.5,
            max_position_embeddings=512,
        )
    )


def main(
    text: Annotated[Path, typer.Option(help="Any file.", exists=True, dir_okay=False)] = Path("README.md"),
    steps: Annotated[int, typer.Option(min=1)] = 100,
    length: Annotated[int, typer.Option(help="Bytes per sequence.", min=8)] = 64,
    output: Annotated[Path, typer.Option(help="Where checkpoints go.")] = Path("runs/tiny_deepseek_v4"),
    plain: Annotated[bool, typer.Option(help="Leave mhckit out.")] = False,
) -> None:
    set_seed(0)
    model = tiny_model()
    if not plain:
        apply(model)
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        warmup_steps=min(10, steps // 2),
        logging_steps=max(1, steps // 10),
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Bytes(text.read_bytes(), length))
    trainer.train()
    trainer.save_model()  # a checkpoint like any other: transformers reads it without mhckit
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}, saved in {output}")


if __name__ == "__main__":
    typer.run(main)
