"""Argument errors: every message names the tensor, its axes, what was wanted and what came."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhckit.recipe import Recipe

from ._known import Known
from .mix import Mix

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


class Checked:
    """Calls of one function that have passed its checks: a call like one of them would pass them again.

    ``given`` is everything that the checks look at but the recipe. It may be anything, as users give it.
    """

    def __init__(self) -> None:
        self._known = Known()

    def passed(self, given: tuple[Any, ...], recipe: Recipe | None = None) -> bool:
        if torch.compiler.is_compiling():
            return False
        try:
            nested = True in [part.is_nested for part in given if part is not None]
        except AttributeError:  # not a tensor
            return False
        return not nested and self._known.find(given, _key(recipe)) is not None

    def remember(self, given: tuple[Any, ...], recipe: Recipe | None = None) -> None:
        if not torch.compiler.is_compiling():
            self._known.keep(given, _key(recipe), True)


def _key(recipe: Recipe | None) -> tuple[str | None]:
    """Its key takes a tenth of the time to hash that the recipe takes."""
    return (recipe.key if isinstance(recipe, Recipe) else None,)


def check_tensor(name: str, tensor: Tensor | None, axes: str, *, like: Tensor | None = None) -> Tensor:
    """The tensor, which must be dense, of a supported dtype and on the device of ``like``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor {axes}, got {type(tensor).__name__}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be a float tensor {axes} ({_DTYPE_NAMES}), got {_name(tensor.dtype)}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor {axes}, got layout {_name(tensor.layout)}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} must be on the device of the other tensors, {like.device}, got {tensor.device}")
    return tensor


def check_shape(
    name: str, tensor: Tensor | None, axes: str, shape: tuple[int, ...], *, like: Tensor | None = None
) -> Tensor:
    """The tensor, which must have exactly this shape; ``axes`` names its axes, as in "[..., N, C]"."""
    tensor = check_tensor(name, tensor, axes, like=like)
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {axes} = {tuple(shape)}, got {tuple(tensor.shape)}")
    return tensor


def check_optional(name: str, tensor: Tensor | None, axes: str, shape: tuple[int, ...], *, like: Tensor) -> None:
    if tensor is not None:
        check_shape(name, tensor, axes, shape, like=like)


def check_recipe(recipe: Recipe) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a mhckit.Recipe, such as Recipe.preset('paper'), got {type(recipe).__name__}")


def check_streams(x: Tensor, recipe: Recipe | None = None) -> tuple[torch.Size, int, int]:
    """The leading dimensions, N and C of streams x [..., N, C]."""
    check_tensor("x", x, "[..., N, C]")
    if x.ndim < 2:
        raise ValueError(f"x must be [..., N, C] with at least 2 axes, got {tuple(x.shape)}")
    *_, streams, channels = x.shape
    if streams < 1 or channels < 1:
        raise ValueError(f"x must be [..., N, C] with N >= 1 and C >= 1, got {tuple(x.shape)}")
    if recipe is not None:
        check_recipe(recipe)
        if streams != recipe.streams:
            raise ValueError(
                f"x must be [..., N, C] with N = {recipe.streams} (recipe.streams), "
                f"got N = {streams} in {tuple(x.shape)}"
            )
    return x.shape[:-2], streams, channels


def check_parameters(
    x: Tensor, phi: Tensor | None, scale: Tensor | None, bias: Tensor, norm_weight: Tensor | None, recipe: Recipe
) -> None:
    """phi, scale, bias and norm_weight as the recipe wants them for streams x."""
    width = x.shape[-2] * x.shape[-1]
    check_scale_and_bias(scale, bias, recipe, like=x)
    _check_given("phi", phi, "[P, N*C]", recipe)
    if phi is None:
        if norm_weight is not None:
            raise ValueError("norm_weight must be None: the recipe is static (dynamic=False) and projects nothing")
        return
    check_shape("phi", phi, "[P, N*C]", (recipe.rows, width), like=x)
    check_optional("norm_weight", norm_weight, "[N*C]", (width,), like=x)


def check_scale_and_bias(scale: Tensor | None, bias: Tensor, recipe: Recipe, *, like: Tensor | None) -> None:
    _check_given("scale", scale, "[groups]", recipe)
    check_shape("bias", bias, "[P]", (recipe.rows,), like=like)
    if scale is not None:
        check_shape("scale", scale, "[groups]", (len(recipe.groups),), like=like)


def check_mix(mix: Mix, x: Tensor, recipe: Recipe) -> Mix:
    """A Mix (or a plain tuple of its three tensors) that fits streams x and the recipe."""
    if not isinstance(mix, tuple) or len(mix) != 3:
        raise TypeError(f"mix must be a mhckit.Mix(pre, post, res), got {type(mix).__name__}")
    pre, post, res = mix
    lead, streams = x.shape[:-2], x.shape[-2]
    check_shape("mix.pre", pre, "[..., N]", (*lead, streams), like=x)
    check_shape("mix.post", post, "[..., N]", (*lead, streams), like=x)
    if recipe.residual != "identity":
        check_shape("mix.res", res, "[..., N_out, N_in]", (*lead, streams, streams), like=x)
    elif res is not None:
        raise ValueError("mix.res must be None: the recipe has residual='identity'")
    return Mix(pre, post, res)


def check_dtype(name: str, dtype: torch.dtype | None, default: torch.dtype) -> torch.dtype:
    if dtype is None:
        return default
    if dtype not in DTYPES:
        raise TypeError(f"{name} must be one of {_DTYPE_NAMES}, got {_name(dtype)}")
    return dtype


def check_eps(name: str, eps: float) -> float:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{name} must be a number, got {eps!r}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"{name} must be finite and not negative, got {eps}")
    return float(eps)


def _check_given(name: str, tensor: Tensor | None, axes: str, recipe: Recipe) -> None:
    if recipe.dynamic and tensor is None:
        raise ValueError(f"{name} must be a tensor {axes}: the recipe is dynamic (dynamic=True), got None")
    if not recipe.dynamic and tensor is not None:
        raise ValueError(f"{name} must be None: the recipe is static (dynamic=False) and bias holds the logits")


def _name(of_torch: object) -> str:
    return str(of_torch).removeprefix("torch.")
