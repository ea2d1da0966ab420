"""HyperConnection, HyperHead and MHC: parameters, dtypes, devices, and the operators they call."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from recipes import every_recipe
from torch import nn

import mhckit
from mhckit import MHC, HyperConnection, HyperHead, Recipe, Streams

RECIPES = every_recipe()
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


@each_recipe
def test_forward_is_enter_then_junction_then_leave(recipe: Recipe) -> None:
    n, dim = recipe.streams, 8
    first, second = (HyperConnection(dim, recipe, layer_index=i, norm=True, out_norm_eps=1e-5) for i in range(2))
    bias = torch.randn(dim)
    x = torch.randn(2, 3, n, dim)
    h, streams = first(Streams(x))
    h2, streams2 = second(streams.write(h.sin(), bias))
    out = streams2.write(h2.cos()).tensor

    def parameters(m: HyperConnection) -> dict:
        return dict(
            phi=m.phi, scale=m.scale, bias=m.bias, out_norm_weight=m.out_norm_weight, out_norm_eps=1e-5, recipe=recipe
        )

    y, want_h, mix = mhckit.enter(x, **parameters(first))
    y2, want_h2, mix2 = mhckit.junction(y, want_h.sin(), mix, f_bias=bias, **parameters(second))
    want = mhckit.leave(y2, want_h2.cos(), mix2, recipe=recipe)
    for got, wanted in ((h, want_h), (h2, want_h2), (streams2.x, y2), (out, want)):
        assert torch.equal(got, wanted)


def test_parameters() -> None:
    def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in module.named_parameters()}

    assert shapes(HyperConnection(8)) == {"phi": (24, 32), "scale": (3,), "bias": (24,)}
    assert shapes(HyperConnection(8, "hy_v4")) == {"phi": (8, 32), "scale": (2,), "bias": (8,)}
    assert shapes(HyperConnection(8, Recipe(dynamic=False))) == {"bias": (24,)}
    full = HyperConnection(8, norm=True, projection_norm_weight=True)
    assert shapes(full)["norm_weight"] == (32,)
    assert shapes(full)["out_norm_weight"] == (8,)
    assert shapes(HyperHead(8)) == {}
    assert shapes(HyperHead(8, "deepseek_v4")) == {"fn": (4, 32), "scale": (1,), "base": (4,)}
    assert all(p.dtype == torch.float32 for p in full.parameters())


class TestFloat32:
    def test_casts_do_not_reach_the_parameters(self) -> None:
        model = nn.ModuleDict(
            {
                "hc": HyperConnection(8, "deepseek_v4", norm=True),
                "head": HyperHead(8, "deepseek_v4"),
                "f": nn.Linear(8, 8),
            }
        )
        before = copy.deepcopy(model.state_dict())
        for cast in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()):
            cast(model)
            assert model["f"].weight.dtype != torch.float32
            for name in ("hc", "head"):
                for key, parameter in model[name].named_parameters():
                    assert parameter.dtype == torch.float32
                    assert torch.equal(parameter, before[f"{name}.{key}"])

    def test_widening_and_coming_back(self) -> None:
        connection = HyperConnection(8).double()
        assert connection.bias.dtype == torch.float64
        assert connection.float().bias.dtype == torch.float32
        assert HyperConnection(8).double().to(torch.bfloat16).bias.dtype == torch.float64

    def test_moves_do(self) -> None:
        connection = HyperConnection(8).to("meta", torch.bfloat16)
        assert connection.bias.is_meta
        assert connection.bias.dtype == torch.float32

    def test_unless_asked(self) -> None:
        connection = HyperConnection(8, keep_float32=False).to(torch.bfloat16)
        assert connection.bias.dtype == torch.bfloat16
        h, streams = connection(Streams(torch.randn(3, 4, 8).bfloat16()))
        assert h.dtype == torch.bfloat16
        assert streams.mix is not None
        assert streams.mix.pre.dtype == torch.float32

    def test_a_bfloat16_model_computes_coefficients_in_float32(self) -> None:
        connection = HyperConnection(8, "deepseek_v4").to(torch.bfloat16)
        h, streams = connection(Streams.expand(torch.randn(3, 8).bfloat16(), 4))
        assert h.dtype == torch.bfloat16
        assert streams.mix is not None
        assert all(t is not None and t.dtype == torch.float32 for t in streams.mix)

    def test_default_dtype_is_ignored(self) -> None:
        torch.set_default_dtype(torch.bfloat16)
        try:
            connection = HyperConnection(8, norm=True)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(p.dtype == torch.float32 for p in connection.parameters())
        assert torch.equal(connection.bias, HyperConnection(8).bias)


def test_meta_then_materialised() -> None:
    connection = HyperConnection(8, "deepseek_v4", layer_index=2, device="meta")
    assert connection.phi.is_meta
    connection.to_empty(device="cpu").reset_parameters()
    assert torch.equal(connection.bias, HyperConnection(8, "deepseek_v4", layer_index=2).bias)
    assert 0.015 < connection.phi.std() < 0.025


def test_out_dtype_for_float32_streams() -> None:
    connection = HyperConnection(8, out_dtype=torch.bfloat16)
    h, streams = connection(Streams(torch.randn(3, 4, 8)))
    assert h.dtype == torch.bfloat16
    h, streams = connection(streams.write(h))
    assert (h.dtype, streams.x.dtype) == (torch.bfloat16, torch.float32)
    assert HyperHead(8, out_dtype=torch.bfloat16)(streams.write(h)).dtype == torch.bfloat16


def test_constructor_errors() -> None:
    for dim in (0, -1, 8.0, True):
        with pytest.raises(ValueError, match="dim must be a positive int"):
            HyperConnection(dim)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="recipe must be a Recipe or the name of a preset, got int"):
        HyperConnection(8, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown preset 'v4'"):
        HyperConnection(8, "v4")
    for index in (-1, 1.5, True):
        with pytest.raises(ValueError, match="layer_index must be an int >= 0"):
            HyperConnection(8, layer_index=index)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out_norm_eps must be finite and not negative"):
        HyperConnection(8, norm=True, out_norm_eps=-1.0)
    with pytest.raises(TypeError, match="out_dtype must be one of"):
        HyperHead(8, out_dtype=torch.int32)
    with pytest.raises(ValueError, match="needs a dynamic recipe"):
        HyperConnection(8, Recipe(dynamic=False), projection_norm_weight=True)


def test_streams_of_another_width() -> None:
    with pytest.raises(ValueError, match=re.escape("phi must be [P, N*C] = (24, 28), got (24, 32)")):
        HyperConnection(8)(Streams(torch.randn(3, 4, 7)))
    with pytest.raises(TypeError, match=r"streams must be mhckit\.Streams or a tensor"):
        HyperConnection(8)((torch.randn(3, 4, 8),))  # type: ignore[arg-type]


def test_repr() -> None:
    assert repr(HyperConnection(8, "hy_v4")) == "HyperConnection(dim=8, streams=4, residual='identity')"
    assert repr(HyperHead(8, "deepseek_v4")) == "HyperHead(dim=8, streams=4, head='learned')"


class TestHyperHead:
    def test_takes_streams_or_a_tensor(self) -> None:
        head = HyperHead(8, "deepseek_v4")
        h, streams = HyperConnection(8, "deepseek_v4")(Streams(torch.randn(3, 4, 8)))
        written = streams.write(h)
        assert torch.equal(head(written), head(written.tensor))

    def test_last_pre_comes_from_the_streams(self) -> None:
        recipe = Recipe.preset("deepseek_v41")
        head = HyperHead(8, recipe)
        h, streams = HyperConnection(8, recipe)(Streams(torch.randn(3, 4, 8)))
        written = streams.write(h)
        assert written.mix is not None
        assert torch.equal(head(written), mhckit.head(written.tensor, recipe=recipe, pre=written.mix.pre))
        assert torch.equal(head(written.tensor, pre=written.mix.pre), head(written))
        with pytest.raises(ValueError, match="pass the Streams, or pre="):
            head(written.tensor)


class TestMHC:
    def test_wraps_any_layer(self) -> None:
        class Scaled(nn.Module):
            def forward(self, h: torch.Tensor, factor: float, *, shift: float = 0.0) -> torch.Tensor:
                return h * factor + shift

        wrapped = MHC(Scaled(), 8, "deepseek_v4", layer_index=3)
        x = torch.randn(2, 3, 4, 8, requires_grad=True)
        y = wrapped(x, 2.0, shift=1.0)
        h, streams = wrapped.connection(Streams(x))
        assert torch.equal(y, streams.write(h * 2 + 1).tensor)
        y.sum().backward()
        assert x.grad is not None
        assert wrapped.connection.layer_index == 3

    def test_wrong_output(self) -> None:
        with pytest.raises(ValueError, match=re.escape("f must be [..., C] = (2, 8), got (2, 5)")):
            MHC(nn.Linear(8, 5), 8)(torch.randn(2, 4, 8))

    def test_refuses_shifted_recipes(self) -> None:
        with pytest.raises(ValueError, match="use HyperConnection and Streams"):
            MHC(nn.Linear(8, 8), 8, "deepseek_v41")
