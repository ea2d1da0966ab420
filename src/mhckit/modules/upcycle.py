r"""Upcycle: an mHC network that computes, at step 0, exactly what a plain pre-norm network computes.

    plain:    h <- h + f(h)
    streams:  y[o] = sum_i H[o,i] x[i] + post[o] f(sum_i pre[i] x[i])

With pre = 1/N, columns of H that sum to 1 and post of mean 1, the mean m of the streams follows

    mean_o y[o] = 1/N sum_i (sum_o H[o,i]) x[i] + mean(post) f(m) = m + f(m)

whatever the streams are, and a head that takes the mean returns the plain network's h. Only the means are tied, so post
is spread around 1, another way in each sublayer: streams differ from the first write on, and training can tell them
apart. phi = 0 makes the coefficients those of the bias alone; scale is not 0, so phi learns from the first step on. As
long as everything reads the mean, mixing that keeps the mean changes nothing: a residual map whose columns sum to 1
whatever the logits has its first gradient at the second step, when pre has begun to differ.

`reset_parameters` starts near this, up to what scale lets through of a random phi; `upcycle` is exact up to rounding,
also that of parameters that were let go to bfloat16 (``keep_float32=False``: 1e-3 after a few sublayers).
One thing is not rounding: where Sinkhorn adds an eps to its sums (1e-6 in deepseek_v4, glm5_next and liger, 1e-8 in
mhc_triton), columns of H sum to 1 - eps, so that every sublayer shrinks what it adds to by that much: 1e-4 after 100
sublayers, less than bfloat16 rounds away at each. A recipe that is off by more than 2e-6 a sublayer is an error.

N streams; H [o, i] maps stream i to stream o.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mhckit.ops.activate import activate_reference, shape_residual_logits
from mhckit.ops.sinkhorn import sinkhorn_reference
from mhckit.recipe import Recipe

from . import _init
from ._base import HyperModule, set_values
from .hyper_connection import HyperConnection
from .hyper_head import HyperHead

Model = TypeVar("Model", bound=nn.Module)
KeyMapping = Mapping[str, str | None] | Callable[[str], str | None]

TOLERANCE = 2e-6  # how far pre's sum, post's mean and the sums of H's columns may be from 1
NEAREST_TO_ONE = 1e-9  # sigmoid(x) = 1 has no solution; 1 - 1e-9 is 1 in float32
ROOM_TO_LEARN = 1e-4  # how far from its limits post must stay
SHOWN_KEYS = 8

# Parameters that upcycle sets or leaves as they are; out_norm_weight is not among them, for it is the sublayer's norm.
OWN_PARAMETERS = ("phi", "scale", "bias", "norm_weight", "fn", "base")


def upcycle(model: Model, state_dict: Mapping[str, Any] | None = None, *, mapping: KeyMapping | None = None) -> Model:
    """Make an mHC model compute what the plain pre-norm model computes, and load that model's weights.

        model = mhckit.upcycle(MyModelWithStreams(config), plain.state_dict())

    The model must start its streams as copies of one vector (`Streams.expand`) and end them with a `HyperHead` or their
    mean, and otherwise have the sublayers of the plain one. It can then be trained like any other.

    Args:
        model: a model with HyperConnections; changed in place. Unsharded, if a state_dict is to be loaded.
        state_dict: of the plain model. None sets the hyper-connections alone, for a model that has its weights.
        mapping: from the plain model's keys to this model's, where they differ: a function of the key, or a dict of
            prefixes (whole names between dots; the longest that fits is replaced; "" is every key's). None as a result
            leaves the key out.
            A norm that moved into its connection (``norm=True``) maps to ``<connection>.out_norm_weight``.

    Returns:
        The same model. Errors are raised before anything is changed: ValueError for a recipe that cannot compute the
        plain residual, for keys that are missing, unexpected or double, and for tensors of another shape.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if mapping is not None and state_dict is None:
        raise ValueError("mapping renames the keys of a state_dict, and none was given")
    starts = [start for name, module in model.named_modules() for start in _exact_start(name, module)]
    if not any(isinstance(module, HyperConnection) for module in model.modules()):
        raise ValueError("model has no mhckit.HyperConnection: there is nothing to upcycle")
    if state_dict is not None:
        weights = _renamed(state_dict, mapping)
        _check_keys(model, weights)
        model.load_state_dict(weights, strict=False)
    for parameter, values in starts:
        set_values(parameter, values)
    return model


def _exact_start(name: str, module: nn.Module) -> Iterable[tuple[nn.Parameter, Tensor]]:
    """Parameters of a connection or a head, and their values."""
    if isinstance(module, HyperConnection):
        projection, scale, static = module.phi, module.scale, module.bias
        values = exact_bias(module.recipe, module.layer_index)
    elif isinstance(module, HyperHead) and module.base is not None:
        projection, scale, static = module.fn, module.scale, module.base
        values = exact_head_base(module.recipe)
    else:
        return
    if static.is_meta:
        raise ValueError(f"{name or 'model'} is on the meta device: give it memory first (to_empty)")
    yield static, values
    if projection is not None and scale is not None:
        yield projection, torch.zeros(projection.shape)
        yield scale, torch.full(scale.shape, _init.SCALE)


def exact_bias(recipe: Recipe, layer_index: int) -> Tensor:
    """bias [P] of a HyperConnection, in float64, that makes its streams' mean the plain residual."""
    n = recipe.streams
    residual = _init.initial_bias(recipe, layer_index)[2 * n :]
    pre = torch.full((n,), 1 / n, dtype=torch.float64) if recipe.residual == "free" else _pre_bias(recipe)
    bias = torch.cat([pre, _post_bias(recipe, layer_index), residual])
    _check_coefficients(recipe, bias)
    return bias


def exact_head_base(recipe: Recipe) -> Tensor:
    """base [N] of a learned HyperHead, in float64, that makes it the mean."""
    return _pre_bias(recipe.replace(normalized_pre=False))


def _pre_bias(recipe: Recipe) -> Tensor:
    """[N], such that a stream's weight is 1/N."""
    sigmoid = 1 / recipe.streams - (0 if recipe.normalized_pre else recipe.pre_eps)
    if sigmoid <= 0:
        raise ValueError(
            f"read weights of 1/N are out of reach: they are sigmoid + pre_eps, with pre_eps={recipe.pre_eps} and "
            f"streams={recipe.streams}"
        )
    return torch.full((recipe.streams,), _logit(min(sigmoid, 1 - NEAREST_TO_ONE)), dtype=torch.float64)


def _post_bias(recipe: Recipe, layer_index: int) -> Tensor:
    """[N]: a spread around 1, as `reset_parameters` has it, smaller where 1 is near the largest value."""
    ramp = _init.rotated_ramp(recipe.streams, layer_index)
    if recipe.residual == "free":
        return torch.tensor([1 + _init.POST_SPREAD * place for place in ramp], dtype=torch.float64)
    largest = recipe.post_scale + recipe.post_eps
    if largest <= 1 + ROOM_TO_LEARN:
        raise ValueError(
            f"write weights of 1 are out of reach: they stay below post_scale + post_eps = {largest:g}; "
            "use a recipe with a larger post_scale"
        )
    spread = min(_init.POST_SPREAD, (largest - 1) / 2, (1 - recipe.post_eps) / 2)
    targets = [(1 + spread * place - recipe.post_eps) / recipe.post_scale for place in ramp]
    return torch.tensor([_logit(target) for target in targets], dtype=torch.float64)


def _logit(p: float) -> float:
    return math.log(p) - math.log1p(-p)


def _check_coefficients(recipe: Recipe, bias: Tensor) -> None:
    """What the bias is made for, computed with the recipe's own math."""
    static = recipe.replace(dynamic=False)
    pre, post, logits = activate_reference(None, None, None, bias, static)
    res_logits = shape_residual_logits(logits, static)
    res = torch.eye(recipe.streams) if res_logits is None else sinkhorn_reference(res_logits[None], static)[0]
    for what, values in (
        ("N times the read weights", recipe.streams * pre),
        ("the mean of the write weights", post.mean()),
        ("the sums of the residual map's columns", res.sum(0)),
    ):
        if not ((values - 1).abs() <= TOLERANCE).all():
            farthest = values.flatten()[(values - 1).abs().argmax()].item()
            raise ValueError(
                f"this recipe cannot compute the plain residual: {what} would be {farthest:.8f} instead of 1 "
                f"({recipe.key or 'paper'}); smaller eps fields bring it nearer"
            )


def _renamed(state_dict: Mapping[str, Any], mapping: KeyMapping | None) -> dict[str, Any]:
    """The state dict under this model's keys."""
    weights: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, tensor in state_dict.items():
        target = _target(key, mapping)
        if target is None:
            continue
        if target in weights:
            raise ValueError(f"{origin[target]!r} and {key!r} of the state_dict both map to {target!r}")
        weights[target], origin[target] = tensor, key
    return weights


def _target(key: str, mapping: KeyMapping | None) -> str | None:
    if mapping is None:
        return key
    if callable(mapping):
        target = mapping(key)
        if target is not None and not isinstance(target, str):
            raise TypeError(f"mapping must return a str or None, got {type(target).__name__} for {key!r}")
        return target
    names = key.split(".")
    for length in range(len(names), -1, -1):
        prefix = ".".join(names[:length])
        if prefix in mapping:
            replacement = mapping[prefix]
            return None if replacement is None else ".".join(filter(None, [replacement, *names[length:]]))
    return key


def _check_keys(model: nn.Module, weights: dict[str, Any]) -> None:
    """Every tensor that is not upcycle's own comes from the plain model, and nothing else comes from there."""
    present = model.state_dict(keep_vars=True)
    if any(hasattr(tensor, "placements") for tensor in present.values()):
        raise ValueError("the model is sharded: load its weights yourself, then call upcycle without a state_dict")
    own = _own_keys(model) & present.keys()
    tied = {id(tensor) for key, tensor in present.items() if key in weights}  # loaded, under this name or another
    problems = {
        "missing": [key for key, tensor in present.items() if key not in own and id(tensor) not in tied],
        "unexpected": [key for key in weights if key not in present],
        "of another shape": [
            f"{key} {tuple(weights[key].shape)} instead of {tuple(tensor.shape)}"
            for key, tensor in present.items()
            if key in weights and isinstance(tensor, Tensor) and weights[key].shape != tensor.shape
        ],
        "of hyper-connections, which a plain model has not (use load_state_dict)": [k for k in weights if k in own],
    }
    found = [f"{kind}: {_listed(keys)}" for kind, keys in problems.items() if keys]
    if found:
        raise ValueError("the state_dict does not fit the model; tensors " + "; ".join(found))


def _own_keys(model: nn.Module) -> set[str]:
    return {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, HyperModule)
        for key in OWN_PARAMETERS
    }


def _listed(keys: list[str]) -> str:
    rest = len(keys) - SHOWN_KEYS
    return ", ".join(keys[:SHOWN_KEYS]) + (f" and {rest} more" if rest > 0 else "")
