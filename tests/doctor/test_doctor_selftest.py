"""The self-test passes what is right, and finds what is wrong, missing or raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mhckit
from mhckit.doctor import selftest
from mhckit.doctor.gpu import GIB, Gpu
from mhckit.doctor.paths import INTERPRETER, KERNELS, RAISES, REFERENCE
from mhckit.doctor.selftest import SIZES, Size, operator_finding, self_test
from mhckit.testing import OPERATORS

SMALL = tuple(Size(5, 7, size.dtype) for size in SIZES)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_reference_passes(operator: str) -> None:
    finding = operator_finding(operator, "cpu", SMALL)
    assert finding.status == "ok", finding.seen
    assert finding.values["path"] == REFERENCE and len(finding.values["worst"]) == 2
    assert "allowed" in finding.seen and not finding.advice


def _replace(monkeypatch: pytest.MonkeyPatch, operator: str, change: Any) -> None:
    """An operator whose results, but not those in float64, are changed."""
    right = getattr(mhckit, operator)

    def replaced(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = right(x, *args, **kwargs)
        return result if x.dtype == torch.float64 else change(result)

    monkeypatch.setattr(mhckit, operator, replaced)


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 1.05 * gradients[0]


@pytest.mark.parametrize(
    ("change", "result"),
    [
        (lambda y: 1.05 * y.detach() + (y - y.detach()), "output 0"),
        (_WrongBackward.apply, "gradient of"),
        (lambda y: y * torch.where(torch.arange(y.numel()).view_as(y) == 3, torch.nan, 1.0).to(y), "output 0"),
    ],
    ids=["forward", "backward", "nan"],
)
@pytest.mark.parametrize("size", SMALL, ids=str)
def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch, change: Any, result: str, size: Size) -> None:
    _replace(monkeypatch, "post", change)
    finding = operator_finding("post", "cpu", (size,))
    assert finding.status == "failed" and result in finding.seen and finding.advice
    assert operator_finding("pre", "cpu", (size,)).status == "ok"


def test_one_wrong_dtype_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace(monkeypatch, "pre", lambda h: 1.01 * h if h.dtype == torch.float32 else h)
    finding = operator_finding("pre", "cpu", SMALL)
    assert finding.status == "failed" and "float32" in finding.seen and "bfloat16" not in finding.seen


def test_what_raises_fails_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfResources(Exception):
        """As Triton's."""

    def raising(*args: Any, **kwargs: Any) -> Any:
        raise OutOfResources("out of resource: shared memory, Required: 300000\nmore")

    monkeypatch.setattr(mhckit, "enter", raising)
    finding = operator_finding("enter", "cpu", SMALL)
    assert finding.status == "failed"
    assert finding.seen == "OutOfResources: out of resource: shared memory, Required: 300000"


@pytest.mark.parametrize("path", [RAISES, INTERPRETER])
def test_what_is_no_test_is_skipped(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(selftest, "path_of", lambda operator, x: path)
    assert operator_finding("pre", "cpu", SMALL).status == "skipped"


def test_kernels_are_judged_by_the_error_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with Triton's interpreter for kernels: float32 is right in it."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(selftest, "path_of", lambda operator, x: KERNELS)
    with mhckit.backend("triton"):
        finding = operator_finding("expand", "cpu", SMALL[:1])
        assert finding.status == "ok" and finding.seen.startswith(KERNELS), finding.seen
        monkeypatch.setattr(mhckit.ops._register, "_load_kernel", _doubled(mhckit.ops._register._load_kernel))
        assert operator_finding("expand", "cpu", (Size(6, 7, torch.float32),)).status == "failed"


def _doubled(load: Any) -> Any:
    def loaded(name: str, *rest: Any) -> Any:
        planned = load(name, *rest)

        def run(*args: Any, **kwargs: Any) -> Any:
            result, _plan = planned(*args, **kwargs)
            return 2 * result, None

        return run

    return loaded


def test_without_a_working_gpu_every_operator_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that torch reports and cannot use, as after a fault."""
    warmed: list[int] = []
    monkeypatch.setattr(mhckit, "warmup", lambda channels, *args, **kwargs: warmed.append(channels))
    monkeypatch.setattr(selftest.torch, "empty", _raise_on_cuda(torch.empty))
    findings = list(self_test(Gpu("Sample GPU", (9, 0), 100 * GIB, 140 * GIB)))
    assert warmed == [4096]
    assert [finding.name for finding in findings] == list(OPERATORS)
    assert all(finding.status == "failed" and "unspecified launch failure" in finding.seen for finding in findings)
    assert all("mhckit.backend('reference')" in finding.advice for finding in findings)


def _raise_on_cuda(empty: Any) -> Any:
    def checked(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device == "cuda":
            raise RuntimeError("CUDA error: unspecified launch failure")
        return empty(*args, device=device, **kwargs)

    return checked
