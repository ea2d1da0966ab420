"""The error bounds that other tests rely on can themselves fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhckit.testing import assert_as_accurate, relative_error

X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def _product(x: Tensor) -> Tensor:
    return x @ x


def test_as_accurate_as_torch_passes() -> None:
    assert_as_accurate(_product(X), _product, X)
    assert_as_accurate(_product(X.double()).bfloat16(), _product, X)
    assert_as_accurate(X[:0], lambda x: x, X[:0])


def test_less_accurate_fails() -> None:
    error = (_product(X).double() - _product(X.double())).abs().max()
    rounding = torch.finfo(torch.bfloat16).eps * _product(X.double()).abs().max()
    got = _product(X.double())
    got[3, 5] += 1.5 * (2 * error + rounding)
    with pytest.raises(AssertionError, match="against float64 exceeds"):
        assert_as_accurate(got.bfloat16(), _product, X)


def test_nan_and_another_shape_fail() -> None:
    got = _product(X)
    got[0, 0] = torch.nan
    with pytest.raises(AssertionError, match="error nan"):
        assert_as_accurate(got, _product, X)
    with pytest.raises(AssertionError, match="shape"):
        assert_as_accurate(_product(X)[:1], _product, X)


def test_relative_error() -> None:
    one = torch.tensor([3.0, 4.0])
    assert relative_error(1.1 * one, one) == pytest.approx(0.1, rel=1e-5)
    assert relative_error(one, 0 * one) == 5.0
    assert not relative_error(torch.tensor([torch.nan, 4.0]), one) < 1e9
