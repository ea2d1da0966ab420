"""A small model trains on the GPU as the reference does on the CPU, and twice to the same bits."""

from __future__ import annotations

import pytest
import torch

import mhckit
from mhckit import HyperConnection, HyperHead, Recipe, Streams

STEPS, VOCABULARY, DIM, LENGTH, BATCH = 200, 61, 64, 32, 8


class Model(torch.nn.Module):
    """Embedding, two blocks of causal attention and an MLP on four streams, and a learned head."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, DIM)
        self.connections = torch.nn.ModuleList(HyperConnection(DIM, recipe, layer_index=i, norm=True) for i in range(4))
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(DIM, 3 * DIM) for _ in range(2))
        self.out = torch.nn.ModuleList(torch.nn.Linear(DIM, DIM) for _ in range(2))
        self.mlp = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(DIM, 4 * DIM), torch.nn.GELU(), torch.nn.Linear(4 * DIM, DIM))
            for _ in range(2)
        )
        self.head = HyperHead(DIM, recipe)
        self.logits = torch.nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        streams = Streams.expand(self.embedding(tokens).to(dtype), 4)
        for i in range(2):
            h, streams = self.connections[2 * i](streams)
            streams = streams.write(self.attention(i, h.float()).to(dtype))
            h, streams = self.connections[2 * i + 1](streams)
            streams = streams.write(self.mlp[i](h.float()).to(dtype))
        return self.logits(self.head(streams).float())

    def attention(self, i: int, h: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv[i](h).unflatten(-1, (3, 4, DIM // 4)).movedim(-3, 0).transpose(-2, -3)
        scores = (q @ k.mT / (DIM // 4) ** 0.5).masked_fill(
            torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=h.device).triu(1), -1e9
        )
        return self.out[i]((scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2))


def _train(recipe: Recipe, device: str, dtype: torch.dtype) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of STEPS steps on a noisy sequence, and the final parameters."""
    torch.manual_seed(0)
    model = Model(recipe).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        while tokens.shape[1] < LENGTH:  # each token decides the next, except for some noise
            noise = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
            kept = torch.rand(BATCH, 1, generator=generator) < 0.9
            tokens = torch.cat([tokens, torch.where(kept, (7 * tokens[:, -1:] + 3) % VOCABULARY, noise)], 1)
        tokens = tokens.to(device)
        logits = model(tokens, dtype)[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("preset", ["deepseek_v4", "paper"])
def test_the_loss_follows_the_cpu_reference(preset: str) -> None:
    recipe = Recipe.preset(preset)
    cpu, _ = _train(recipe, "cpu", torch.float32)
    assert cpu[-1] < 0.8 * cpu[0], "nothing was learned, so nothing is compared"
    single, _ = _train(recipe, "cuda", torch.float32)
    half, _ = _train(recipe, "cuda", torch.bfloat16)
    for step, (want, fp32, bf16) in enumerate(zip(cpu, single, half, strict=True)):
        assert abs(fp32 - want) <= 1e-3 * want, (step, want, fp32)
        assert abs(bf16 - want) <= 5e-3 * want, (step, want, bf16)


def test_training_repeats_to_the_bit() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with mhckit.backend("triton"):
            first, second = (_train(Recipe.preset("deepseek_v4"), "cuda", torch.bfloat16) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert first[0] == second[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
