"""At step 0 the mean stream is the plain pre-norm network, and every parameter that can learn does."""

from __future__ import annotations

import itertools

import pytest
import torch
from networks import make
from recipes import every_preset_and_width

import mhckit
from mhckit import HyperConnection, Recipe, Streams
from mhckit.testing import relative_error

WIDE = [(preset, n) for preset, n in every_preset_and_width() if n in (1, 2, 3, 4, 8)]
each_preset_and_width = pytest.mark.parametrize(("preset", "streams"), WIDE, ids=[f"{p}-{n}" for p, n in WIDE])


@each_preset_and_width
def test_equals_the_plain_network_up_to_scale(preset: str, streams: int) -> None:
    plain, connected, h = make(Recipe.preset(preset, streams=streams), depth=6)
    want = plain(h)
    # one stream cannot read with exactly 1: sigmoid(8) = 0.9997
    assert relative_error(connected(h), want) < 0.01
    with torch.no_grad():
        for module in (*connected.connections, connected.head):
            scale = getattr(module, "scale", None)
            if scale is not None:
                scale.zero_()
    assert relative_error(connected(h), want) < (2e-5 if streams > 1 else 1e-3)


@each_preset_and_width
def test_residual_matrix_is_doubly_stochastic_and_near_the_identity(preset: str, streams: int) -> None:
    """Exactly for static recipes; dynamic ones move with the token, most where logits are not exponentiated."""
    recipe = Recipe.preset(preset, streams=streams)
    if recipe.residual == "identity":
        assert HyperConnection(8, recipe).bias.shape == (2 * streams,)
        return
    for dynamic in (True, False):
        connection = HyperConnection(8, recipe.replace(dynamic=dynamic))
        _, out = connection(Streams(torch.randn(64, streams, 8)))
        assert out.mix is not None
        res = out.mix.res
        assert res is not None
        bound = 1e-5 if not dynamic else 0.02 if preset in ("hc", "mhc_triton") else 1e-3
        assert (res.sum(-1) - 1).abs().max() < bound
        assert (res.sum(-2) - 1).abs().max() < bound
        assert (res.diagonal(dim1=-2, dim2=-1) > 0.9).all()


@pytest.mark.parametrize("preset", ["paper", "deepseek_v4", "mhc_triton"])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_a_projection_starts_near_the_identity_whatever_it_ignores(preset: str, streams: int) -> None:
    recipe = Recipe.preset(preset, streams=streams, residual="projection", dynamic=False)
    _, out = HyperConnection(8, recipe)(Streams(torch.randn(3, streams, 8)))
    assert out.mix is not None and out.mix.res is not None
    off_diagonal = 0.05 / max(streams - 1, 1)
    want = torch.full((streams, streams), off_diagonal).fill_diagonal_(0.95 if streams > 1 else 1.0)
    torch.testing.assert_close(out.mix.res, want.expand(3, -1, -1), rtol=0, atol=1e-6)


@each_preset_and_width
def test_coefficients_at_step_0(preset: str, streams: int) -> None:
    recipe = Recipe.preset(preset, streams=streams, dynamic=False, post_scale=2.0)
    for layer_index in (0, 1, 5):
        _, out = HyperConnection(8, recipe, layer_index=layer_index)(Streams(torch.randn(1, streams, 8)))
        assert out.mix is not None
        pre, post = out.mix.pre[0], out.mix.post[0]
        assert abs(post.mean() - 1) < 1e-5
        if preset == "hc":
            assert pre.argmax() == layer_index % streams
            continue
        assert (pre - 1 / streams).abs().max() < (1e-5 if streams > 1 else 4e-4)
        assert len(post.unique()) == streams


def test_spread_of_post_rotates_with_the_layer() -> None:
    biases = [HyperConnection(8, "paper", layer_index=i).bias[4:8] for i in range(5)]
    for first, second in itertools.pairwise(biases):
        assert torch.equal(first.roll(-1), second)
    assert torch.equal(biases[0], biases[4])


