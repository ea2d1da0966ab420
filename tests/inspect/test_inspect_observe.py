"""What is seen of a real model agrees with mhckit.health, and with the model's own streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import SHAPE, SUBLAYERS, TOKENS, connections, healthy, inspect_saved, residual_bias
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mhckit import Recipe
from mhckit.health import Health, mean_mixing_matrices
from mhckit.inspect import Inspection
from mhckit.inspect.observe import ITERATED_TOKENS, observe
from mhckit.models import LanguageModel


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return healthy().eval()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("What a sublayer reads, it need not keep.")
    return file


@pytest.fixture(scope="module")
def tokens(text: Path) -> Tensor:
    return torch.tensor([list(text.read_bytes()[:TOKENS])])


@pytest.fixture(scope="module")
def inspection(model: LanguageModel, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    return inspect_saved(model, tmp_path_factory.mktemp("model"), text=text)


@torch.no_grad()
def test_numbers_are_those_of_health(model: LanguageModel, tokens: Tensor, inspection: Inspection) -> None:
    health = Health(model)
    with health.sample():
        model(tokens)
    numbers = health.per_sublayer()
    pairs = {
        "row_error_max": "row_error",
        "column_error_max": "column_error",
        "identity_distance": "identity_distance",
        "uniform_distance": "uniform_distance",
        "prefix_gain_forward": "gain_forward",
        "suffix_gain_backward": "gain_backward",
    }
    assert [each.name for each in inspection.sublayers] == health.names
    for theirs, ours in pairs.items():
        seen = [getattr(each, ours) for each in inspection.sublayers]
        assert seen == pytest.approx(numbers[theirs].tolist(), abs=2e-6), ours
    assert inspection.sublayers[-2].similarity == pytest.approx(
        float(health.metrics()["health/stream_cosine"]), abs=1e-6
    )
    means = torch.tensor([each.mean for each in inspection.sublayers])
    torch.testing.assert_close(means, mean_mixing_matrices(model, tokens), atol=1e-6, rtol=0)


@torch.no_grad()
def test_similarity_is_of_the_streams_after_each_sublayer(
    model: LanguageModel, tokens: Tensor, inspection: Inspection
) -> None:
    """The last one's too, which only the head reads."""
    after: list[Tensor] = []
    hooks = [
        each.register_forward_hook(lambda _m, _a, output: after.append(output[1].x)) for each in connections(model)
    ]
    hooks.append(model.head.register_forward_pre_hook(lambda _m, args: after.append(args[0].tensor)))
    model(tokens)
    for hook in hooks:
        hook.remove()
    assert len(after) == SUBLAYERS + 1
    for sublayer, x in zip(inspection.sublayers, after[1:], strict=True):
        pairs = [(i, j) for i in range(3) for j in range(i)]
        cosines = [cosine_similarity(x[..., i, :], x[..., j, :], dim=-1).mean() for i, j in pairs]
        assert sublayer.similarity == pytest.approx(float(sum(cosines)) / len(pairs), abs=1e-5)


@torch.no_grad()
def test_shares_are_of_the_streams_that_are_read(model: LanguageModel, tokens: Tensor, inspection: Inspection) -> None:
    read: list[tuple[Tensor, Tensor]] = []
    last = connections(model)[-1]
    hook = last.register_forward_hook(lambda _m, _a, output: read.append((output[1].x[0], output[1].mix.pre[0])))
    model(tokens)
    hook.remove()
    ((x, pre),) = read
    amounts = [sum(float(pre[t, i] * x[t, i].norm()) for t in range(TOKENS)) for i in range(3)]
    assert inspection.sublayers[-1].reads == pytest.approx([each / sum(amounts) for each in amounts], abs=1e-5)


def test_loss_tokens_and_text_are_those_that_were_read(
    model: LanguageModel, tokens: Tensor, text: Path, inspection: Inspection
) -> None:
    with torch.no_grad():
        logits = model.logits(model(tokens))[0]
    assert inspection.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])))
    assert (inspection.tokens, inspection.token, inspection.text) == (TOKENS, TOKENS // 2, text.read_text())
    assert inspection.token_text == text.read_text()[TOKENS // 2]
    assert inspection.streams == 3 and inspection.recipe["iterations"] == 20


@pytest.mark.parametrize("residual", ["mhc", "deepseek_v4", "mhc_triton"])
def test_errors_fall_with_iterations_down_to_the_one_that_is_seen(tmp_path: Path, residual: str) -> None:
    """Of more tokens than are iterated again: the worst must be among those that are."""
    inspection = inspect_saved(healthy(residual=residual), tmp_path, tokens=4 * ITERATED_TOKENS)
    for each in inspection.sublayers:
        assert len(each.error_by_iteration) == 20
        assert each.error_by_iteration[-1] == pytest.approx(max(each.row_error, each.column_error), abs=2e-6)
        assert each.error_by_iteration[0] > 5 * each.error_by_iteration[-1]
        assert each.error_by_iteration == sorted(each.error_by_iteration, reverse=True) or (
            max(each.error_by_iteration[10:]) < 1e-5  # where rounding is all that is left
        )


@pytest.mark.parametrize("preset", ["paper", "deepseek_v4", "mhc_cu"])
def test_static_logits_are_those_of_every_token(tmp_path: Path, preset: str) -> None:
    model = LanguageModel(SHAPE.replace(residual=Recipe.preset(preset, streams=3, dynamic=False)), seed=3)
    with torch.no_grad():
        residual_bias(connections(model)[1]).copy_(2.0 * torch.arange(9.0).view(3, 3).sin())
    inspection = inspect_saved(model, tmp_path)
    for each in inspection.sublayers:
        assert len(each.error_by_iteration) == 20
        assert each.error_by_iteration[-1] == pytest.approx(max(each.row_error, each.column_error), abs=2e-6)
    assert inspection.sublayers[1].error_by_iteration[0] > 0.05


PROJECTION = Recipe(streams=3, residual="projection")


@pytest.mark.parametrize(
    ("residual", "exact"), [("mhc_lite", True), (PROJECTION, True), ("hy_v4", True), ("hc", False)], ids=str
)
def test_maps_that_do_not_iterate(tmp_path: Path, residual: str | Recipe, exact: bool) -> None:
    inspection = inspect_saved(healthy(residual=residual), tmp_path)
    assert all(each.error_by_iteration == [] for each in inspection.sublayers)
    assert all((each.row_error < 1e-5) == exact for each in inspection.sublayers)


def test_a_model_is_left_without_hooks_and_in_its_mode(model: LanguageModel, tokens: Tensor) -> None:
    with pytest.raises(ZeroDivisionError):
        observe(model, lambda: 1 // 0)
    observed, result = observe(model, lambda: model(tokens))
    assert len(observed) == SUBLAYERS and not result.requires_grad
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
