"""Parameter groups for optimisers: the parameters of hyper-connections apart from all others.

    group            parameters                                                             weight decay
    mhc              phi of a HyperConnection, fn of a HyperHead: matrices                  yes
    mhc_no_decay     scale, bias, base, norm_weight, out_norm_weight                        0
    other            every other parameter with two dimensions or more                      yes
    other_no_decay   every other parameter with fewer: biases, norm weights, gates          0

scale and bias say where the coefficients rest: decay would pull pre towards 1/2, post towards post_scale / 2 and H away
from the identity, whatever the gradient says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ._base import HyperModule

PROJECTIONS = frozenset({"phi", "fn", "hc_fn"})
NO_DECAY = frozenset({"scale", "bias", "base", "norm_weight", "out_norm_weight", "hc_scale", "hc_base"})
# Connections of other libraries, transformers first, are known by the end of their class's name and these parameters.
FOREIGN_SUFFIXES = ("HyperConnection", "HyperHead")
FOREIGN_PARAMETERS = ({"fn", "scale", "base"}, {"hc_fn", "hc_scale", "hc_base"})

NAMES = ("mhc", "mhc_no_decay", "other", "other_no_decay")


def param_groups(
    model: nn.Module, *, weight_decay: float = 0.01, mhc: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Groups of a model's trainable parameters, as torch.optim takes them.

        optimiser = torch.optim.AdamW(mhckit.param_groups(model, weight_decay=0.1, mhc={"lr": 1e-3}), lr=3e-4)

    or, for an optimiser of matrices beside one for the rest:

        *others, matrices = sorted(mhckit.param_groups(model), key=lambda group: group["name"] == "other")
        muon, adamw = torch.optim.Muon([matrices]), torch.optim.AdamW(others)

    (Muon takes matrices alone: move embeddings, and experts kept as one tensor, from ``other`` to the rest first.)

    Args:
        model: any module: with mhckit's modules, or a DeepSeek-V4, GLM-5-next or Hy-V4 of transformers, patched by
            mhckit or not.
        weight_decay: of the groups ``mhc`` and ``other``.
        mhc: options of the optimiser for ``mhc`` and ``mhc_no_decay``, such as their own ``lr``. A ``weight_decay``
            here replaces that of ``mhc``; ``mhc_no_decay`` keeps 0.

    Returns:
        Up to four groups, in the order ``mhc``, ``mhc_no_decay``, ``other``, ``other_no_decay``; each a dict with
        ``name``, ``params`` and ``weight_decay``. A group without parameters is left out. Every parameter that requires
        a gradient is in exactly one, also where modules share it: what a hyper-connection uses is its own.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    own_options = dict(mhc or {})
    decay = _check_weight_decay("weight_decay", weight_decay)
    mhc_decay = _check_weight_decay("mhc['weight_decay']", own_options.pop("weight_decay", decay))
    for reserved in ("name", "params"):
        if reserved in own_options:
            raise ValueError(f"mhc must hold options of the optimiser, got {reserved!r}, which param_groups sets")
    found: dict[str, list[nn.Parameter]] = {name: [] for name in NAMES}
    connected = _mhc_parameters(model)
    for parameter in model.parameters():  # each once, shared or not
        if parameter.requires_grad:
            by_dimensions = "other" if parameter.ndim >= 2 else "other_no_decay"
            found[connected.get(parameter, by_dimensions)].append(parameter)
    options: dict[str, dict[str, Any]] = {
        "mhc": {**own_options, "weight_decay": mhc_decay},
        "mhc_no_decay": {**own_options, "weight_decay": 0.0},
        "other": {"weight_decay": decay},
        "other_no_decay": {"weight_decay": 0.0},
    }
    return [{"name": name, "params": found[name], **options[name]} for name in NAMES if found[name]]


def _mhc_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """The group of each parameter that belongs to a hyper-connection or a head.

    A class with other names than mhckit's own says which is which: ``mhckit_projections`` and ``mhckit_no_decay``.
    """
    groups: dict[nn.Parameter, str] = {}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        projections, no_decay = PROJECTIONS, NO_DECAY
        kind: Any = type(module)
        if hasattr(kind, "mhckit_projections"):
            projections, no_decay = kind.mhckit_projections, kind.mhckit_no_decay
            own = dict(module.named_parameters())
        elif not (isinstance(module, HyperModule) or _is_foreign_connection(module, own)):
            continue
        for name, parameter in own.items():
            if name in projections:
                groups[parameter] = "mhc"
            elif name in no_decay:
                groups[parameter] = "mhc_no_decay"
    return groups


def _is_foreign_connection(module: nn.Module, own: dict[str, nn.Parameter]) -> bool:
    named_so = type(module).__name__.endswith(FOREIGN_SUFFIXES)
    return named_so and any(names <= own.keys() for names in FOREIGN_PARAMETERS)


def _check_weight_decay(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be finite and not negative, got {value}")
    return float(value)
