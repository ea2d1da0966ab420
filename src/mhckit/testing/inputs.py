"""One seeded call of any public operator under any recipe.

    call = make_call("junction", recipe, lead=(2, 3), channels=5)
    outputs = call()                                # a flat tuple of tensors
    outputs = call(x=other_x)                       # with single arguments replaced

Values are chosen so that mistakes show: residual matrices are asymmetric, norm weights differ from 1, and optional
arguments are given unless asked otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mhckit
from mhckit.recipe import Recipe

_PARAMETERS = ("phi", "scale", "bias", "norm_weight")
_MIX = ("mix_pre", "mix_post", "mix_res")

# The tensor arguments of each operator; mix_* are the fields of a Mix.
OPERATORS: dict[str, tuple[str, ...]] = {
    "project": ("x", "phi", "norm_weight"),
    "activate": ("z", "mean_square", "scale", "bias"),
    "sinkhorn": ("logits",),
    "coefficients": ("x", *_PARAMETERS),
    "pre": ("x", "pre", "out_norm_weight"),
    "post": ("x", "f", "post", "res", "f_bias"),
    "expand": ("h",),
    "head": ("x", "fn", "scale", "base", "pre"),
    "enter": ("x", *_PARAMETERS, "out_norm_weight"),
    "junction": ("x", "f", *_MIX, *_PARAMETERS, "f_bias", "out_norm_weight"),
    "leave": ("x", "f", *_MIX, "f_bias"),
}
_OPTIONAL = ("norm_weight", "out_norm_weight", "f_bias")
_ACTIVATIONS = ("x", "f", "h")


@dataclass(frozen=True)
class Call:
    """An operator with its arguments; calling it returns the operator's tensors as one flat tuple."""

    operator: str
    recipe: Recipe
    tensors: dict[str, Tensor]

    def __call__(self, **replaced: Tensor) -> tuple[Tensor, ...]:
        return _flat(_run(self.operator, self.recipe, _Given(self.tensors | replaced)))

    def to(self, convert: Callable[[Tensor], Tensor]) -> Call:
        """The same call with every tensor converted."""
        return Call(self.operator, self.recipe, {name: convert(tensor) for name, tensor in self.tensors.items()})

    def positional(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call with tensors in the order of ``self.tensors``, as gradcheck and torch.func want it."""
        return self(**dict(zip(self.tensors, tensors, strict=True)))

    def requires_grad(self) -> Call:
        """The same call on fresh leaves that require gradients."""
        return self.to(lambda tensor: tensor.detach().clone().requires_grad_())


def make_call(
    operator: str,
    recipe: Recipe,
    *,
    lead: tuple[int, ...] = (2, 3),
    channels: int = 5,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    seed: int = 0,
    optional: bool = True,
) -> Call:
    """A call of the operator on seeded tensors; parameters and coefficients are float32 unless dtype is float64."""
    generator = torch.Generator().manual_seed(seed)
    accumulator = torch.promote_types(dtype, torch.float32)
    tensors: dict[str, Tensor] = {}
    for name in OPERATORS[operator]:
        shape = _shape(name, operator, recipe, lead, channels)
        if shape is None or (name in _OPTIONAL and not optional):
            continue
        value = _value(name, torch.randn(shape, generator=generator, dtype=torch.float64))
        tensors[name] = value.to(device=device, dtype=dtype if name in _ACTIVATIONS else accumulator)
    return Call(operator, recipe, tensors)


def _shape(name: str, operator: str, recipe: Recipe, lead: tuple[int, ...], channels: int) -> tuple[int, ...] | None:
    """None where the recipe has no such argument."""
    n, width = recipe.streams, recipe.streams * channels
    learned, identity = recipe.head == "learned", recipe.residual == "identity"
    if operator == "head":
        shapes = {
            "x": (*lead, n, channels),
            "fn": (n, width) if learned else None,
            "scale": (1,) if learned else None,
            "base": (n,) if learned else None,
            "pre": (*lead, n) if recipe.head == "last_pre" else None,
        }
        return shapes[name]
    static = not recipe.dynamic and operator != "project"
    if name in ("phi", "scale", "norm_weight", "z", "mean_square") and static:
        return None
    shapes = {
        "x": (*lead, n, channels),
        "h": (*lead, channels),
        "f": (*lead, channels),
        "phi": (recipe.rows, width),
        "scale": (len(recipe.groups),),
        "bias": (recipe.rows,),
        "norm_weight": (width,),
        "out_norm_weight": (channels,),
        "f_bias": (channels,),
        "z": (*lead, recipe.rows),
        "mean_square": lead,
        "pre": (*lead, n),
        "post": (*lead, n),
        "res": (*lead, n, n),
        "mix_pre": (*lead, n),
        "mix_post": (*lead, n),
        "mix_res": None if identity else (*lead, n, n),
        "logits": None if identity else (*lead, *((-1,) if recipe.residual == "permutation" else (n, n))),
    }
    shape = shapes[name]
    return None if shape is None else tuple(recipe.residual_logits if size == -1 else size for size in shape)


def _value(name: str, normal: Tensor) -> Tensor:
    if name in ("phi", "fn"):
        return normal / max(normal.shape[-1], 1) ** 0.5
    if name in ("norm_weight", "out_norm_weight", "scale"):
        return 1 + 0.3 * normal
    if name == "mean_square":
        return normal.square() + 0.5
    if name in ("res", "mix_res"):
        return normal.softmax(-1)
    if name in ("pre", "post", "mix_pre", "mix_post"):
        return normal.sigmoid()
    return normal


class _Given(dict[str, Any]):
    """Arguments by attribute; None for those not given."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    @property
    def mix(self) -> mhckit.Mix:
        return mhckit.Mix(self.mix_pre, self.mix_post, self.mix_res)

    def pick(self, *names: str) -> dict[str, Any]:
        return {name: self.get(name) for name in names}


def _run(operator: str, recipe: Recipe, t: _Given) -> Any:
    runs: dict[str, Callable[[], Any]] = {
        "project": lambda: mhckit.project(t.x, t.phi, norm_weight=t.norm_weight),
        "activate": lambda: mhckit.activate(t.z, t.mean_square, t.scale, t.bias, recipe=recipe),
        "sinkhorn": lambda: mhckit.sinkhorn(t.logits, recipe=recipe),
        "coefficients": lambda: mhckit.coefficients(
            t.x, t.phi, t.scale, t.bias, recipe=recipe, norm_weight=t.norm_weight
        ),
        "pre": lambda: mhckit.pre(t.x, t.pre, out_norm_weight=t.out_norm_weight),
        "post": lambda: mhckit.post(t.x, t.f, t.post, t.res, f_bias=t.f_bias),
        "expand": lambda: mhckit.expand(t.h, recipe.streams),
        "head": lambda: mhckit.head(t.x, recipe=recipe, **t.pick("fn", "scale", "base", "pre")),
        "enter": lambda: mhckit.enter(
            t.x, t.phi, t.scale, t.bias, recipe=recipe, **t.pick("norm_weight", "out_norm_weight")
        ),
        "junction": lambda: mhckit.junction(
            t.x,
            t.f,
            t.mix,
            t.phi,
            t.scale,
            t.bias,
            recipe=recipe,
            **t.pick("f_bias", "norm_weight", "out_norm_weight"),
        ),
        "leave": lambda: mhckit.leave(t.x, t.f, t.mix, recipe=recipe, f_bias=t.f_bias),
    }
    return runs[operator]()


def _flat(result: Any) -> tuple[Tensor, ...]:
    if isinstance(result, Tensor):
        return (result,)
    return () if result is None else tuple(tensor for part in result for tensor in _flat(part))
