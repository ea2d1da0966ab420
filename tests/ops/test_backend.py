"""Choosing an implementation: explicitly, by context, by module, and never silently another."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch

import mhckit
from mhckit import MHC, HyperConnection, Recipe, Streams
from mhckit.ops import _backend, _register
from mhckit.ops.expand import expand_backward, expand_reference


@pytest.fixture
def kernel_of_expand(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A stand-in for mhckit.kernels.expand that records its calls."""
    ran: list[str] = []
    module = types.ModuleType("mhckit.kernels.expand")

    def expand_fwd(h: torch.Tensor, streams: int) -> torch.Tensor:
        ran.append("fwd")
        return expand_reference(h, streams)

    def expand_bwd(dx: torch.Tensor) -> torch.Tensor:
        ran.append("bwd")
        return expand_backward(dx)

    module.__dict__.update(expand_fwd=expand_fwd, expand_bwd=expand_bwd)
    monkeypatch.setitem(sys.modules, "mhckit.kernels.expand", module)
    monkeypatch.setattr(_backend, "KERNELS", frozenset({"expand"}))
    _register._kernel.cache_clear()
    yield ran
    _register._kernel.cache_clear()


def test_kernel_is_used_on_request_forward_and_backward(kernel_of_expand: list[str]) -> None:
    h = torch.randn(3, 5, requires_grad=True)
    with mhckit.backend("triton"):
        x = mhckit.expand(h, 4)
    x.sum().backward()  # outside the block: backward uses what forward used
    assert kernel_of_expand == ["fwd", "bwd"]
    torch.testing.assert_close(h.grad, torch.full_like(h, 4))


def test_kernels_get_contiguous_gradients(kernel_of_expand: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd hands on gradients in any layout: here an expanded one."""
    seen: list[bool] = []

    def expand_bwd(dx: torch.Tensor) -> torch.Tensor:
        seen.append(dx.is_contiguous())
        return expand_backward(dx)

    monkeypatch.setattr(sys.modules["mhckit.kernels.expand"], "expand_bwd", expand_bwd)
    h = torch.randn(3, 5, requires_grad=True)
    with mhckit.backend("triton"):
        mhckit.expand(h, 4).backward(torch.ones(1).expand(3, 4, 5))
    assert seen == [True]


def test_auto_and_reference_run_the_reference_on_a_cpu(kernel_of_expand: list[str]) -> None:
    mhckit.expand(torch.randn(3, 5), 4)
    with mhckit.backend("reference"):
        mhckit.expand(torch.randn(3, 5), 4)
    assert kernel_of_expand == []


def test_missing_kernel_raises_instead_of_falling_back() -> None:
    with mhckit.backend("triton"), pytest.raises(NotImplementedError, match="no Triton kernel for 'expand'"):
        mhckit.expand(torch.randn(3, 5), 4)


def test_too_many_streams_for_a_kernel(kernel_of_expand: list[str]) -> None:
    with mhckit.backend("triton"), pytest.raises(ValueError, match=r"at most 8 streams, got 9"):
        mhckit.expand(torch.randn(3, 5), 9)
    assert mhckit.expand(torch.randn(3, 5), 9).shape == (3, 9, 5)


def test_blocks_nest_and_restore() -> None:
    with mhckit.backend("reference"):
        with mhckit.backend("triton"):
            assert _backend._active == "triton"
        assert _backend._active == "reference"
        with pytest.raises(ZeroDivisionError), mhckit.backend("triton"):
            raise ZeroDivisionError
        assert _backend._active == "reference"
    assert _backend._active == "auto"


def test_one_block_entered_twice() -> None:
    block = mhckit.backend("reference")
    with block:
        with mhckit.backend("triton"):
            with block:
                assert _backend._active == "reference"
            assert _backend._active == "triton"
        assert _backend._active == "reference"
    assert _backend._active == "auto"


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'reference', 'triton', got 'cuda'"):
        mhckit.backend("cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend must be one of"):
        HyperConnection(8, backend="cuda")  # type: ignore[arg-type]


def test_module_argument() -> None:
    streams = Streams(torch.randn(3, 4, 8))
    HyperConnection(8, backend="reference")(streams)
    with pytest.raises(NotImplementedError, match="no Triton kernel for 'enter'"):
        HyperConnection(8, backend="triton")(streams)
    assert _backend._active == "auto"
    with mhckit.backend("triton"):
        HyperConnection(8, backend="reference")(streams)
        MHC(torch.nn.Identity(), 8, backend="reference")(streams.x)  # its write-back too


def test_compiled_code_follows_the_switch(kernel_of_expand: list[str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda h: mhckit.expand(h, 4), fullgraph=True, backend="aot_eager")
    compiled(torch.randn(3, 5))
    assert kernel_of_expand == []
    with mhckit.backend("triton"):
        compiled(torch.randn(3, 5))
    assert kernel_of_expand == ["fwd"]


def test_module_argument_compiles() -> None:
    torch._dynamo.reset()
    connection = HyperConnection(8, Recipe.preset("deepseek_v4"), backend="reference")
    x = torch.randn(3, 4, 8)
    compiled = torch.compile(lambda x: connection(Streams(x))[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), connection(Streams(x))[0])
