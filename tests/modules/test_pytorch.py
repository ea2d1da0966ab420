"""PyTorch's own machinery on a small model: compiled training steps, torch.func, autocast, copies, equal bits.

Single operators are in tests/ops/test_contract.py; compiled, checkpointed and exported Streams in test_streams.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Connected, make
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from mhckit import HyperConnection, HyperHead, Mix, Recipe, Streams
from mhckit.testing import relative_error

RECIPE = Recipe.preset("deepseek_v4")
each_recipe = pytest.mark.parametrize("recipe", [RECIPE, Recipe.preset("deepseek_v41"), Recipe.preset("mhc_lite")])


def _loss(model: nn.Module, h: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(h), target)


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """By name, for the parameters that have one."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def _trained(model: Connected, loss: Callable[..., Tensor], batches: list[Tensor]) -> list[float]:
    """Losses of a few steps; the model is changed."""
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4), []
    for batch in batches:
        value = loss(model, batch, batch.sin())
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        losses.append(value.item())
    return losses


class TestCompile:
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_training(self, backend: str) -> None:
        """Forward, loss and backward in one graph, parameters that change between steps: the curve of eager mode."""
        torch._dynamo.reset()
        _, model, _ = make(RECIPE, depth=2)
        twin = copy.deepcopy(model)
        batches = [torch.randn(2, 5, 12) for _ in range(4)]
        compiled = torch.compile(_loss, fullgraph=True, backend=backend)
        got, want = _trained(twin, compiled, batches), _trained(model, _loss, batches)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)
        assert len(set(want)) == 4
        for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(other, parameter, rtol=1e-4, atol=1e-5, msg=name)

    @each_recipe
    def test_under_autocast(self, recipe: Recipe) -> None:
        torch._dynamo.reset()
        _, model, h = make(recipe, depth=2)

        def loss(h: Tensor, target: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return _loss(model, h, target)

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        want, got = _gradients(model, loss(h, h.sin())), _gradients(model, compiled(h, h.sin()))
        assert want.keys() == got.keys()
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, msg=name)

    def test_another_batch_does_not_recompile_twice(self) -> None:
        """Once for the first size, once with the number of tokens as a symbol, then never again."""
        torch._dynamo.reset()
        _, model, _ = make(RECIPE, depth=2)
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(_loss, fullgraph=True, backend=counter)
        for tokens in (5, 7, 8, 31):
            h = torch.randn(2, tokens, 12)
            torch.testing.assert_close(compiled(model, h, h.sin()), _loss(model, h, h.sin()))
        assert counter.frame_count == 2


class TestFunc:
    @each_recipe
    def test_grad_of_functional_call(self, recipe: Recipe) -> None:
        _, model, h = make(recipe, depth=3)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        got = grad(lambda p: nn.functional.mse_loss(functional_call(model, p, (h,)), h.sin()))(parameters)
        want = _gradients(model, _loss(model, h, h.sin()))
        assert want.keys() == got.keys()
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, msg=name)

    def test_functional_call_uses_the_given_parameters(self) -> None:
        _, model, h = make(RECIPE)
        _, other, _ = make(RECIPE)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        before = model(h)
        assert torch.equal(functional_call(model, dict(other.named_parameters()), (h,)), other(h))
        assert torch.equal(model(h), before)
        assert not torch.equal(before, other(h))

    def test_gradients_per_sample(self) -> None:
        _, model, h = make(RECIPE, depth=2)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(p: dict[str, Tensor], sample: Tensor) -> Tensor:
            return nn.functional.mse_loss(functional_call(model, p, (sample[None],)), sample.sin()[None])

        per_sample = vmap(grad(loss), in_dims=(None, 0))(parameters, h)
        for index, sample in enumerate(h):
            want = _gradients(model, _loss(model, sample[None], sample.sin()[None]))
            for name, gradient in want.items():
                torch.testing.assert_close(per_sample[name][index], gradient, msg=name)

    def test_forward_mode_raises(self) -> None:
        """Not implemented, and not silently wrong."""
        _, model, h = make(RECIPE)
        with pytest.raises(NotImplementedError, match="must implement the jvp function"):
            jvp(model, (h,), (h,))


