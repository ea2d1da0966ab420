"""A warm-up launches what a model launches, makes none of it, and changes nothing. What it compiles: tests/kernels."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from recipes import every_recipe
from torch import Tensor, nn
from torch.nn.utils import parametrize

import mhckit
from mhckit import MHC, HyperConnection, HyperHead, Recipe, Streams, warmup
from mhckit.kernels import _launcher, _warmup
from mhckit.models import LanguageModel, ModelConfig
from mhckit.modules._chains import TOKENS, Kinds, find_chains, run_chain
from mhckit.modules.warmup import _dtype_of_streams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RECIPES = every_recipe()
WIDTH = 32
SHAPE = (2, TOKENS // 2)


def _kernels(run: Callable[[], object]) -> set[Any]:
    """What is told apart by compilation, of every launch: of calls with equally many tokens, all numbers."""
    with mhckit.backend("triton"):
        launches = _warmup.recorded(run)
    return {
        (
            kernel.__name__,
            tuple(argument.dtype if isinstance(argument, Tensor) else argument for argument in args),
            tuple(constants.items()),
        )
        for kernel, _grid, args, constants in launches
    }


def _warmed(model: nn.Module, kinds: Kinds) -> set[Any]:
    return set[Any]().union(*(_kernels(partial(run_chain, chain, kinds, DEVICE)) for chain in find_chains(model)))


def _language_model(recipe: Recipe, dtype: str = "bfloat16", **options: Any) -> LanguageModel:
    config = ModelConfig(vocab_size=64, dim=WIDTH, layers=2, heads=2, hidden=64, residual=recipe, dtype=dtype)
    return LanguageModel(config, device=DEVICE, **options)


def _step(model: LanguageModel) -> None:
    tokens = torch.zeros(SHAPE, dtype=torch.long, device=DEVICE)
    model(tokens, tokens).backward()


@pytest.mark.parametrize(
    "name",
    [
        "paper",
        "paper-static",
        "deepseek_v4",
        "deepseek_v41",
        "deepseek_v41-static",
        "hy_v4",
        "mhc_lite",
        "projection",
        "hc",
    ],
)
def test_a_training_step_of_every_kind_of_recipe(name: str) -> None:
    model = _language_model(RECIPES[name])
    assert _kernels(lambda: _step(model)) == _warmed(model, Kinds(torch.bfloat16)) != set()


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v41", "paper-static"])
def test_recompute(name: str) -> None:
    model = _language_model(RECIPES[name], recompute=3)
    launched = _kernels(lambda: _step(model))
    assert launched == _warmed(model, Kinds(torch.bfloat16, recompute=True))
    assert launched > _warmed(model, Kinds(torch.bfloat16))


def test_inference_and_other_dtypes() -> None:
    model = _language_model(RECIPES["deepseek_v4"], dtype="float32")

    @torch.no_grad()
    def infer() -> None:
        model(torch.zeros(SHAPE, dtype=torch.long, device=DEVICE))

    kinds = Kinds(torch.float32, training=False)
    assert _kernels(infer) == _warmed(model, kinds) < _warmed(model, kinds._replace(training=True))
    assert not _warmed(model, kinds) & _warmed(model, kinds._replace(dtype=torch.bfloat16))
    with torch.inference_mode():
        assert _warmed(model, kinds._replace(training=True)) == _warmed(model, Kinds(torch.float32))


class Network(nn.Module):
    """Sublayers that return bfloat16 on float32 streams, as under autocast, and leave their bias to the write."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.connections = nn.ModuleList(HyperConnection(WIDTH, device=DEVICE, **options) for _ in range(3))
        self.f_bias = nn.Parameter(torch.zeros(WIDTH, device=DEVICE))

    def forward(self, h: Tensor) -> Tensor:
        streams = Streams.expand(h, 4)
        for connection in self.connections:
            h, streams = connection(streams)
            streams = streams.write(h.square().bfloat16(), self.f_bias)
        return streams.tensor


@pytest.mark.parametrize("frozen", [False, True])
def test_options_of_modules_and_of_the_call(frozen: bool) -> None:
    model = Network(norm=True, projection_norm_weight=True, out_dtype=torch.float16)
    if frozen:
        for connection in model.connections:
            connection.phi.requires_grad_(False)
            connection.norm_weight.requires_grad_(False)
    h = torch.zeros(TOKENS, WIDTH, device=DEVICE, requires_grad=True)
    launched = _kernels(lambda: model(h).sum().backward())
    kinds = Kinds(torch.float32, torch.bfloat16, torch.float32)
    assert launched == _warmed(model, kinds)
    for other in (kinds._replace(sublayer_dtype=None), kinds._replace(f_bias_dtype=None)):
        assert launched != _warmed(model, other)
    assert launched != _warmed(Network(norm=True), kinds)


