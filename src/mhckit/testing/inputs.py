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
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mhckit
from mhckit.recipe import Recipe

_MIX = ("mix_pre", "mix_post", "mix_res")


class _Signature(NamedTuple):
    positional: tuple[str, ...]
    keyword: tuple[str, ...] = ()
    recipe: bool = True

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensor arguments, with a Mix as its three fields."""
        named = (_MIX if name == "mix" else (name,) for name in (*self.positional, *self.keyword) if name != "streams")
        return tuple(name for names in named for name in names)


_SIGNATURES = {
    "project": _Signature(("x", "phi"), ("norm_weight",), recipe=False),
    "activate": _Signature(("z", "mean_square", "scale", "bias")),
    "sinkhorn": _Signature(("logits",)),
    "coefficients": _Signature(("x", "phi", "scale", "bias"), ("norm_weight",)),
    "pre": _Signature(("x", "pre"), ("out_norm_weight",), recipe=False),
    "post": _Signature(("x", "f", "post", "res"), ("f_bias",), recipe=False),
    "expand": _Signature(("h", "streams"), recipe=False),
    "head": _Signature(("x",), ("fn", "scale", "base", "pre")),
    "enter": _Signature(("x", "phi", "scale", "bias"), ("norm_weight", "out_norm_weight")),
    "junction": _Signature(("x", "f", "mix", "phi", "scale", "bias"), ("f_bias", "norm_weight", "out_norm_weight")),
    "leave": _Signature(("x", "f", "mix"), ("f_bias",)),
}
# The tensor arguments of each operator; mix_* are the fields of a Mix.
OPERATORS: dict[str, tuple[str, ...]] = {name: signature.tensors for name, signature in _SIGNATURES.items()}
_OPTIONAL = ("norm_weight", "out_norm_weight", "f_bias")
_ACTIVATIONS = ("x", "f", "h")


@dataclass(frozen=True)
class Call:
    """An operator with its arguments; calling it returns the operator's tensors as one flat tuple."""

    operator: str
    recipe: Recipe
    tensors: dict[str, Tensor]

    def __call__(self, **replaced: Tensor) -> tuple[Tensor, ...]:
        return _flat(_run(self.operator, self.recipe, {**self.tensors, **replaced}))

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
    draw_on: torch.device | str = "cpu",
) -> Call:
    """A call of the operator on seeded tensors; parameters and coefficients are float32 unless dtype is float64.

    ``draw_on`` is where the numbers are drawn, "cpu" giving every device the same ones: a GPU draws large calls faster.
    """
    generator = torch.Generator(draw_on).manual_seed(seed)
    accumulator = torch.promote_types(dtype, torch.float32)
    tensors: dict[str, Tensor] = {}
    for name in OPERATORS[operator]:
        shape = _shape(name, operator, recipe, lead, channels)
        if shape is None or (name in _OPTIONAL and not optional):
            continue
        value = _value(name, torch.randn(shape, generator=generator, dtype=torch.float64, device=draw_on))
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


def _run(operator: str, recipe: Recipe, tensors: dict[str, Tensor]) -> Any:
    signature = _SIGNATURES[operator]

    def argument(name: str) -> Any:
        if name == "mix":
            return mhckit.Mix(*[tensors.get(field) for field in _MIX])  # type: ignore[arg-type]
        return recipe.streams if name == "streams" else tensors.get(name)

    positional = [argument(name) for name in signature.positional]
    keywords: dict[str, Any] = {name: argument(name) for name in signature.keyword}
    if signature.recipe:
        keywords["recipe"] = recipe
    return getattr(mhckit, operator)(*positional, **keywords)


def _flat(result: Any) -> tuple[Tensor, ...]:
    if isinstance(result, Tensor):
        return (result,)
    return () if result is None else tuple(tensor for part in result for tensor in _flat(part))
