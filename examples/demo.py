"""Train a small language model twice on Python's own sources: with the plain residual, then with mHC.

    make demo

A minute or two on two CPU cores, and one picture at the end. It is `mhckit train --preset tiny` with two kinds of
residual: both models start from the same weights and see the same batches, only the residual connection differs. A
model this small learns as well without mHC; what there is to see is that it trains, and what the streams learn to
exchange. Interrupted, it goes on where it was; to start over, delete the folder. Needs mhckit[cli,train,viz].
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mhckit.health import mean_mixing_matrices
from mhckit.train import Trainer, load_config
from mhckit.train.pictures import training_picture

BATCH, CONTEXT = 8, 128
RESIDUALS = {"plain residual": "plain", "mHC, 4 streams": "mhc"}


def text() -> Tensor:
    """Bytes that the models have not seen: this file's."""
    data = Path(__file__).read_bytes()
    return torch.tensor(list(data[: len(data) // CONTEXT * CONTEXT])).view(-1, CONTEXT)


def main(
    out: Annotated[Path, typer.Option(help="Folder of the runs and the picture.")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 300,
) -> None:
    torch.set_num_threads(1)  # at this size a second thread gains little, and loses much on a busy machine
    runs, matrices = {}, {}
    for name, residual in RESIDUALS.items():
        config = load_config(
            preset="tiny",
            residual=residual,
            run_name=residual,
            out=str(out),
            max_steps=steps,
            warmup_steps=min(20, steps),
            batch_size=BATCH,
            seq_len=CONTEXT,
            health_every=20,
        )
        trainer = Trainer(config)
        runs[name] = trainer.run()
        assert trainer.model is not None
        if residual != "plain":
            inputs = text().to(next(trainer.model.parameters()).device)
            matrices[name] = mean_mixing_matrices(trainer.model, inputs)

    table = Table("residual", "training loss", "validation loss", "ms per step", title="Nats per byte of Python")
    for name, lines in runs.items():
        last = lines[-max(1, len(lines) // 20) :]
        loss = math.fsum(line["loss"] for line in last) / len(last)
        milliseconds = 1000 * BATCH * CONTEXT / lines[-1]["tokens_per_second"]
        table.add_row(name, f"{loss:.3f}", f"{lines[-1]['validation_loss']:.3f}", f"{milliseconds:.0f}")
    console = Console()
    console.print(table)
    picture = training_picture(runs, matrices, out / "demo.png")
    console.print("Mixing matrices began with 0.95 on the diagonal; each row and each column sums to 1.")
    console.print(f"Losses, gradients and matrices as a picture: {picture}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
