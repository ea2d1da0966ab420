"""Ours against theirs: values, and gradients of a random weighting of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhckit.testing import relative_error


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def assert_same(got: Any, want: Any, leaves: list[Tensor], within: float = 1e-5, *, smallest: float) -> None:
    """smallest: the norm up to which a gradient counts as none; with one stream the matrix is 1 and has none."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        assert relative_error(a, b) < within, f"output {index}"
    weights = [torch.randn(o.shape) for o in want]
    theirs = torch.autograd.grad(sum((o * w).sum() for o, w in zip(want, weights, strict=True)), leaves)
    ours = torch.autograd.grad(sum((o * w).sum() for o, w in zip(got, weights, strict=True)), leaves)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == b.dtype
        if b.norm() > smallest:
            assert relative_error(a, b) < within, f"gradient {index}"