class TestAutocast:
    def test_only_the_sublayers_are_cast(self) -> None:
        _, model, h = make(RECIPE)
        seen: list[tuple[Tensor, Streams]] = []
        for connection in model.connections:
            connection.register_forward_hook(lambda module, args, output: seen.append(output))
        written: list[torch.dtype] = []
        for sublayer in model.sublayers:
            sublayer.register_forward_hook(lambda module, args, output: written.append(output.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model(h)
        assert written == [torch.bfloat16] * 4
        for read, streams in seen:
            assert read.dtype == streams.x.dtype == torch.float32
            assert [coefficient.dtype for coefficient in _coefficients(streams)] == [torch.float32] * 3

    def test_coefficients_have_the_bits_of_float32(self) -> None:
        """The first connection reads the same streams with and without autocast."""
        _, model, h = make(RECIPE)
        want, streams = model.connections[0](Streams.expand(h, 4))
        with torch.autocast("cpu", torch.bfloat16):
            got, cast = model.connections[0](Streams.expand(h, 4))
        assert torch.equal(got, want)
        assert all(torch.equal(a, b) for a, b in zip(_coefficients(cast), _coefficients(streams), strict=True))

    def test_results_and_gradients_are_close(self) -> None:
        _, model, h = make(RECIPE, dim=32)
        want = _gradients(model, _loss(model, h, h.sin()))
        with torch.autocast("cpu", torch.bfloat16):
            output = model(h)
            loss = nn.functional.mse_loss(output, h.sin())
        error = relative_error(output, model(h))
        assert 1e-5 < error < 2e-2  # bfloat16 took part, and nothing went wrong
        got = _gradients(model, loss)
        for name, gradient in want.items():
            assert got[name].dtype == torch.float32
            largest = gradient.abs().max()
            assert (got[name] - gradient).abs().max() < 0.1 * largest + 1e-6, name


def _modules() -> dict[str, nn.Module]:
    return {
        "connection": HyperConnection(8, RECIPE, layer_index=2, norm=True, projection_norm_weight=True),
        "static": HyperConnection(8, RECIPE.replace(dynamic=False), out_dtype=torch.float64),
        "head": HyperHead(8, RECIPE, backend="reference"),
        "mean": HyperHead(8, "paper"),
    }


def _through_torch_save(module: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


class TestCopies:
    @pytest.mark.parametrize("name", _modules())
    @pytest.mark.parametrize(
        "copied",
        [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), _through_torch_save],
        ids=["deepcopy", "pickle", "torch.save"],
    )
    def test_modules(self, name: str, copied: Callable[[nn.Module], nn.Module]) -> None:
        module = _modules()[name]
        twin = copied(module)
        x = torch.randn(3, 4, 8)
        for got, want in zip(_outputs(twin, x), _outputs(module, x), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
        plain = ("dim", "recipe", "out_dtype", "keep_float32", "backend", "layer_index", "out_norm_eps")
        for attribute in plain:
            assert getattr(twin, attribute, None) == getattr(module, attribute, None), attribute
        for parameter, other in zip(module.parameters(), twin.parameters(), strict=True):
            assert other.requires_grad
            assert other.data_ptr() != parameter.data_ptr()
        assert all(parameter.dtype == torch.float32 for parameter in twin.bfloat16().parameters())

    def test_a_trained_model(self) -> None:
        _, model, h = make(RECIPE, depth=2)
        _trained(model, _loss, [h])
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        losses = [_trained(m, _loss, [h, h]) for m in (model, *twins)]
        assert losses[0] == losses[1] == losses[2]

    def test_streams(self) -> None:
        """Pending, read and fresh; with or without a residual map. weights_only needs their two classes allowed."""
        for preset in ("deepseek_v4", "hy_v4"):
            fresh = Streams(torch.randn(3, 4, 8))
            with torch.no_grad():
                h, read = HyperConnection(8, preset)(fresh)
            for streams in (fresh, read, read.write(h), read.write(h, torch.randn(8))):
                buffer = io.BytesIO()
                torch.save(streams, buffer)
                buffer.seek(0)
                with torch.serialization.safe_globals([Streams, Mix]):
                    safely = torch.load(buffer, weights_only=True)
                for twin in (safely, copy.deepcopy(streams), pickle.loads(pickle.dumps(streams))):
                    assert isinstance(twin, Streams)
                    _assert_same_streams(twin, streams)

    def test_streams_in_a_graph_cannot_be_copied(self) -> None:
        """As tensors in a graph cannot: torch says so."""
        _, streams = HyperConnection(8, RECIPE)(Streams(torch.randn(3, 4, 8)))
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(streams)


def _outputs(module: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        if isinstance(module, HyperHead):
            return [module(x)]
        h, streams = module(Streams(x))
        return [h, *_coefficients(streams)]


def _coefficients(streams: Streams) -> list[Tensor]:
    return [coefficient for coefficient in streams.mix or () if coefficient is not None]


def _assert_same_streams(got: Streams, want: Streams) -> None:
    tensors = [(s.x, s.f, s.f_bias, *(s.mix or (None, None, None))) for s in (got, want)]
    for a, b in zip(*tensors, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) and a.data_ptr() != b.data_ptr())


class TestStateDict:
    @pytest.mark.parametrize("assign", [False, True])
    def test_through_a_file(self, assign: bool, tmp_path: Path) -> None:
        _, model, h = make(RECIPE, norm=True, projection_norm_weight=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        torch.save(model.state_dict(), tmp_path / "model.pt")
        _, other, _ = make(RECIPE, norm=True, projection_norm_weight=True)
        assert not torch.equal(other(h), model(h))
        loaded = other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), assign=assign)
        assert not loaded.missing_keys
        assert not loaded.unexpected_keys
        assert torch.equal(other(h), model(h))

    def test_keys(self) -> None:
        """They are the format of checkpoints."""
        keys = {name: list(module.state_dict()) for name, module in _modules().items()}
        assert keys == {
            "connection": ["phi", "scale", "bias", "norm_weight", "out_norm_weight"],
            "static": ["bias"],
            "head": ["fn", "scale", "base"],
            "mean": [],
        }

    def test_of_a_lowered_checkpoint(self) -> None:
        """Values of bfloat16 in parameters that stay float32."""
        module, lowered = HyperConnection(8), {k: t.bfloat16() for k, t in HyperConnection(8).state_dict().items()}
        module.load_state_dict(lowered)
        for name, parameter in module.named_parameters():
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, lowered[name].float())

    def test_of_another_recipe_does_not_load(self) -> None:
        with pytest.raises(RuntimeError, match="size mismatch for phi"):
            HyperConnection(8, "paper").load_state_dict(HyperConnection(8, "hy_v4").state_dict())


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Also fills memory that is allocated and not written with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", Recipe.presets())
def test_deterministic_algorithms(preset: str, dtype: torch.dtype) -> None:
    """No operator refuses, nothing uninitialised is read, and a second run has the same bits."""
    _, model, h = make(Recipe.preset(preset), norm=True)
    model, h = model.to(dtype), torch.cat([h] * 16).to(dtype)
    runs = []
    for _ in range(2):
        output = model(h)
        runs.append({"output": output.detach(), **_gradients(model, output.float().square().mean())})
    assert runs[0].keys() == runs[1].keys() == {"output", *(name for name, _ in model.named_parameters())}
    for name, tensor in runs[0].items():
        assert tensor.isfinite().all(), name
        assert torch.equal(tensor, runs[1][name]), name
