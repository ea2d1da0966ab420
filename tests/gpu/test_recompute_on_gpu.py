"""Block recompute by the kernels: what `post` and `pre` rebuild are the bits that the junction made."""

from __future__ import annotations

import pytest
import torch

import mhckit
from mhckit import HyperConnection, HyperHead, Recipe, Streams
from mhckit.models import LanguageModel, ModelConfig

CASES = [
    ("deepseek_v4", 4, 2048, 300, True),
    ("paper", 4, 4096, 129, True),
    ("paper", 4, 2560, 130, False),
    ("deepseek_v4", 4, 7168, 66, True),
    ("deepseek_v41", 4, 1024, 257, True),
    ("hy_v4", 2, 1536, 257, True),
    ("mhc_lite", 4, 640, 257, False),
    ("paper", 8, 1024, 65, True),
    ("paper", 4, 1001, 127, True),
    ("hc", 3, 520, 127, True),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("preset", "streams", "channels", "tokens", "norm"), CASES)
def test_gradients_are_the_same_bits(
    preset: str, streams: int, channels: int, tokens: int, norm: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    recipe = Recipe.preset(preset, streams=streams)
    connections = torch.nn.ModuleList(
        HyperConnection(channels, recipe, layer_index=i, norm=norm, device="cuda") for i in range(5)
    )
    head = HyperHead(channels, recipe, device="cuda")
    with torch.no_grad():
        for parameter in connections.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    weights = [torch.randn(channels, device="cuda", dtype=dtype) for _ in connections]
    start = torch.randn(tokens, channels, device="cuda", dtype=dtype)

    def gradients(recomputed: bool) -> list[torch.Tensor | None]:
        connections.zero_grad()
        h = start.clone().requires_grad_()

        def run() -> torch.Tensor:
            streams_ = Streams.expand(h, streams)
            for connection, weight in zip(connections, weights, strict=True):
                x_in, streams_ = connection(streams_)
                streams_ = streams_.write((x_in * weight).tanh() * x_in)
            return head(streams_)

        if recomputed:
            with mhckit.recompute(connections, every=3):
                out = run()
        else:
            out = run()
        out.float().square().mean().backward()
        return [h.grad, *(parameter.grad for parameter in connections.parameters())]

    for kept, rebuilt in zip(gradients(False), gradients(True), strict=True):
        if kept is None:
            assert rebuilt is None
        else:
            assert kept.isfinite().all() and torch.equal(kept, rebuilt)


def test_memory_after_forward() -> None:
    """Of the streams and reads, only those at the start of groups remain.

    In bytes that were asked for: what the allocator hands out may be larger, by what its blocks happen to be.
    """
    config = ModelConfig(vocab_size=512, dim=1024, layers=8, heads=8, residual="deepseek_v4", dtype="bfloat16")
    tokens = torch.randint(0, 512, (2, 1024), device="cuda")

    def held(recompute: bool | int) -> int:
        model = LanguageModel(config, recompute=recompute, loss="fused", device="cuda")
        model(tokens, tokens).backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        loss = model(tokens, tokens)
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()["requested_bytes.all.current"]
        loss.backward()
        return after - before

    kept, rebuilt = held(False), held(4)
    sublayers, groups, per_token = 16, 4, 2 * tokens.numel() * config.dim
    saved = (sublayers - groups) * 5 * per_token  # four streams, and what is read from them
    assert 0.97 * saved < kept - rebuilt < 1.01 * saved
