"""Checks of arguments that more than one system takes."""

from __future__ import annotations

from torch import Tensor

from mhckit.ops._check import check_eps, check_tensor


def check_count(name: str, value: int, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def check_positive_eps(eps: float) -> float:
    eps = check_eps("eps", eps)
    if not 0 < eps < 1:
        raise ValueError(f"eps must be above 0 and below 1, got {eps}")
    return eps


def check_scalar(name: str, value: Tensor, like: Tensor) -> Tensor:
    """The one element of a tensor of any shape, in float32."""
    if check_tensor(name, value, "[]", like=like).numel() != 1:
        raise ValueError(f"{name} must have one element, got {tuple(value.shape)}")
    return value.float().reshape(())
