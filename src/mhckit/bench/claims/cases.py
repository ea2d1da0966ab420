"""The computations that claims are about, each by mhckit and by naive PyTorch on the same named tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import mhckit
from mhckit import Recipe

from . import model, naive
from .data import Shape

Tensors = dict[str, Tensor]
Compute = Callable[[Tensors], tuple[Tensor, ...]]

STREAMS = 4
ROWS = STREAMS * STREAMS + 2 * STREAMS
LIGER, TE = Recipe.preset("liger"), Recipe.preset("transformer_engine")
MHC_CU, MHC_TRITON = Recipe.preset("mhc_cu"), Recipe.preset("mhc_triton")
MHC_CU_STATIC = Recipe.preset("mhc_cu", dynamic=False)

# Coefficients and the parameters behind them are float32 whatever the dtype of the streams.
FLOAT32 = {"pre", "post", "res", "logits", "phi", "scale", "bias", "norm_weight", "out_norm_weight"}


@dataclass(frozen=True)
class Case:
    """One computation, twice.

    Attributes:
        ours, naive: from tensors by name to the results.
        shapes: of the tensors, for a shape of the streams.
        dtype: of the streams and sublayers.
        judged_whole: judge all gradients as one vector; single ones of a deep network may be mostly rounding.
    """

    ours: Compute
    naive: Compute
    shapes: Callable[[Shape], dict[str, tuple[int, ...]]]
    dtype: torch.dtype = torch.bfloat16
    judged_whole: bool = False

    def tensors(self, shape: Shape, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensors:
        """Seeded values; ``dtype`` replaces that of the case."""
        generator = torch.Generator(device).manual_seed(0)
        dtype = self.dtype if dtype is None else dtype
        return {name: _value(name.split(".")[-1], size, dtype, generator) for name, size in self.shapes(shape).items()}


def _value(name: str, size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values that show mistakes: asymmetric matrices, logits of size 1, norm weights that are not 1."""
    if name == "tokens":
        return torch.randint(model.VOCABULARY, size, generator=generator, device=generator.device)
    dtype = torch.promote_types(dtype, torch.float32) if name in FLOAT32 else dtype
    normal = torch.randn(size, generator=generator, device=generator.device, dtype=dtype)
    if name in ("phi", "weight"):
        return normal.mul_(size[-1] ** -0.5)
    if name in ("scale", "norm_weight", "out_norm_weight"):
        return 1 + 0.3 * normal
    if name in ("pre", "post"):
        return normal.sigmoid()
    return normal.softmax(-1) if name == "res" else normal


def _sizes(*names: str) -> Callable[[Shape], dict[str, tuple[int, ...]]]:
    def shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
        batch, length, channels = shape
        sizes = {
            "x": (batch, length, STREAMS, channels),
            "f": (batch, length, channels),
            "pre": (batch, length, STREAMS),
            "post": (batch, length, STREAMS),
            "res": (batch, length, STREAMS, STREAMS),
            "logits": (batch, length, STREAMS, STREAMS),
            "phi": (ROWS, STREAMS * channels),
            "scale": (3,),
            "bias": (ROWS,),
            "out_norm_weight": (channels,),
        }
        return {name: sizes[name] for name in names}

    return shapes


def _model_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    return {"tokens": (shape.batch, shape.length), **model.parameter_shapes(shape.channels)}


def _liger_coefficients(t: Tensors) -> tuple[Tensor, ...]:
    pre, post, res = mhckit.coefficients(t["x"], t["phi"], t["scale"], t["bias"], recipe=LIGER)
    assert res is not None
    return pre, post, res


def _sinkhorn(t: Tensors, recipe: Recipe) -> tuple[Tensor, ...]:
    matrix = mhckit.sinkhorn(t["logits"], recipe=recipe)
    assert matrix is not None
    return (matrix,)


