"""The language model: one network, whatever its residual connection; causal, initialised by name, upcyclable."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import mhckit
from mhckit import HyperConnection, Recipe
from mhckit.models import MODEL_PRESETS, LanguageModel, ModelConfig
from mhckit.models.loss import IGNORED, Loss, next_token_loss
from mhckit.models.sublayers import rotate, rotation

SMALL = ModelConfig(vocab_size=31, dim=24, layers=2, heads=4, kv_heads=2, hidden=40)
KINDS = ["plain", "hc", "mhc", "deepseek_v4", "deepseek_v41", "hy_v4"]


def _tokens(length: int = 9) -> Tensor:
    return torch.randint(0, SMALL.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("residual", KINDS)
def test_learns(residual: str) -> None:
    model, tokens = LanguageModel(SMALL.replace(residual=residual)), _tokens()
    optimizer = torch.optim.Adam(mhckit.param_groups(model), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - torch.tensor(float(SMALL.vocab_size)).log()) < 0.2
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("residual", KINDS)
def test_causal(residual: str) -> None:
    """A token changes what is predicted from its own position on, and nothing before."""
    model, tokens = LanguageModel(SMALL.replace(residual=residual)), _tokens()
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % SMALL.vocab_size
    difference = (model(tokens) - model(changed)).abs().amax((0, 2))
    assert (difference[:5] == 0).all() and (difference[5:] > 0).all()


def test_positions_matter() -> None:
    """In one layer: without positions its last output would depend on which tokens come before, not on their order."""
    model = LanguageModel(SMALL.replace(residual="plain", layers=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    forwards, backwards = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[3, 2, 1, 4]])
    assert (model(forwards)[0, -1] - model(backwards)[0, -1]).abs().max() > 1e-3


def test_rotated_products_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, SMALL.head_dim, dtype=torch.float64).expand(-1, -1, -1, 12, -1)
    angles = rotation(12, SMALL, q.device)
    products = (rotate(q, angles) @ rotate(k, angles).mT)[0, 0]
    torch.testing.assert_close(products[1:, 1:], products[:-1, :-1], rtol=1e-5, atol=1e-5)
    assert products[0].std() > 1e-2
    torch.testing.assert_close(rotate(q, angles).norm(dim=-1), q.norm(dim=-1), rtol=1e-5, atol=0)


def test_kinds_differ_in_the_connection_alone() -> None:
    plain, connected = (LanguageModel(SMALL.replace(residual=kind), seed=5) for kind in ("plain", "mhc"))
    own, other = plain.state_dict(), connected.state_dict()
    assert own.keys() < other.keys()
    assert all("connection" in key or "head" in key for key in other.keys() - own.keys())
    assert all(torch.equal(own[key], other[key]) for key in own)
    assert not torch.equal(own["output.weight"], LanguageModel(SMALL, seed=6).output_weight)


def test_starts_near_the_plain_model_and_exactly_there_when_upcycled() -> None:
    plain = LanguageModel(SMALL.replace(residual="plain"), seed=1)
    model = LanguageModel(SMALL, seed=2)
    tokens = _tokens()
    mhckit.upcycle(model, plain.state_dict())
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-4)
    fresh = LanguageModel(SMALL, seed=1)(tokens)
    assert relative_distance(fresh, plain(tokens)) < 0.05


def relative_distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_recomputed_to_the_same_bits() -> None:
    config = SMALL.replace(layers=4, dtype="bfloat16")
    tokens = _tokens()

    def gradients(recompute: bool | int) -> list[Any]:
        model = LanguageModel(config, recompute=recompute, loss="fused")
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        return [parameter.grad for parameter in model.parameters()]

    kept = gradients(False)
    for recompute in (True, 3):
        assert all(torch.equal(a, b) for a, b in zip(kept, gradients(recompute), strict=True))


def test_activations_have_the_dtype_of_the_config() -> None:
    model = LanguageModel(SMALL.replace(dtype="bfloat16", residual="deepseek_v4"))
    seen: list[torch.dtype] = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda _module, args, out: seen.extend([args[0].dtype, out.dtype]))
    h = model(_tokens())
    assert {h.dtype, *seen} == {torch.bfloat16} and len(seen) == 4
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_made_on_meta_and_filled_later() -> None:
    for residual in ("plain", "deepseek_v4"):
        config = SMALL.replace(residual=residual)
        model = LanguageModel(config, device="meta")
        assert all(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        model.reset_parameters(3)
        want = LanguageModel(config, seed=3).state_dict()
        assert all(torch.equal(tensor, want[key]) for key, tensor in model.state_dict().items())


def test_compiles_whole() -> None:
    model, tokens = LanguageModel(SMALL), _tokens()
    want = model(tokens[:, :-1], tokens[:, 1:])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens[:, :-1], tokens[:, 1:]), want)


def test_tied_output() -> None:
    model = LanguageModel(SMALL.replace(tied=True))
    assert model.output is None and model.output_weight is model.embedding.weight
    assert model.config.parameters() == sum(
        p.numel() for p in LanguageModel(SMALL.replace(tied=True, residual="plain")).parameters()
    )


@pytest.mark.parametrize("kind", ["chunked", "fused"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_losses_in_chunks(kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens, words, dim, chunk = 23, 17, 8, 5

    def computed(loss: Any) -> tuple[Any, ...]:
        h = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        weight = torch.randn(words, dim, generator=torch.Generator().manual_seed(2)).double()
        weight = weight.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        targets = torch.randint(0, words, (tokens,), generator=torch.Generator().manual_seed(3))
        targets[[0, 7]] = IGNORED
        value = next_token_loss(h, weight, targets, loss, chunk)
        (3 * value).backward()
        return value.detach(), h.grad, weight.grad

    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 5e-3}
    for got, want in zip(computed(kind), computed("full"), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, **tolerance)


def test_loss_counts_what_has_a_target() -> None:
    h, weight = torch.randn(4, 3), torch.randn(5, 3)
    targets = torch.tensor([1, IGNORED, 2, IGNORED])
    want = torch.nn.functional.cross_entropy(h[[0, 2]] @ weight.T, targets[[0, 2]])
    for kind in get_args(Loss):
        torch.testing.assert_close(next_token_loss(h, weight, targets, kind, 3), want)


def test_presets_can_be_built_and_count_their_parameters() -> None:
    for name, config in MODEL_PRESETS.items():
        model = LanguageModel(config.replace(residual="plain"), device="meta")
        assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters(), name
        connections = [m for m in LanguageModel(config, device="meta").modules() if isinstance(m, HyperConnection)]
        assert [connection.layer_index for connection in connections] == list(range(2 * config.layers))


def test_scaled() -> None:
    half = MODEL_PRESETS["1b"].scaled(0.5)
    assert (half.dim, half.heads, half.kv_heads, half.layers, half.hidden) == (1024, 8, 4, 8, 4096)
    assert MODEL_PRESETS["27b"].scaled(0.01).layers == 1
    assert [MODEL_PRESETS[name].scaled(0.5).dim for name in ("3b", "9b", "27b")] == [640, 1024, 1280]


def test_a_recipe_as_the_residual() -> None:
    recipe = Recipe.preset("glm5_next", streams=2)
    config = SMALL.replace(residual=recipe)
    assert config.recipe == recipe and config.replace(dim=48).recipe == recipe
    assert SMALL.replace(residual=Recipe()).recipe == Recipe()
    assert config.streams == 2 and SMALL.replace(streams=2, residual=Recipe()).streams == 4
    with pytest.raises(ValueError, match="streams must be those of the residual's recipe, 2, got 3"):
        config.replace(streams=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"residual": "mch"}, "residual must be one of plain, mhc, .*got 'mch'"),
        ({"dim": 30}, "dim must be heads times an even width"),
        ({"dim": 20}, "dim must be heads times an even width"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"layers": 0}, "layers must be a positive int, got 0"),
        ({"dtype": "bf16"}, "dtype must be one of float32, bfloat16"),
        ({"norm_eps": 0.0}, "must be positive"),
    ],
)
def test_bad_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SMALL.replace(**fields)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="residual='plain' has none"):
        LanguageModel(SMALL.replace(residual="plain"), recompute=True)
    for recompute in (-3, "auto"):
        with pytest.raises(ValueError, match="recompute must be a bool or a positive int"):
            LanguageModel(SMALL, recompute=recompute)
    with pytest.raises(ValueError, match="loss must be one of full, chunked, fused, got 'fast'"):
        LanguageModel(SMALL, loss="fast")
    with pytest.raises(ValueError, match=r"targets must be \[...\] = \(2, 9\)"):
        LanguageModel(SMALL)(_tokens(), _tokens()[:, 1:])