def test_static_mhc_triton_cannot_reach_a_mean_of_one() -> None:
    """Its static form has post = sigmoid < 1; ours starts as near as still learns."""
    recipe = Recipe.preset("mhc_triton", dynamic=False)
    _, out = HyperConnection(8, recipe)(Streams(torch.randn(1, 4, 8)))
    assert out.mix is not None
    assert (out.mix.post > 0.85).all()
    assert (out.mix.post < 1).all()


@each_preset_and_width
def test_every_parameter_learns(preset: str, streams: int) -> None:
    """A gradient for every row of every parameter, except those that cannot have one at step 0.

    - The residual map of the first sublayer (its streams are equal), of the last one under a mean head, and of N = 1.
    - The read weights of a sublayer whose streams are all equal, the first one's and those of N = 1: they are a factor,
      which the sublayer's own norm removes. Under a shifted recipe the first sublayer's serve the second.

    In float64, where rounding noise (1e-16) cannot pass for a gradient (above 1e-12).
    """
    recipe = Recipe.preset(preset, streams=streams)
    _, connected, h = make(recipe)
    connected, h = connected.double(), h.double()
    (connected(h) * torch.randn_like(h)).sum().backward()
    last = len(connected.connections) - 1
    for index, connection in enumerate(connected.connections):
        learns = {
            "pre": streams > 1 and (index > 0 or recipe.shifted),
            "post": True,
            "res": streams > 1 and index > 0 and (index < last or recipe.head != "mean"),
        }
        rows = torch.arange(recipe.rows).split(recipe.groups)
        for group, name in enumerate(list(learns)[: len(rows)]):
            if learns[name]:
                assert (connection.phi.grad[rows[group]].abs().amax(-1) > 1e-12).all(), (index, name)
                assert (connection.bias.grad[rows[group]].abs() > 1e-12).all(), (index, name)
                assert connection.scale.grad[group].abs() > 1e-12, (index, name)
    for name, parameter in connected.head.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 1e-12, name


def test_upcycling_a_plain_checkpoint() -> None:
    """A plain network's weights under connections: the same function at step 0, and training goes on from there."""
    plain, connected, h = make(Recipe.preset("deepseek_v4"), dim=16)
    target = torch.randn_like(h)
    optimiser = torch.optim.AdamW(connected.parameters(), lr=3e-3)
    first = torch.nn.functional.mse_loss(plain(h), target).item()
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.mse_loss(connected(h), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert abs(losses[0] - first) < 1e-2 * first
    assert losses[-1] < 0.7 * losses[0]


def test_norm_weights_learn() -> None:
    connection = HyperConnection(8, "deepseek_v4", norm=True, projection_norm_weight=True)
    h, streams = connection(Streams(torch.randn(5, 4, 8)))
    (streams.write(h.sin()).tensor * torch.randn(5, 4, 8)).sum().backward()
    for weight in (connection.norm_weight, connection.out_norm_weight):
        assert (weight.grad.abs() > 0).all()


@pytest.mark.parametrize("streams", [16, 32])
def test_many_streams(streams: int) -> None:
    plain, connected, h = make(Recipe.preset("deepseek_v4", streams=streams))
    assert relative_error(connected(h), plain(h)) < 0.01


def test_streams_differ_after_the_first_write() -> None:
    """The spread of post breaks the symmetry of equal streams from the first write on."""
    connection = HyperConnection(8, "paper")
    h, streams = connection(Streams.expand(torch.randn(3, 8), 4))
    y = streams.write(h).tensor
    pairs = [(i, j) for i in range(4) for j in range(i)]
    assert min((y[:, i] - y[:, j]).abs().max() for i, j in pairs) > 1e-2
    assert mhckit.head(y, recipe=Recipe()).shape == (3, 8)