def _mhc_cu_layer(t: Tensors, recipe: Recipe) -> tuple[Tensor, ...]:
    """The RMSNorm that is the sublayer is part of the read."""
    x, f, mix = mhckit.enter(
        t["x"],
        t.get("phi"),
        t.get("scale"),
        t["bias"],
        recipe=recipe,
        out_norm_weight=t["out_norm_weight"],
        out_norm_eps=naive.MHC_CU_EPS,
    )
    return (mhckit.leave(x, f, mix, recipe=recipe),)


def _naive_mhc_cu_layer(t: Tensors) -> tuple[Tensor, ...]:
    return (naive.mhc_cu_layer(t["x"], t.get("phi"), t.get("scale"), t["bias"], t["out_norm_weight"]),)


def _stream_mix(t: Tensors) -> tuple[Tensor, ...]:
    """A write of nothing: mhckit has no operator that mixes alone, and this one reads a little more."""
    x_in = mhckit.pre(t["x"], t["pre"])
    return x_in, mhckit.post(t["x"], x_in.detach(), torch.zeros_like(t["pre"]), t["res"])


def _mhc_triton_connection(t: Tensors) -> tuple[Tensor, ...]:
    x, x_in, mix = mhckit.enter(t["x"], t["phi"], t["scale"], t["bias"], recipe=MHC_TRITON)
    return (mhckit.leave(x, x_in * 0.5, mix, recipe=MHC_TRITON),)


_PRE = Case(
    lambda t: (mhckit.pre(t["x"], t["pre"]),),
    lambda t: (naive.read(t["x"], t["pre"]),),
    _sizes("x", "pre"),
)
_POST = Case(
    lambda t: (mhckit.post(t["x"], t["f"], t["post"], t["res"]),),
    lambda t: (naive.write(t["x"], t["f"], t["post"], t["res"]),),
    _sizes("x", "f", "post", "res"),
)

CASES: dict[str, Case] = {
    "liger coeffs": Case(
        _liger_coefficients,
        lambda t: naive.liger_coefficients(t["x"], t["phi"], t["scale"], t["bias"]),
        _sizes("x", "phi", "scale", "bias"),
    ),
    "liger pre": _PRE,
    "liger post_res": _POST,
    "liger language model": Case(
        functools.partial(model.loss, naively=False),
        functools.partial(model.loss, naively=True),
        _model_sizes,
        judged_whole=True,
    ),
    "te expand_combine": _POST,
    "te aggregate": _PRE,
    "te projection": Case(
        lambda t: mhckit.project(t["x"], t["phi"]),
        lambda t: naive.project(t["x"], t["phi"]),
        _sizes("x", "phi"),
    ),
    "te sinkhorn": Case(
        functools.partial(_sinkhorn, recipe=TE), lambda t: (naive.te_sinkhorn(t["logits"]),), _sizes("logits")
    ),
    "mhc_cu static layer": Case(
        functools.partial(_mhc_cu_layer, recipe=MHC_CU_STATIC),
        _naive_mhc_cu_layer,
        _sizes("x", "bias", "out_norm_weight"),
        dtype=torch.float32,
    ),
    "mhc_cu dynamic layer": Case(
        functools.partial(_mhc_cu_layer, recipe=MHC_CU),
        _naive_mhc_cu_layer,
        _sizes("x", "phi", "scale", "bias", "out_norm_weight"),
        dtype=torch.float32,
    ),
    "mhc_triton sinkhorn": Case(
        functools.partial(_sinkhorn, recipe=MHC_TRITON),
        lambda t: (naive.mhc_triton_sinkhorn(t["logits"]),),
        _sizes("logits"),
    ),
    "mhc_triton stream mix": Case(
        _stream_mix,
        lambda t: (naive.read(t["x"], t["pre"]), naive.mix(t["x"], t["res"]).to(t["x"].dtype)),
        _sizes("x", "pre", "res"),
    ),
    "mhc_triton connection": Case(
        _mhc_triton_connection,
        lambda t: (naive.mhc_triton_connection(t["x"], t["phi"], t["scale"], t["bias"]),),
        _sizes("x", "phi", "scale", "bias"),
    ),
}
