"""The residual map "projection" in the kernels: sums, errors against float64, and what a token's neighbours change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from accuracy import assert_accurate, run
from torch import Tensor

import mhckit
from mhckit import Recipe
from mhckit.kernels._launch import residual_launch
from mhckit.ops import _projection
from mhckit.ops.sinkhorn import sinkhorn_reference
from mhckit.testing import Call, make_call

RECIPE = Recipe(residual="projection")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 16  # a program of 8 streams
BEYOND_REACH = 4  # so many of the matrices that are hard have no exact solution to compare with


def _call(streams: int, logits: Tensor | None = None, **fields) -> Call:
    recipe = RECIPE.replace(streams=streams, **fields)
    call = make_call("sinkhorn", recipe, lead=(TOKENS,), dtype=torch.float32, device=DEVICE, seed=streams)
    return call if logits is None else dataclasses.replace(call, tensors={"logits": logits.to(DEVICE)})


def _sum_errors(h: Tensor) -> Tensor:
    return torch.stack([(h.sum(-1) - 1).abs().amax(-1), (h.sum(-2) - 1).abs().amax(-1)])


def _hard(n: int) -> Tensor:
    """A matrix of each kind: constant, permutation, triangular, ties, offsets of rows and columns, beyond reach."""
    noise = torch.randn(TOKENS, n, n, generator=torch.Generator().manual_seed(n))
    permutation, upper = torch.eye(n).roll(1, 0), torch.ones(n, n).triu()
    matrices = [
        torch.full((n, n), -3.3), 160 * permutation - 80, 160 * permutation - 80 + 3 * noise[0], 160 * upper - 80,
        80 * upper.flip(0) + noise[1], 10 * noise[2].round(), 80 * noise[3].sign(), 10 * noise[4] + 1e4 * noise[5, :1],
        10 * noise[6] + 1e5 * noise[7, :, :1], 0.1 * noise[8], 30 * noise[9], 30 * noise[10],
    ]  # fmt: skip
    beyond = [1e4 * noise[11], 1e20 * noise[12], 3e38 * noise[13].sign(), -3e38 * upper]
    assert len(beyond) == BEYOND_REACH
    return torch.stack([*matrices, *beyond])


def _neediest(n: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Of many random matrices those whose sums would be off the most after a single step on the matrix."""
    logits = 300 * torch.randn(4096, n, n, generator=torch.Generator().manual_seed(n))
    with monkeypatch.context() as patch:
        patch.setattr(_projection, "POLISH_STEPS", 1)
        errors = _sum_errors(sinkhorn_reference(logits, RECIPE.replace(streams=n))).amax(0)
    assert n < 3 or errors.max() > 2e-6
    return logits[errors.topk(TOKENS).indices]


@pytest.mark.parametrize("streams", [1, 2, 3, 4, *([8] if DEVICE == "cuda" else [])])  # interpreted, 8 take a minute
def test_doubly_stochastic(streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hard matrices, and those that a step leaves off the most; one stream is exactly 1 and has no gradient."""
    call = _call(streams, torch.cat([_neediest(streams, monkeypatch), _hard(streams)]))
    results = run(call, "triton")
    exact = run(call.to(lambda tensor: tensor.double()), "reference")
    assert (_sum_errors(results["output 0"]) < 1e-6).all()
    assert (results["output 0"] >= 0).all() and results["dlogits"].isfinite().all()
    for name in ("output 0", "dlogits"):
        assert (results[name] - exact[name])[:-BEYOND_REACH].abs().max() < 2e-6, name
    if streams == 1:
        assert (results["output 0"] == 1).all() and not results["dlogits"].any()


@pytest.mark.parametrize("streams", [1, 2, 3, 5, 8])
def test_as_exact_as_torch(streams: int) -> None:
    assert_accurate(_call(streams, stored="in_out"), relative=1e-6)


@pytest.mark.parametrize("size", [0.0, 1.0, 10.0, 30.0])
def test_as_exact_as_torch_for_logits_of_any_size(size: float) -> None:
    assert_accurate(_call(4, size * _call(4).tensors["logits"]), relative=1e-5)


def test_a_token_has_the_same_bits_in_any_company() -> None:
    """Alone in a call, and in another place among matrices that are hard."""
    logits = 5 * _call(4).tensors["logits"]
    among = torch.cat([_hard(4).to(DEVICE)] * 2 + [logits[11:12]])
    assert len(among) > residual_launch(4).block_t  # the last one is in another program
    with mhckit.backend("triton"):
        together, alone, last = (mhckit.sinkhorn(some, recipe=RECIPE) for some in (logits, logits[11:12], among))
    assert together is not None and alone is not None and last is not None
    assert torch.equal(alone[0], together[11]) and torch.equal(last[-1], together[11])
