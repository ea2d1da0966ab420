"""Train a small transformer twice on Python's own sources: with the plain residual, then with mHC.

    make demo

A minute or two on two CPU cores. Both networks start from the same weights and see the same batches; only the residual
connection differs. The text is the standard library of the Python that runs this. A network this small learns as well
without mHC; what there is to see is that it trains, and what the streams learn to exchange.
"""

from __future__ import annotations

import math
import sysconfig
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from mhckit import HyperConnection, HyperHead, Recipe, Streams

DIM, HEADS, BLOCKS, CONTEXT, BATCH, STEPS = 96, 4, 3, 64, 16, 320
RECIPE = Recipe.preset("deepseek_v4")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(h)))


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out; the residual connection is plain, or mHC if a recipe is given."""

    def __init__(self, recipe: Recipe | None) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        self.sublayers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(DIM), kind()) for _ in range(BLOCKS) for kind in (Attention, Perceptron)
        )
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.1)
        self.out = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 256, bias=False))
        self.recipe = recipe
        if recipe is not None:
            count = len(self.sublayers)
            self.connections = nn.ModuleList(HyperConnection(DIM, recipe, layer_index=i) for i in range(count))
            self.head = HyperHead(DIM, recipe)

    def forward(self, text: Tensor) -> Tensor:
        h = self.token(text) + self.position.weight
        if self.recipe is None:
            for sublayer in self.sublayers:
                h = h + sublayer(h)
            return self.out(h)
        streams = Streams.expand(h, self.recipe.streams)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            h, streams = connection(streams)
            streams = streams.write(sublayer(h))
        return self.out(self.head(streams))


def standard_library() -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's top-level modules, for training and for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    split = len(text) * 9 // 10
    return text[:split], text[split:]


def batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def cross_entropy(model: nn.Module, text: Tensor, generator: torch.Generator) -> Tensor:
    inputs, targets = batch(text, generator)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(name: str, recipe: Recipe | None, progress: Progress) -> tuple[Transformer, float, float, float]:
    """The trained model, its training and validation loss, and seconds per step."""
    torch.manual_seed(0)
    model = Transformer(recipe)
    training, validation = standard_library()
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
    )
    generator, smooth, start = torch.Generator().manual_seed(1), math.nan, time.perf_counter()
    task = progress.add_task(name, total=STEPS, loss="")
    for _ in range(STEPS):
        loss = cross_entropy(model, training, generator)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        smooth = loss.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
        progress.update(task, advance=1, loss=f"loss {smooth:.3f}")
    seconds = (time.perf_counter() - start) / STEPS
    with torch.no_grad():
        generator.manual_seed(2)
        held_out = sum(cross_entropy(model, validation, generator).item() for _ in range(20)) / 20
    return model, smooth, held_out, seconds


@torch.no_grad()
def mean_mixing_matrix(model: Transformer, index: int) -> Tensor:
    """H [out, in] of one sublayer, averaged over a batch of held-out text."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, _args: object, output: tuple[Tensor, Streams]) -> None:
        mix = output[1].mix
        if mix is not None and mix.res is not None:
            seen.append(mix.res.flatten(0, -3).mean(0))

    hook = model.connections[index].register_forward_hook(keep)
    model(batch(standard_library()[1], torch.Generator().manual_seed(3))[0])
    hook.remove()
    return seen[0]


def main() -> None:
    torch.set_num_threads(1)  # at this size a second thread gains little, and loses much on a busy machine
    console = Console()
    columns = (
        "{task.description:>16}",
        BarColumn(),
        MofNCompleteColumn(),
        "{task.fields[loss]}",
        TimeRemainingColumn(),
    )
    results = {}
    with Progress(*(TextColumn(c) if isinstance(c, str) else c for c in columns), console=console) as progress:
        for name, recipe in (("plain residual", None), (f"mHC, {RECIPE.streams} streams", RECIPE)):
            results[name] = train(name, recipe, progress)

    losses = Table(
        "residual", "training loss", "validation loss", "ms per step", title="Python's standard library, nats per byte"
    )
    for name, (_, training, validation, seconds) in results.items():
        losses.add_row(name, f"{training:.3f}", f"{validation:.3f}", f"{1000 * seconds:.0f}")
    console.print(losses)

    model = results[name][0]
    middle = len(model.sublayers) // 2
    matrix = Table("", *(f"from {i}" for i in range(RECIPE.streams)), title=f"learned mixing matrix, sublayer {middle}")
    for out, row in enumerate(mean_mixing_matrix(model, middle).tolist()):
        matrix.add_row(f"to {out}", *(f"{value:.3f}" for value in row))
    console.print(matrix)
    console.print("Each row and each column sums to 1. It began with 0.95 on the diagonal.")


if __name__ == "__main__":
    main()
