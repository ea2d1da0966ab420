"""Norms of gradients that may be spread over processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def norms_and_nonfinite(gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The norm [G] of every gradient, and how many of its values are not finite [G].

    Of a DTensor, of the whole one: then every process has to call this, and what is spread alike is summed in one
    message.
    """
    sums: list[Tensor] = [torch.empty(0)] * len(gradients)
    alike: dict[Any, list[int]] = {}
    for index, gradient in enumerate(gradients):
        alike.setdefault(_placement(gradient), []).append(index)
    for placement, indices in alike.items():
        parts = torch.stack([_square_and_nonfinite(_local(gradients[index])) for index in indices])
        for index, row in zip(indices, _summed(parts, placement), strict=True):
            sums[index] = row
    squares, nonfinite = torch.stack([row.to(sums[0].device) for row in sums]).unbind(-1)
    return squares.sqrt(), nonfinite


def _square_and_nonfinite(values: Tensor) -> Tensor:
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.stack([wide.square().sum(), wide.isfinite().logical_not().sum().to(wide.dtype)])


def _placement(gradient: Any) -> Any:
    """How a gradient is spread, with sums that are still to be made counted as made; None if it is not spread."""
    if not hasattr(gradient, "placements"):
        return None
    from torch.distributed.tensor import Replicate

    return gradient.device_mesh, tuple(Replicate() if p.is_partial() else p for p in gradient.placements)


def _local(gradient: Any) -> Tensor:
    placement = _placement(gradient)
    return gradient if placement is None else gradient.redistribute(*placement).to_local()


def _summed(parts: Tensor, placement: Any) -> Tensor:
    """Sums over processes of what each has of gradients that are spread in this way."""
    if placement is None:
        return parts
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = placement
    kinds = [Replicate() if kind.is_replicate() else Partial() for kind in placements]
    return DTensor.from_local(parts, mesh, kinds, run_check=False).full_tensor()
