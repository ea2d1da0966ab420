"""mhckit: Manifold-Constrained Hyper-Connections for PyTorch."""

from mhckit.modules import MHC, HyperConnection, HyperHead, Streams, param_groups, recompute, upcycle, warmup
from mhckit.ops import (
    Mix,
    activate,
    backend,
    coefficients,
    enter,
    expand,
    explain,
    head,
    junction,
    leave,
    post,
    pre,
    project,
    sinkhorn,
)
from mhckit.recipe import Recipe

__version__ = "0.1.0"

__all__ = [
    "MHC",
    "HyperConnection",
    "HyperHead",
    "Mix",
    "Recipe",
    "Streams",
    "activate",
    "backend",
    "coefficients",
    "enter",
    "expand",
    "explain",
    "head",
    "junction",
    "leave",
    "param_groups",
    "post",
    "pre",
    "project",
    "recompute",
    "sinkhorn",
    "upcycle",
    "warmup",
]
