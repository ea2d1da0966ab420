"""Sizes of real models: accuracy there, and tensors past the reach of 32-bit offsets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accuracy import assert_accurate, poisoned_memory, run
from recipes import every_recipe

import mhckit
from mhckit import Recipe
from mhckit.kernels import _parameters_bwd
from mhckit.testing import Call, make_call

RECIPES = every_recipe()
DEEPSEEK = RECIPES["deepseek_v4"]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield


def _call(operator: str, recipe: Recipe = DEEPSEEK, **options) -> Call:
    return make_call(operator, recipe, device="cuda", **options)


SIZES = [
    ("junction", 513, 4096, torch.bfloat16),
    ("junction", 129, 7168, torch.bfloat16),
    ("junction", 257, 2560, torch.bfloat16),
    ("junction", 67, 5129, torch.bfloat16),
    ("junction", 33, 12288, torch.bfloat16),
    ("junction", 67, 5129, torch.float32),
    ("junction", 129, 4096, torch.float32),
    ("junction", 129, 4096, torch.float16),
    ("enter", 129, 4096, torch.bfloat16),
    ("enter", 129, 4096, torch.float32),
    ("head", 129, 4096, torch.bfloat16),
    ("leave", 67, 5129, torch.bfloat16),
    ("leave", 129, 4096, torch.float32),
]


@pytest.mark.parametrize(("operator", "tokens", "channels", "dtype"), SIZES)
def test_sizes_of_models(operator: str, tokens: int, channels: int, dtype: torch.dtype) -> None:
    call = _call(operator, lead=(tokens,), channels=channels, dtype=dtype)
    assert_accurate(call, relative=1e-5 if dtype == torch.float32 else None)


@pytest.mark.parametrize(
    "name", ["paper", "megatron", "hy_v4", "mhc_lite", "projection", "hc", "deepseek_v41", "mhc_triton-static"]
)
def test_recipes_at_size(name: str) -> None:
    assert_accurate(_call("junction", RECIPES[name], lead=(300,), channels=5128, dtype=torch.bfloat16))


@pytest.mark.parametrize(("streams", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (5, torch.bfloat16)])
def test_numbers_of_streams_at_size(streams: int, dtype: torch.dtype) -> None:
    call = _call("junction", DEEPSEEK.replace(streams=streams), lead=(300,), channels=5128, dtype=dtype)
    assert_accurate(call, relative=1e-5 if dtype == torch.float32 else None)


def test_many_tokens() -> None:
    """Several chunks in the sums over tokens."""
    assert_accurate(_call("junction", lead=(9001,), channels=2120, dtype=torch.bfloat16))


def test_long_sums_of_one_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores cut off what they add to a long sum: nothing else hides that here, and one chunk has all tokens."""
    monkeypatch.setattr(_parameters_bwd, "token_chunks", lambda *args, **options: 1)
    tokens, rows, streams, channels = 65536, 24, 4, 64
    torch.manual_seed(0)
    y = torch.randn(tokens, streams, channels, device="cuda").abs().bfloat16()
    dz = torch.randn(tokens, rows, device="cuda").abs()
    high = dz.bfloat16()
    row = torch.arange(rows, device="cuda")
    parts = torch.zeros(tokens, 64, dtype=torch.bfloat16, device="cuda")
    parts[:, row // 8 * 16 + row % 8] = high
    parts[:, row // 8 * 16 + 8 + row % 8] = (dz - high.float()).bfloat16()
    phi = torch.empty(rows, streams * channels, device="cuda")
    dphi = _parameters_bwd.chunk_sums(y, dz_parts=parts, phi=phi).dphi
    exact = dz.double().T @ y.double().flatten(1)
    assert dphi is not None
    error = float((dphi - exact).abs().max() / exact.max())
    assert error < 4e-6, error  # 1.5e-6 with sums of 512 tokens, 4e-4 with one; 6e-6 with 2048 (attempts.jsonl)


def test_more_elements_than_32_bits_count() -> None:
    """All tokens of more than 2^31 elements get the bits they get in a small batch."""
    tokens, channels, few = 2**31 // (4 * 2048) + 100, 2048, 64
    small = _call("junction", lead=(few,), channels=channels, dtype=torch.bfloat16)
    want = run(small, "triton")
    repeats = -(-tokens // few)
    per_token = ("x", "f", "mix_pre", "mix_post", "mix_res")
    big = {n: t.repeat(repeats, *[1] * (t.ndim - 1)) if n in per_token else t for n, t in small.tensors.items()}
    assert big["x"].numel() > 2**31
    leaves = {n: t.detach().requires_grad_(n in ("x", "f", "phi", "mix_res")) for n, t in big.items()}
    with mhckit.backend("triton"):
        outputs = Call("junction", small.recipe, leaves)()
    cotangents = {}
    generator = torch.Generator().manual_seed(11)
    for i, output in enumerate(outputs):
        shape = (few, *output.shape[1:])
        cotangent = torch.randn(shape, generator=generator).bfloat16().to(output)
        cotangents[i] = cotangent.repeat(repeats, *[1] * (output.ndim - 1))
        assert all(torch.equal(block, want[f"output {i}"]) for block in output.split(few)), i
    torch.autograd.backward(outputs, list(cotangents.values()))
    for name in ("x", "f", "mix_res"):
        gradient = leaves[name].grad
        assert gradient is not None
        assert all(torch.equal(block, want[f"d{name}"]) for block in gradient.split(few)), name
    assert leaves["phi"].grad is not None
    torch.testing.assert_close(leaves["phi"].grad / repeats, want["dphi"], rtol=1e-3, atol=1e-3)
