"""Choosing an implementation: explicitly, by context, by module, and never silently another."""

from __future__ import annotations

import os
import subprocess
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
    anywhere = types.ModuleType("mhckit.kernels._runtime")
    anywhere.__dict__.update(check=lambda device: None)
    monkeypatch.setitem(sys.modules, "mhckit.kernels._runtime", anywhere)
    _register._load_kernel.cache_clear()
    yield ran
    _register._load_kernel.cache_clear()


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


def test_what_kernels_cannot_do_raises_instead_of_falling_back(kernel_of_expand: list[str]) -> None:
    with mhckit.backend("triton"):
        with pytest.raises(ValueError, match=r"at most 8 streams: 'expand' got 9; use mhckit.backend\('reference'\)"):
            mhckit.expand(torch.randn(3, 5), 9)
        with pytest.raises(TypeError, match=r"compute in float32: 'expand' got float64; use mhckit.backend"):
            mhckit.expand(torch.randn(3, 5, dtype=torch.float64), 4)
        with pytest.raises(TypeError, match="'activate' got float64"):
            mhckit.activate(
                torch.randn(3, 24, dtype=torch.float64), torch.rand(3), torch.ones(3), torch.zeros(24), recipe=Recipe()
            )
    assert kernel_of_expand == []
    assert mhckit.expand(torch.randn(3, 5), 9).shape == (3, 9, 5)


def _fresh(code: str, **environment: str) -> None:
    """Run code in a process where no test has touched Triton or the environment."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=kept | environment)


def test_kernels_need_a_gpu_or_the_interpreter() -> None:
    code = """
import torch, mhckit
try:
    with mhckit.backend("triton"):
        print(mhckit.explain(torch.ones(3, 4, 5)))
        mhckit.expand(torch.ones(3, 5), 4)
except RuntimeError as error:
    assert "needs CUDA tensors, got tensors on 'cpu'; use mhckit.backend('auto')" in str(error), error
else:
    raise AssertionError("ran without a GPU")
"""
    _fresh(code)


def test_kernels_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch, mhckit
try:
    with mhckit.backend("triton"):
        mhckit.expand(torch.ones(3, 5), 4)
except RuntimeError as error:
    assert "install Triton, or use mhckit.backend('reference')" in str(error), error
else:
    raise AssertionError("ran without Triton")
"""
    _fresh(code)


def test_kernels_with_an_old_triton() -> None:
    code = """
import torch, triton, mhckit
triton.__version__ = "3.2.0"
try:
    with mhckit.backend("triton"):
        mhckit.expand(torch.ones(3, 5), 4)
except RuntimeError as error:
    assert "need Triton 3.6 or newer" in str(error) and "got 3.2.0" in str(error), error
else:
    raise AssertionError("ran with an old Triton")
"""
    _fresh(code)


def test_explain(kernel_of_expand: list[str]) -> None:
    x = torch.randn(3, 4, 5)
    assert mhckit.explain(x) == "torch reference: backend is 'auto' and x is float32 on cpu"
    with mhckit.backend("triton"):
        assert mhckit.explain(x.bfloat16()) == "Triton kernels: backend is 'triton' and x is bfloat16 on cpu"
        assert mhckit.explain(x.double()).startswith("raises: backend is 'triton' and x is float64 on cpu, but the")
        assert "at most 8 streams" in mhckit.explain(torch.randn(3, 9, 5))
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., N, C\] with at least 2 axes"):
        mhckit.explain(torch.randn(5))


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
    with pytest.raises(TypeError, match="compute in float32: 'enter' got float64"):
        HyperConnection(8, backend="triton")(Streams(streams.x.double()))
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
