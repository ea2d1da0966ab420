"""Health's numbers against the same written with loops over tokens and sublayers, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from stream_network import DEPTH, DIM, Network, batch, mixes_and_last_streams
from torch import Tensor

from mhckit import MHC, Mix, Recipe
from mhckit.health import Health, mean_mixing_matrices
from mhckit.health._coefficients import measure
from mhckit.health._tokens import chosen, largest_prime

RECIPES = ["paper", "deepseek_v4", "deepseek_v41", "hc", "hy_v4", "mhc_lite"]


def _matrices(mixes: list[Mix]) -> list[list[Tensor]]:
    """H of every sublayer and token."""
    streams = mixes[0].pre.shape[-1]
    eye = torch.eye(streams, dtype=torch.float64)
    return [
        [eye] * mix.pre[..., 0].numel() if mix.res is None else list(mix.res.double().reshape(-1, streams, streams))
        for mix in mixes
    ]


def _naive(mixes: list[Mix], x: Tensor) -> dict[str, float]:
    h = _matrices(mixes)
    layers, tokens, streams = len(h), len(h[0]), h[0][0].shape[0]
    uniform = torch.full((streams, streams), 1 / streams, dtype=torch.float64)
    eye = torch.eye(streams, dtype=torch.float64)

    def product(first: int, last: int, token: int) -> Tensor:
        result = eye
        for layer in range(first, last + 1):
            result = h[layer][token] @ result
        return result

    everywhere = [(layer, token) for layer in range(layers) for token in range(tokens)]
    whole = [product(0, layers - 1, token) for token in range(tokens)]
    far = math.sqrt(streams - 1) / 2
    expected = {
        "composite_gain_forward": max(p.abs().sum(1).max() for p in whole),
        "composite_gain_backward": max(p.abs().sum(0).max() for p in whole),
        "prefix_gain_forward": max(product(0, layer, token).abs().sum(1).max() for layer, token in everywhere),
        "suffix_gain_backward": max(product(layer, layers - 1, t).abs().sum(0).max() for layer, t in everywhere),
        "row_error_max": max((h[layer][token].sum(1) - 1).abs().max() for layer, token in everywhere),
        "column_error_max": max((h[layer][token].sum(0) - 1).abs().max() for layer, token in everywhere),
        "identity_distance": sum((h[layer][token] - eye).norm() for layer, token in everywhere) / len(everywhere),
        "uniform_distance": sum((h[layer][token] - uniform).norm() for layer, token in everywhere) / len(everywhere),
        "composite_uniform_distance": sum((p - uniform).norm() for p in whole) / tokens,
        "mixing_depth": sum((product(0, layer, t) - uniform).norm() > far for layer, t in everywhere) / tokens,
        "nonfinite_coefficients": 0,
    }
    for name in ("pre", "post"):
        values = torch.stack([getattr(mix, name).double() for mix in mixes])
        expected |= {f"{name}_min": values.min(), f"{name}_mean": values.mean(), f"{name}_max": values.max()}
    cosines = [
        torch.nn.functional.cosine_similarity(token[i], token[j], dim=0)
        for token in x.double().reshape(-1, *x.shape[-2:])
        for i in range(streams)
        for j in range(i)
    ]
    expected["stream_cosine"] = sum(cosines) / len(cosines)
    return {f"health/{name}": float(value) for name, value in expected.items()}


def _sampled(network: torch.nn.Module, h: Tensor, **options: int) -> Health:
    health = Health(network, **options)
    with health.sample():
        network(h)
    return health


def _floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    assert all(value.shape == () and value.dtype == torch.float32 for value in metrics.values())
    return {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@torch.no_grad()
def test_metrics_are_those_of_loops(recipe: str, dtype: torch.dtype) -> None:
    network, h = Network(recipe).to(dtype), batch(dtype=dtype)
    metrics = _floats(_sampled(network, h).metrics())
    scales = torch.stack([block.connection.scale for block in network.blocks]).mean(0)
    names = ("scale_pre", "scale_post", "scale_res")
    expected = _naive(*mixes_and_last_streams(network, h))
    expected |= {f"health/{name}": value.item() for name, value in zip(names, scales, strict=False)}
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, rel=1e-4, abs=2e-6)


def test_gradients() -> None:
    network = Network("deepseek_v4")
    health = Health(network)
    with health.sample():
        loss = network(batch()).square().sum()
    assert not any("grad" in name for name in health.metrics())
    loss.backward()
    metrics = _floats(health.metrics())
    for kind in ("phi", "scale", "bias"):
        gradients = [getattr(block.connection, kind).grad.double() for block in network.blocks]
        norms = [gradient.norm().item() for gradient in gradients]
        assert health.per_sublayer()[f"{kind}_grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)
        assert metrics[f"health/{kind}_grad_norm"] == pytest.approx(math.hypot(*norms), rel=1e-5)
    assert metrics["health/nonfinite_gradients"] == 0


def test_a_sublayer_without_gradients_has_norm_0() -> None:
    network = Network()
    network.blocks[1].connection.requires_grad_(False)
    health = Health(network)
    with health.sample():
        network(batch()).sum().backward()
    norms = health.per_sublayer()["bias_grad_norm"]
    assert [norm == 0 for norm in norms.tolist()] == [False, True, False, False, False]


@torch.no_grad()
def test_unconstrained_mixing_grows_and_constrained_does_not() -> None:
    """Deep networks with the same large noise on their parameters."""
    gains = {}
    for recipe in ("hc", "paper", "mhc_lite"):
        torch.manual_seed(0)
        metrics = _sampled(Network(recipe, depth=24), batch()).metrics()
        gains[recipe] = [metrics[f"health/composite_gain_{way}"].item() for way in ("forward", "backward")]
    assert min(gains["hc"]) > 100
    assert max(gains["mhc_lite"]) == pytest.approx(1, abs=1e-4)
    # Rows are normalised last, so a signal does not grow; columns are nearly 1, and their errors add up.
    assert gains["paper"][0] == pytest.approx(1, abs=1e-4)
    assert 1 <= gains["paper"][1] < 3


@torch.no_grad()
def test_per_sublayer() -> None:
    network, h = Network("hc"), batch(dtype=torch.float64)
    network.double()
    health = _sampled(network, h)
    assert health.names == [f"blocks.{index}.connection" for index in range(DEPTH)]
    numbers = health.per_sublayer()
    assert all(values.shape == (DEPTH,) and values.dtype == torch.float32 for values in numbers.values())
    mixes, x = mixes_and_last_streams(network, h)
    for layer, mix in enumerate(mixes):
        alone = _naive([mix], x)
        for name in (
            "row_error_max",
            "column_error_max",
            "identity_distance",
            "uniform_distance",
            "pre_min",
            "post_max",
        ):
            assert numbers[name][layer].item() == pytest.approx(alone[f"health/{name}"], rel=1e-5), (name, layer)
        until, since = _naive(mixes[: layer + 1], x), _naive(mixes[layer:], x)
        for name, expected in (
            ("prefix_gain_forward", until["health/composite_gain_forward"]),
            ("suffix_gain_backward", since["health/composite_gain_backward"]),
        ):
            assert numbers[name][layer].item() == pytest.approx(expected, rel=1e-5), (name, layer)
    assert torch.equal(numbers["scale_res"], torch.stack([b.connection.scale[2] for b in network.blocks]).float())


@torch.no_grad()
def test_static_recipes_have_no_scale() -> None:
    health = _sampled(Network(Recipe.preset("mhc_cu", dynamic=False)), batch())
    assert not any("scale" in name for name in health.metrics())
    assert health.metrics()["health/row_error_max"] > 0


@torch.no_grad()
def test_one_stream() -> None:
    metrics = _floats(_sampled(Network(Recipe(streams=1)), batch()).metrics())
    assert metrics["health/stream_cosine"] == 1
    assert metrics["health/composite_gain_forward"] == pytest.approx(1)
    assert metrics["health/uniform_distance"] == pytest.approx(0, abs=1e-6)


@torch.no_grad()
def test_sublayers_that_write_at_once() -> None:
    layers = torch.nn.Sequential(*(MHC(torch.nn.Linear(DIM, DIM), DIM, layer_index=index) for index in range(3)))
    health = _sampled(layers, torch.randn(5, 4, DIM))
    assert health.names == ["0.connection", "1.connection", "2.connection"]


def test_nonfinite_values_are_counted_over_all_tokens() -> None:
    """A token that is not sampled has infinite streams; its coefficients are not finite, nor are gradients."""
    network, h = Network(), batch(1, 50)
    mixes, _ = mixes_and_last_streams(network, h)
    h[0, 1] = math.inf
    health = Health(network, tokens=2)
    with health.sample():
        loss = network(h).sum()
    loss.backward()
    metrics = _floats(health.metrics())
    mixes, _ = mixes_and_last_streams(network, h)
    wrong = sum((~part.isfinite()).sum().item() for mix in mixes for part in mix)
    gradients = [getattr(b.connection, kind).grad for b in network.blocks for kind in ("phi", "scale", "bias")]
    assert metrics["health/nonfinite_coefficients"] == wrong > 0
    assert metrics["health/nonfinite_gradients"] == sum((~g.isfinite()).sum().item() for g in gradients) > 0
    assert math.isfinite(metrics["health/composite_gain_forward"])


@torch.no_grad()
def test_only_so_many_tokens_are_looked_at() -> None:
    network, h = Network("hc"), batch(1, 20)
    some = chosen(20, 5, h.device)
    assert some.tolist() == [0, 4, 8, 12, 16]
    full, sampled = (_floats(_sampled(network, h, tokens=tokens).metrics()) for tokens in (20, 5))
    alone = _floats(_sampled(network, h[:, some]).metrics())
    assert sampled == pytest.approx(alone, rel=1e-5)
    assert full["health/composite_gain_forward"] > sampled["health/composite_gain_forward"]


@pytest.mark.parametrize("sequences", [1, 8, 64, 256, 300])
def test_tokens_are_met_at_every_position(sequences: int) -> None:
    """Also where there is a sequence for each of them, and every stride that divides would meet the same position."""
    length = 1024
    positions = (chosen(sequences * length, 256, torch.device("cpu")) % length).sort().values
    assert len(positions) == largest_prime(256) == 251
    assert positions.diff().max() <= 5 and positions[0] <= 5 and positions[-1] >= length - 6


def test_primes() -> None:
    assert [largest_prime(n) for n in (1, 2, 3, 4, 9, 10, 100)] == [1, 2, 3, 3, 7, 7, 97]


@torch.no_grad()
def test_stacks_of_different_tokens_are_chains_of_their_own() -> None:
    """An encoder and a decoder: no product across, and the worse of the two counts."""

    def mixes(tokens: int, factor: float) -> list[Mix]:
        res = factor * torch.eye(2).expand(tokens, 2, 2)
        return [Mix(torch.ones(tokens, 2), torch.ones(tokens, 2), res)] * 3

    numbers, whole = measure([*mixes(4, 3.0), *mixes(7, 2.0)], torch.randn(7, 2, DIM), 256)
    assert numbers["prefix_gain_forward"].tolist() == [3, 9, 27, 2, 4, 8]
    assert numbers["suffix_gain_backward"].tolist() == [27, 9, 3, 8, 4, 2]
    assert whole["composite_gain_forward"] == 27 and whole["mixing_depth"] == 3


@pytest.mark.parametrize("recipe", ["deepseek_v4", "hc", "hy_v4"])
def test_mean_mixing_matrices(recipe: str) -> None:
    network, h = Network(recipe), batch()
    network.blocks[1].eval()
    mixes, _ = mixes_and_last_streams(network, h)
    expected = torch.stack([torch.stack(of_tokens).mean(0) for of_tokens in _matrices(mixes)])
    matrices = mean_mixing_matrices(network, h)
    assert matrices.shape == (DEPTH, 4, 4) and not matrices.requires_grad
    torch.testing.assert_close(matrices.double(), expected, rtol=1e-5, atol=1e-6)
    assert network.training and network.blocks[0].sublayer.training and not network.blocks[1].sublayer.training
