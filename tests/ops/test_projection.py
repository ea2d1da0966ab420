"""The residual map "projection": doubly stochastic to rounding for any finite logits, and the limit of Sinkhorn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mhckit
from mhckit import Recipe
from mhckit.ops import _projection
from mhckit.ops.sinkhorn import sinkhorn_backward, sinkhorn_reference

SUMS = 1e-6  # how far a sum of a row or column may be from 1 in float32
STREAMS = range(1, 9)
STDS = [0.1, 1.0, 3.0, 10.0, 30.0]
each_width = pytest.mark.parametrize("streams", STREAMS)


def _recipe(streams: int, **fields) -> Recipe:
    return Recipe(residual="projection", streams=streams, **fields)


def _random(streams: int, std: float, count: int = 256, seed: int = 0) -> Tensor:
    """Values that float32 has, in float64."""
    generator = torch.Generator().manual_seed(100 * seed + streams)
    return (std * torch.randn(count, streams, streams, generator=generator)).double()


def _special(n: int) -> dict[str, Tensor]:
    """Where the systems are singular, exp overflows, or the solution is far from where the steps begin."""
    generator = torch.Generator().manual_seed(n)
    permutation = torch.eye(n)[torch.randperm(n, generator=generator)]
    noise = torch.randn(16, n, n, generator=generator)
    upper = torch.ones(n, n).triu()
    signs = torch.randint(0, 2, (16, n, n), generator=generator) * 2.0 - 1
    matrices = {
        "constant": torch.full((n, n), 7.25),
        "permutation": 160 * permutation - 80,
        "nearly a permutation": 160 * permutation - 80 + 3 * noise,
        "two permutations": 80 * torch.maximum(permutation, permutation.roll(1, 0)) + noise,
        "triangular": 160 * upper - 80,
        "nearly triangular": permutation @ (80 * upper) + noise,
        "ties": 10 * torch.randint(-3, 4, (16, n, n), generator=generator).float(),
        "signs": 80 * signs,
        "row offsets": 10 * noise + 1e5 * torch.randn(16, n, 1, generator=generator),
        "column offsets": 10 * noise + 1e4 * torch.randn(16, 1, n, generator=generator),
        "one huge": torch.zeros(n, n).index_put((torch.tensor(0), torch.tensor(n - 1)), torch.tensor(1e5)),
        "very negative": torch.where(permutation + signs.relu() > 0, noise, torch.tensor(-1e9)),
    }
    return {name: matrix if matrix.ndim == 3 else matrix[None] for name, matrix in matrices.items()}


def _beyond_reach(n: int) -> Tensor:
    """Where all that is promised is a doubly stochastic matrix."""
    noise = torch.randn(48, n, n, generator=torch.Generator().manual_seed(n))
    sizes = torch.tensor([1e3, 1e4, 1e7, 1e20, 1e37, torch.finfo(torch.float32).max]).repeat_interleave(8)
    return (noise.sign() * noise.abs().clamp(max=1)) * sizes[:, None, None]


def _sum_errors(h: Tensor) -> Tensor:
    return torch.stack([(h.sum(-1) - 1).abs().max(), (h.sum(-2) - 1).abs().max()])


def _both_ways(logits: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """H, the gradient of the logits, and the gradient of H it is from."""
    logits = logits.clone().requires_grad_()
    h = mhckit.sinkhorn(logits, recipe=recipe)
    assert h is not None
    dh = torch.randn(h.shape, generator=torch.Generator().manual_seed(1)).to(h)
    h.backward(dh)
    assert logits.grad is not None
    return h.detach(), logits.grad, dh


@pytest.mark.parametrize("std", STDS)
@each_width
def test_float32_is_doubly_stochastic_and_as_exact_as_float64(streams: int, std: float) -> None:
    exact_logits, recipe = _random(streams, std), _recipe(streams)
    h, dlogits, dh = _both_ways(exact_logits.float(), recipe)
    exact, exact_dlogits, _ = _both_ways(exact_logits, recipe)
    assert (_sum_errors(h) < SUMS).all() and (_sum_errors(exact) < 1e-8).all()
    assert (h >= 0).all() and h.dtype == torch.float32
    assert (h - exact).abs().max() < 1e-6
    assert (dlogits - exact_dlogits).abs().max() < 1e-6 * dh.abs().max()


@each_width
def test_matrices_that_are_hard(streams: int) -> None:
    for name, logits in _special(streams).items():
        h, dlogits, dh = _both_ways(logits, _recipe(streams))
        exact, exact_dlogits, _ = _both_ways(logits.double(), _recipe(streams))
        assert (_sum_errors(h) < SUMS).all() and (h >= 0).all(), name
        assert (h - exact).abs().max() < 1e-6, name
        assert (dlogits - exact_dlogits).abs().max() < 1e-6 * dh.abs().max(), name


@pytest.mark.parametrize("streams", [3, 4])
def test_large_logits_of_soft_matrices(streams: int) -> None:
    """Potentials are large there, and their rounding would show."""
    logits, recipe = _random(streams, 60.0, count=8192), _recipe(streams)
    softest = sinkhorn_reference(logits, recipe).amax((1, 2)).topk(64, largest=False).indices
    exact = sinkhorn_reference(logits[softest], recipe)
    assert exact.max() < 0.9
    assert (sinkhorn_reference(logits[softest].float(), recipe) - exact).abs().max() < 2e-7


@each_width
def test_offsets_of_rows_and_columns_change_nothing(streams: int) -> None:
    """They are what the potentials absorb, however large."""
    logits, recipe = _random(streams, 3.0, count=64).double(), _recipe(streams)
    generator = torch.Generator().manual_seed(streams)
    rows, columns = (1e4 * torch.randn(64, streams, generator=generator).double() for _ in range(2))
    want = sinkhorn_reference(logits, recipe)
    got = sinkhorn_reference(logits + rows[:, :, None] + columns[:, None, :], recipe)
    assert (got - want).abs().max() < 1e-9


def test_many_steps_away() -> None:
    """With fewer steps, off by 2e-6."""
    logits = torch.tensor(
        [
            [-358.8146, 647.1005, 192.7735, 559.9070, 372.5426],
            [37.6976, -76.0009, -529.1767, -565.7838, -27.2950],
            [-675.0172, -74.6929, -337.4859, 349.3526, 255.3945],
            [80.3726, -489.0396, -152.8963, -617.1966, 264.5261],
            [-311.8216, -384.6711, 300.0702, 89.0647, 418.0855],
        ]
    )
    assert (_sum_errors(sinkhorn_reference(logits[None], _recipe(5))) < SUMS).all()
    assert (_sum_errors(sinkhorn_reference(logits[None].double(), _recipe(5))) < 1e-7).all()


def test_what_rounding_adds_to_all_rows_is_shared() -> None:
    """The last column would have it all, 7e-7."""
    index = torch.arange(8.0)
    logits = 600 / 8 * index[:, None] * index + torch.randn(64, 8, 8, generator=torch.Generator().manual_seed(8))
    assert (_sum_errors(sinkhorn_reference(logits, _recipe(8))) < 5e-7).all()


@each_width
def test_any_finite_logits(streams: int) -> None:
    h, dlogits, dh = _both_ways(_beyond_reach(streams), _recipe(streams))
    assert (_sum_errors(h) < SUMS).all() and (h >= 0).all()
    assert dlogits.isfinite().all() and dlogits.abs().max() < 10 * dh.abs().max()


@pytest.mark.parametrize("std", [0.5, 2.0])
@each_width
def test_is_the_limit_of_sinkhorn(streams: int, std: float) -> None:
    logits = _random(streams, std, count=32)
    want = sinkhorn_reference(logits, Recipe(streams=streams, iterations=5000))
    assert (_sum_errors(want) < 1e-12).all()  # it has arrived
    torch.testing.assert_close(sinkhorn_reference(logits, _recipe(streams)), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("std", STDS)
@each_width
def test_only_scales_rows_and_columns_of_exp(streams: int, std: float) -> None:
    """With sums of 1 that makes it the limit: there is only one such matrix. Here nothing needs to arrive."""
    logits = _random(streams, std)
    scaled = sinkhorn_reference(logits, _recipe(streams)).log() - logits
    assert scaled.isfinite().all()
    crossed = scaled - scaled[:, :1] - scaled[:, :, :1] + scaled[:, :1, :1]
    assert crossed.abs().max() < 1e-11


def test_two_streams_have_a_closed_form() -> None:
    """H = [[p, 1 - p], [1 - p, p]], for logits of any size, and so is its gradient."""
    logits = torch.cat([_random(2, std) for std in (1.0, 30.0, 300.0)])
    h, dlogits, dh = _both_ways(logits, _recipe(2))
    cross = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    p = torch.sigmoid((logits * cross).sum((1, 2)) / 2)[:, None, None]
    torch.testing.assert_close(h, torch.where(cross > 0, p, 1 - p), rtol=0, atol=1e-12)
    want = p * (1 - p) * (dh * cross).sum((1, 2), keepdim=True) * cross / 2
    torch.testing.assert_close(dlogits, want, rtol=0, atol=1e-12)


def test_one_stream_is_exactly_one() -> None:
    for dtype in (torch.float32, torch.float64):
        h, dlogits, _ = _both_ways(torch.tensor([0.0, -3e38, 1.7, 88.0], dtype=dtype).view(4, 1, 1), _recipe(1))
        assert (h == 1).all() and (dlogits == 0).all()


@pytest.mark.parametrize("std", [1.0, 8.0])
@each_width
def test_gradcheck(streams: int, std: float) -> None:
    """Also where half of the matrices are nearly permutations."""
    logits = _random(streams, std, count=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: mhckit.sinkhorn(t, recipe=_recipe(streams)), logits, fast_mode=True)


@pytest.mark.parametrize("std", [1.0, 3.0])
@each_width
def test_gradient_solves_the_system_of_both_potentials(streams: int, std: float) -> None:
    """dL = R (G - alpha - beta) with [[1, R], [R^T, 1]] (alpha, beta) = sums of R G, solved as it stands."""
    logits, recipe = _random(streams, std, count=64), _recipe(streams)
    r = sinkhorn_reference(logits, recipe)
    g = torch.randn(r.shape, generator=torch.Generator().manual_seed(2), dtype=r.dtype)
    one = torch.eye(streams, dtype=r.dtype).expand_as(r)
    system = torch.cat([torch.cat([one, r], -1), torch.cat([r.mT, one], -1)], -2)
    sums = torch.cat([(r * g).sum(-1), (r * g).sum(-2)], -1)
    alpha, beta = (torch.linalg.pinv(system, hermitian=True) @ sums[..., None])[..., 0].split(streams, -1)
    want = r * (g - alpha[:, :, None] - beta[:, None])
    torch.testing.assert_close(sinkhorn_backward(g, logits, recipe), want, rtol=0, atol=1e-11)


def test_a_token_does_not_see_the_others() -> None:
    """Alone, beside hard matrices, or beside NaN. To rounding: vectors of another length may be summed otherwise."""
    logits, recipe = torch.cat([_random(4, std, count=19) for std in STDS]), _recipe(4)
    together, dtogether, dh = _both_ways(logits, recipe)
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(3))
    poisoned = logits.clone()
    poisoned[order[0]] = torch.nan
    for beside, some in ((logits, order), (logits, order[:17]), (logits, order[:1]), (poisoned, order)):
        h = sinkhorn_reference(beside[some], recipe)
        dlogits = sinkhorn_backward(dh[some], beside[some], recipe)
        for got, want in ((h, together[some]), (dlogits, dtogether[some])):
            kept = slice(1, None) if beside is poisoned else slice(None)
            assert got.isnan().any() == (beside is poisoned)
            torch.testing.assert_close(got[kept], want[kept], rtol=0, atol=1e-12)


def test_ignores_what_belongs_to_sinkhorn() -> None:
    logits = _random(4, 2.0)
    want = sinkhorn_reference(logits, _recipe(4))
    for preset in ("deepseek_v4", "megatron", "mhc_triton"):
        recipe = Recipe.preset(preset, residual="projection", stored="out_in", iterations=1)
        assert torch.equal(sinkhorn_reference(logits, recipe), want), preset


def test_orientation() -> None:
    logits = _random(3, 2.0)
    h = {stored: mhckit.sinkhorn(logits, recipe=_recipe(3, stored=stored)) for stored in ("out_in", "in_out")}
    assert h["out_in"] is not None and h["in_out"] is not None
    assert torch.equal(h["out_in"], h["in_out"].mT)
    assert (h["out_in"] - h["in_out"]).abs().max() > 0.1


@pytest.mark.parametrize("steps", ["FOLLOW_STEPS", "POLISH_STEPS"])
def test_every_kind_of_step_is_needed(steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer of them, and the sums above would be off."""
    monkeypatch.setattr(_projection, steps, {"FOLLOW_STEPS": 0, "POLISH_STEPS": 1}[steps])
    h = sinkhorn_reference(_random(4, 30.0, count=4096).float(), _recipe(4))
    assert _sum_errors(h).max() > SUMS