def test_reads_at_both_ends_of_a_chain_and_between() -> None:
    """The last pre of a shifted recipe gets no gradient where no head takes it; recompute rebuilds what was read."""
    model = Network(recipe="deepseek_v41")
    h = torch.zeros(TOKENS, WIDTH, device=DEVICE, requires_grad=True)

    def run() -> None:
        with mhckit.recompute(every=3):
            result = model(h)
        result.sum().backward()

    assert _kernels(run) == _warmed(model, Kinds(torch.float32, torch.bfloat16, torch.float32, recompute=True))


def test_a_layer_of_its_own() -> None:
    layer = MHC(nn.Identity(), WIDTH, "deepseek_v4").to(DEVICE)
    x = torch.zeros(TOKENS, 4, WIDTH, device=DEVICE, requires_grad=True)
    assert _kernels(lambda: layer(x).sum().backward()) < _warmed(layer, Kinds(torch.float32))


def test_nothing_of_the_model_is_touched() -> None:
    model = _language_model(RECIPES["deepseek_v4"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generators = torch.get_rng_state()
    calls: list[nn.Module] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, *_: calls.append(module))
    _warmed(model, Kinds(torch.bfloat16))
    assert calls == []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators)
    assert _launcher.observer is None


def test_what_a_module_holds_besides_its_parameters_gets_no_gradient() -> None:
    connection = HyperConnection(16, RECIPES["deepseek_v4"])
    parametrize.register_parametrization(connection, "phi", nn.Identity())
    _warmed(nn.ModuleList([connection]), Kinds(torch.bfloat16))
    assert all(parameter.grad is None for parameter in connection.parameters())


class Sharded(HyperConnection):
    """FSDP2 gives modules a class whose construction makes another one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return HyperConnection(*args, **kwargs)


def test_a_model_without_memory_or_of_other_classes() -> None:
    plain = nn.ModuleList([HyperConnection(WIDTH), HyperHead(WIDTH)])
    other = nn.ModuleList([HyperConnection(WIDTH, device="meta"), HyperHead(WIDTH, device="meta")])
    other[0].__class__ = Sharded
    assert _warmed(other, Kinds(torch.float32)) == _warmed(plain, Kinds(torch.float32))


def test_kinds_are_found_once() -> None:
    model = nn.ModuleList([HyperConnection(WIDTH, layer_index=i) for i in range(5)])
    assert [(chain.head, chain.dim) for chain in find_chains(model)] == [(None, WIDTH)]
    model.extend([HyperConnection(WIDTH, norm=True), HyperConnection(16), HyperHead(16), HyperHead(16, "hc")])
    found = find_chains(model)
    assert [(chain.dim, chain.head is not None) for chain in found] == [
        (32, False),
        (32, False),
        (16, True),
        (16, True),
    ]


def test_other_threads_still_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(_launcher, "run_now", lambda kernel, *_: made.append(kernel.__name__))

    def run() -> None:
        mhckit.expand(torch.zeros(3, 8, device=DEVICE), 4)

    def both() -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        run()

    assert len(_kernels(both)) == 1 and made == ["broadcast_kernel"]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what happens without a GPU")
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(warmup(64)) == "nothing to compile: the torch reference, or Triton's interpreter, runs"
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(RuntimeError, match=r"kernels for a CUDA GPU, and torch.cuda.is_available\(\) is False"):
        warmup(64)
    with mhckit.backend("reference"):
        assert warmup(64) == (0, 0, 0, 0.0)
    assert warmup(HyperConnection(64, backend="reference")).kernels == 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "dim must be a positive int, got 0"),
        ((nn.Linear(2, 2),), {}, "found no HyperConnection"),
        ((HyperConnection(8), "paper"), {}, "recipe and norm go with a width"),
        ((HyperConnection(8),), {"norm": True}, "recipe and norm go with a width"),
        ((8,), {"workers": 0}, "workers must be a positive int, got 0"),
    ],
)
def test_errors(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        warmup(*arguments, **options)


def test_errors_of_dtypes_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dtype", "sublayer_dtype", "f_bias_dtype"):
        with pytest.raises(TypeError, match=f"^{name} must be one of bfloat16"):
            warmup(8, **{name: torch.int32})
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(ValueError, match="device must be a CUDA device, for which kernels are compiled, got 'cpu'"):
        warmup(8, device="cpu")


def test_where_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with monkeypatch.context() as older, pytest.raises(RuntimeError, match=r"need Triton 3\.6 or newer .* got 3\.5\.1"):
        older.setattr("triton.__version__", "3.5.1")
        warmup(8)
    monkeypatch.setitem(sys.modules, "mhckit.kernels._runtime", None)
    with pytest.raises(RuntimeError, match=r"cannot be loaded: .*; install Triton"):
        warmup(8)


def test_streams_are_of_the_models_dtype() -> None:
    model = nn.ModuleList([HyperConnection(8), nn.Linear(8, 8, dtype=torch.float16)])
    assert _dtype_of_streams(model, None) == torch.float16
    assert _dtype_of_streams(model, torch.float32) == torch.float32
    assert _dtype_of_streams(HyperConnection(8), None) == torch.bfloat16
