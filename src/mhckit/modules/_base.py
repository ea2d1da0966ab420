"""What HyperConnection and HyperHead share: a recipe, float32 parameters, a choice of backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mhckit.ops import backend as use_backend
from mhckit.ops._backend import Backend, check_backend
from mhckit.ops._check import check_dtype
from mhckit.recipe import Recipe, as_recipe


class HyperModule(nn.Module):
    """A module whose own parameters ignore casts below float32 (``.to(torch.bfloat16)``, ``.half()``), not moves.

    Coefficients are computed from a few small float32 tensors; rounding those costs accuracy and saves nothing.
    """

    def __init__(
        self,
        dim: int,
        recipe: Recipe | str,
        *,
        out_dtype: torch.dtype | None,
        keep_float32: bool,
        backend: Backend | None,
    ) -> None:
        super().__init__()
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise ValueError(f"dim must be a positive int, got {dim!r}")
        self.dim = dim
        self.recipe = as_recipe(recipe)
        self.out_dtype = None if out_dtype is None else check_dtype("out_dtype", out_dtype, out_dtype)
        self.keep_float32 = keep_float32
        self.backend: Backend | None = None if backend is None else check_backend(backend)

    def use_own_backend(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.backend is None else use_backend(self.backend)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keeping(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            lowered = applied.dtype in (torch.bfloat16, torch.float16) and applied.dtype != tensor.dtype
            return tensor.to(applied.device) if lowered else applied

        return super()._apply(keeping if self.keep_float32 else fn, recurse)


@torch.no_grad()
def set_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Copy values into a parameter, which FSDP2 may have sharded already."""
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = parameter
        values = distribute_tensor(values.to(sharded.device, sharded.dtype), sharded.device_mesh, sharded.placements)
    parameter.copy_(values)


def parameter(*shape: int, device: torch.device | str | None) -> nn.Parameter:
    """An uninitialised float32 parameter, whatever the default dtype."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=device))
