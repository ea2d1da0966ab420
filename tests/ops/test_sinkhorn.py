"""Sinkhorn: exact and finite for any finite logits, forward and backward, under every rule of normalisation."""

from __future__ import annotations

import itertools

import numpy as np
import plain
import pytest
import torch
from torch import Tensor

import mhckit
from mhckit import Recipe
from mhckit.ops.sinkhorn import sinkhorn_backward, sinkhorn_reference

RULES = {
    f"{init}-{mode}-{order}": Recipe(
        streams=3, init=init, eps_mode=mode, order=order, eps=0.0 if mode == "none" else 1e-4, iterations=5
    )
    for init, modes, orders in (
        ("exp", ("none", "add", "clamp", "guard"), ("cols", "rows")),
        ("exp_minus_max", ("clamp", "guard"), ("rows",)),
        ("softmax", ("add",), ("rows",)),
        ("abs", ("add",), ("cols", "rows")),
    )
    for mode, order in itertools.product(modes, orders)
}
each_rule = pytest.mark.parametrize("recipe", RULES.values(), ids=RULES.keys())
each_preset = pytest.mark.parametrize(
    "recipe",
    [Recipe.preset(n) for n in Recipe.presets() if Recipe.preset(n).residual == "sinkhorn"],
    ids=[n for n in Recipe.presets() if Recipe.preset(n).residual == "sinkhorn"],
)


def _logits(recipe: Recipe, std: float, count: int = 16, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(int(std))
    shape = (count, recipe.streams, recipe.streams)
    return std * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("std", [1.0, 10.0, 100.0, 1e4])
@each_rule
def test_equals_the_textbook_iteration(recipe: Recipe, std: float) -> None:
    logits = _logits(recipe, std)
    got = mhckit.sinkhorn(logits, recipe=recipe)
    assert got is not None
    want = np.stack([plain.residual(one, recipe) for one in logits.numpy()])
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-8, atol=1e-13)


@pytest.mark.parametrize("std", [1.0, 10.0, 1e4])
@each_preset
def test_backward_equals_autograd_of_forward(recipe: Recipe, std: float) -> None:
    """The hand-written backward against torch's own derivative of the same forward, where that is finite."""
    logits = _logits(recipe, std).requires_grad_()
    h = sinkhorn_reference(logits, recipe)
    dh = torch.randn(h.shape, generator=torch.Generator().manual_seed(3), dtype=h.dtype)
    (want,) = torch.autograd.grad(h, logits, dh)
    got = sinkhorn_backward(dh, logits.detach(), recipe)
    assert got.isfinite().all()
    comparable = want.isfinite().flatten(1).all(1)
    assert std > 10 or comparable.all()
    torch.testing.assert_close(got[comparable], want[comparable], rtol=1e-9, atol=1e-11)


@each_rule
def test_backward_where_eps_takes_over(recipe: Recipe) -> None:
    """With a large eps many sums fall below it: clamped and guarded lines have another derivative than divided ones."""
    if recipe.eps_mode != "none":
        recipe = recipe.replace(eps=0.4)
    logits = _logits(recipe, 3, count=12).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: mhckit.sinkhorn(t, recipe=recipe), logits)


@pytest.mark.parametrize("std", [1e2, 1e3, 1e4])
@each_preset
def test_finite_in_float32(recipe: Recipe, std: float) -> None:
    """Large logits of every sign, constant matrices, and one huge entry, in float32 both ways."""
    n = recipe.streams
    special = torch.stack(
        [
            torch.full((n, n), std),
            torch.full((n, n), -std),
            std * torch.eye(n),
            -std * torch.eye(n),
            std * torch.ones(n, n).triu(),
            std * torch.ones(n, n).tril(-1),
            torch.tensor([[std] * n] + [[-std] * n] * (n - 1)),
            torch.tensor([[-std] + [std] * (n - 1)] * n),
        ]
    )
    logits = torch.cat([special, _logits(recipe, std, dtype=torch.float32)]).requires_grad_()
    h = mhckit.sinkhorn(logits, recipe=recipe)
    assert h is not None
    h.backward(torch.randn(h.shape, generator=torch.Generator().manual_seed(1)))
    assert logits.grad is not None
    assert h.isfinite().all()
    assert logits.grad.isfinite().all()
    assert (h >= 0).all()
    exact = sinkhorn_reference(logits.detach().double(), recipe)
    # A logit of size s is known to s * eps in float32, and log space carries that into the result.
    assert (h.double() - exact).abs().max() <= 8 * std * torch.finfo(torch.float32).eps


@each_preset
def test_doubly_stochastic(recipe: Recipe) -> None:
    """Whatever is normalised last is exact; 20 iterations bring the other side close for moderate logits."""
    h = mhckit.sinkhorn(_logits(recipe, 0.5, count=256), recipe=recipe)
    assert h is not None
    for axis in (-1, -2):
        assert (h.sum(axis) - 1).abs().max() < 2e-5


def test_orientation() -> None:
    """Stored [in, out] comes out transposed: rows of H are outputs whatever the recipe stores."""
    logits = _logits(Recipe(), 2)
    stored_out_in = mhckit.sinkhorn(logits, recipe=Recipe(stored="out_in"))
    stored_in_out = mhckit.sinkhorn(logits, recipe=Recipe(stored="in_out"))
    assert stored_out_in is not None
    assert stored_in_out is not None
    torch.testing.assert_close(stored_in_out, stored_out_in.mT, rtol=0, atol=0)
    assert (stored_out_in - stored_out_in.mT).abs().max() > 0.1


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 5])
def test_permutation_is_exactly_doubly_stochastic(streams: int) -> None:
    recipe = Recipe.preset("mhc_lite", streams=streams)
    logits = 30 * torch.randn(64, recipe.residual_logits, dtype=torch.float64)
    h = mhckit.sinkhorn(logits, recipe=recipe)
    assert h is not None
    ones = torch.ones(64, streams, dtype=torch.float64)
    torch.testing.assert_close(h.sum(-1), ones, rtol=0, atol=1e-14)
    torch.testing.assert_close(h.sum(-2), ones, rtol=0, atol=1e-14)


def test_identity_has_no_matrix() -> None:
    recipe = Recipe.preset("hy_v4")
    assert mhckit.sinkhorn(None, recipe=recipe) is None
    with pytest.raises(ValueError, match="logits must be None"):
        mhckit.sinkhorn(torch.zeros(4, 4), recipe=recipe)
