"""Error bounds that are measured, not chosen: an implementation may be as inexact as torch at the same dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact value; NaN anywhere gives NaN, which fails every bound."""
    got, exact = got.detach().double(), exact.detach().double()
    difference, size = (got - exact).norm(), exact.norm()
    return float(difference / size) if size > 0 else float(difference)


def assert_as_accurate(
    got: Tensor, reference: Callable[..., Tensor], *args: Tensor, slack: float = 2.0, roundings: float = 1.0
) -> None:
    """got is at most ``slack`` times as far from the float64 result as the reference run at the dtype of args.

    ``roundings`` times the last bit of the largest value is allowed on top: where the reference happens to be exact, a
    different order of sums may still round once.
    """
    exact = reference(*(arg.double() if arg.is_floating_point() else arg for arg in args))
    allowed = slack * _max_error(reference(*args), exact)
    allowed += roundings * torch.finfo(got.dtype).eps * float(exact.abs().max() if exact.numel() else 0)
    error = _max_error(got, exact)
    if not error <= allowed:
        raise AssertionError(f"error {error:.3g} against float64 exceeds {allowed:.3g}")


def _max_error(value: Tensor, exact: Tensor) -> float:
    if value.shape != exact.shape:
        raise AssertionError(f"shape {tuple(value.shape)} differs from {tuple(exact.shape)}")
    return float((value.double() - exact).abs().max()) if exact.numel() else 0.0
