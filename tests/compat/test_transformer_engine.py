"""Transformer Engine's functions against its math, written out here in its layout; and no copies of streams."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from compare import assert_same, leaf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mhckit.compat import transformer_engine as te
from mhckit.testing import relative_error

# s, b, C, n
SIZES = [(3, 2, 13, 4), (1, 1, 7, 4), (5, 1, 8, 2), (2, 3, 5, 3), (2, 1, 6, 1), (2, 1, 3, 8)]
WITHIN = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _projection(x: Tensor, phi: Tensor, norm_weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    flat = x.float().flatten(-2).flatten(0, -2)  # (M, C*n), column c*n + i
    if norm_weight is None:
        return flat @ phi.float().T, (flat * flat).mean(-1)
    return (flat * norm_weight) @ phi.float().T, (flat * flat).mean(-1)


def _scale(H: Tensor, alpha: Tensor, beta: Tensor, ms: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = H / torch.sqrt(ms + torch.finfo(torch.float32).eps)[:, None]
    parts, biases = logits.split((n, n, n * n), -1), beta[0].split((n, n, n * n))
    h_pre, h_post, h_res = (part * a + b for part, a, b in zip(parts, alpha, biases, strict=True))
    return torch.sigmoid(h_pre), 2 * torch.sigmoid(h_post), h_res


def _sinkhorn(logits: Tensor, iters: int = 20) -> Tensor:
    log = logits
    for _ in range(iters):
        log = log - torch.logsumexp(log, -1, keepdim=True)
        log = log - torch.logsumexp(log, -2, keepdim=True)
    return log.exp()


def _expand_combine(f: Tensor, bias: Tensor | None, H_post: Tensor, x: Tensor, H_res: Tensor) -> Tensor:
    f = f.float() if bias is None else f.float() + bias
    return (f[..., None] @ H_post[..., None, :].float() + x.float() @ H_res.float()).to(x.dtype)


def _sublayer(x: Tensor, f: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """One whole sublayer in Transformer Engine's math: out, H_post, H_res and the next streams."""
    s, b, _, n = x.shape
    H, ms = _projection(x, p["phi"], p["norm_weight"])
    h_pre, h_post, h_res = _scale(H, p["alpha"], p["beta"], ms, n)
    H_post, H_res = h_post.view(s, b, n), _sinkhorn(h_res.view(s, b, n, n))
    out = (x.float() @ h_pre.view(s, b, n, 1))[..., 0].to(x.dtype)
    return out, H_post, H_res, _expand_combine(f + out.tanh(), p["bias"], H_post, x, H_res)


def _parameters(C: int, n: int) -> dict[str, Tensor]:
    P = n * n + 2 * n
    values = {
        "phi": torch.randn(P, n * C) / (n * C) ** 0.5,
        "alpha": torch.tensor([0.7, -1.2, 1.5]),
        "beta": torch.randn(1, P),
        "norm_weight": 1 + 0.3 * torch.randn(n * C),
        "bias": torch.randn(C),
    }
    return {name: value.requires_grad_() for name, value in values.items()}


_assert_same = functools.partial(assert_same, smallest=1e-6)


@pytest.mark.parametrize("layout", ["theirs", "streams first", "flat"])
@pytest.mark.parametrize("size", SIZES)
def test_projection(size: tuple[int, ...], layout: str) -> None:
    s, b, C, n = size
    x, p = leaf(*size), _parameters(C, n)
    leaves = [x, p["phi"], p["norm_weight"]]
    given = {"theirs": x, "streams first": te.to_streams_first(x), "flat": x.view(s * b, C * n)}[layout]
    H, ms = te.mhc_fused_projection(given, p["phi"], False, p["norm_weight"])
    rows = n * n + 2 * n
    assert H.shape == (s * b, -(-rows // 32) * 32)
    assert not H[:, rows:].any()
    _assert_same((H[:, :rows], ms), _projection(x, p["phi"], p["norm_weight"]), leaves)


def test_projection_is_padded_to_32_columns_in_float32() -> None:
    H, ms = te.mhc_fused_projection(leaf(3, 1, 6, 4, dtype=torch.bfloat16), leaf(24, 24, dtype=torch.bfloat16))
    assert H.shape == (3, 32)
    assert ms.shape == (3,)
    assert H.dtype == ms.dtype == torch.float32


@pytest.mark.parametrize("n", [1, 2, 4])
def test_scale(n: int) -> None:
    rows = n * n + 2 * n
    H, ms, p = leaf(5, 32), (torch.rand(5) + 0.5).requires_grad_(), _parameters(1, n)
    leaves = [H, p["alpha"], p["beta"], ms]
    ours = te.mhc_fused_scale(H, p["alpha"], p["beta"], ms, n)
    assert [tuple(h.shape) for h in ours] == [(5, n), (5, n), (5, n * n)]
    _assert_same(ours, _scale(H[:, :rows], p["alpha"], p["beta"], ms, n), leaves)
    assert {h.dtype for h in te.mhc_fused_scale(H.bfloat16(), p["alpha"], p["beta"], ms, n)} == {torch.bfloat16}


@pytest.mark.parametrize("iters", [1, 3, 20])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_sinkhorn(n: int, iters: int) -> None:
    logits = (2 * torch.randn(3, 2, n, n)).requires_grad_()
    ours, theirs = te.mhc_fused_sinkhorn(logits, n, iters=iters), _sinkhorn(logits, iters)
    assert n == 2 or relative_error(theirs, theirs.mT) > 0.05  # doubly stochastic 2 x 2 matrices are symmetric
    _assert_same((ours,), (theirs,), [logits])
    assert te.mhc_fused_sinkhorn(logits.bfloat16(), n, False).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_aggregate(size: tuple[int, ...], first: bool, dtype: torch.dtype) -> None:
    s, b, _, n = size
    x, H_pre = leaf(*size, dtype=dtype), leaf(s, b, n)
    ours = te.mhc_fused_aggregate(te.to_streams_first(x) if first else x, H_pre, n)
    assert ours.dtype == dtype
    theirs = (x.float() @ H_pre[..., None])[..., 0].to(dtype)
    _assert_same((ours,), (theirs,), [x, H_pre], WITHIN[dtype])


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_expand_combine(size: tuple[int, ...], with_bias: bool, dtype: torch.dtype) -> None:
    s, b, C, n = size
    f, x = leaf(s, b, C, dtype=dtype), leaf(*size, dtype=dtype)
    bias, H_post, H_res = leaf(C) if with_bias else None, leaf(s, b, n), leaf(s, b, n, n)
    leaves = [f, H_post, x, H_res, *([] if bias is None else [bias])]
    ours = te.mhc_fused_expand_combine(f, bias, H_post, x, H_res, n)
    assert ours.dtype == dtype
    _assert_same((ours,), (_expand_combine(f, bias, H_post, x, H_res),), leaves, WITHIN[dtype])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("size", SIZES)
def test_sublayer(size: tuple[int, ...], dtype: torch.dtype, fused: bool) -> None:
    """The functions of a sublayer one after the other, and generate_mix_and_aggregate in place of four of them."""
    s, b, C, n = size
    x, f, p = leaf(*size, dtype=dtype), leaf(s, b, C, dtype=dtype), _parameters(C, n)
    theirs = _sublayer(x, f, p)
    streams = te.to_streams_first(x)
    if fused:
        out, H_post, H_res = te.mhc_generate_mix_and_aggregate(
            streams, p["phi"], p["alpha"], p["beta"], norm_weight=p["norm_weight"]
        )
    else:
        H, ms = te.mhc_fused_projection(streams, p["phi"], norm_weight=p["norm_weight"])
        h_pre, h_post, h_res = te.mhc_fused_scale(H, p["alpha"], p["beta"], ms, n)
        H_post, H_res = h_post.view(s, b, n), te.mhc_fused_sinkhorn(h_res.view(s, b, n, n), n)
        out = te.mhc_fused_aggregate(streams, h_pre.view(s, b, n), n)
    y = te.mhc_fused_expand_combine(f + out.tanh(), p["bias"], H_post, streams, H_res, n)
    assert out.dtype == y.dtype == dtype
    assert H_post.dtype == H_res.dtype == torch.float32
    _assert_same((out, H_post, H_res, y), theirs, [x, f, *p.values()], 2 * WITHIN[dtype])


class _Copies(TorchDispatchMode):
    """Counts what copies a tensor of some size: clones and casts, and operators that get it in another memory order."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.seen = numel, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        for arg in args:
            if isinstance(arg, Tensor) and arg.numel() == self.numel:
                copies = name in ("clone", "copy", "copy_", "_to_copy", "contiguous")
                if copies or (func.namespace == "mhckit" and not arg.is_contiguous()):
                    self.seen.append(name)
        return func(*args, **(kwargs or {}))


def _chain(x: Tensor, p: dict[str, Tensor], layers: int = 3) -> Tensor:
    n = x.shape[-1]
    for _ in range(layers):
        out, H_post, H_res = te.mhc_generate_mix_and_aggregate(x, p["phi"], p["alpha"], p["beta"])
        x = te.mhc_fused_expand_combine(out, p["bias"], H_post, x, H_res, n)
        H, _ms = te.mhc_fused_projection(x, p["phi"])
        x = te.mhc_fused_expand_combine(
            te.mhc_fused_aggregate(x, H_post, n), None, H[:, :n].view_as(H_post), x, H_res, n
        )
    return x


def test_a_chain_copies_no_streams() -> None:
    s, b, C, n = 3, 2, 13, 4
    p = _parameters(C, n)
    x = te.to_streams_first(leaf(s, b, C, n)).detach().requires_grad_()
    with _Copies(x.numel()) as copies:
        y = _chain(x, p)
    assert copies.seen == []
    assert y.shape == x.shape
    assert y.stride() == x.stride()
    assert y.mT.is_contiguous()
    weight = torch.randn(s, b, n, C).mT
    with _Copies(x.numel()) as copies:
        (dx,) = torch.autograd.grad(y, x, weight)
    assert copies.seen == []
    assert dx.mT.is_contiguous()


def test_a_chain_from_their_layout_copies_on_entry_alone() -> None:
    """Their contiguous x costs a copy in each call that mixes streams, here two; what they return costs none."""
    x, p = torch.randn(3, 2, 13, 4), _parameters(13, 4)
    with _Copies(x.numel()) as copies:
        y = _chain(x, p)
    assert copies.seen == ["clone", "clone"]
    torch.testing.assert_close(y, _chain(te.to_streams_first(x), p))


def test_copies_in_backward_would_show() -> None:
    x = te.to_streams_first(torch.randn(3, 2, 13, 4)).requires_grad_()
    y = _chain(x, _parameters(13, 4), layers=1)
    with _Copies(x.numel()) as copies:
        torch.autograd.grad(y, x, torch.randn(3, 2, 13, 4))
    assert copies.seen == ["post_bwd"]


@pytest.mark.parametrize("layout", ["theirs", "streams first", "flat"])
def test_projection_copies_no_streams(layout: str) -> None:
    x = torch.randn(3, 2, 13, 4)
    given = {"theirs": x, "streams first": te.to_streams_first(x), "flat": x.view(6, 52)}[layout]
    with _Copies(x.numel()) as copies:
        te.mhc_fused_projection(given, torch.randn(24, 52))
    assert copies.seen == []


def test_to_streams_first() -> None:
    x = torch.randn(3, 2, 13, 4)
    y = te.to_streams_first(x)
    assert torch.equal(x, y)
    assert y.mT.is_contiguous()
    assert te.to_streams_first(y).data_ptr() == y.data_ptr()
    h = torch.randn(3, 2, 13)
    with _Copies(x.numel()) as copies:
        expanded = te.to_streams_first(h[..., None].expand(*h.shape, 4))
    assert len(copies.seen) <= 1
    assert torch.equal(expanded, h[..., None].repeat(1, 1, 1, 4))


def test_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    p, x = _parameters(5, 4), te.to_streams_first(torch.randn(2, 1, 5, 4))
    compiled = torch.compile(_chain, fullgraph=True, backend="aot_eager")(x, p)
    torch.testing.assert_close(compiled, _chain(x, p))
    assert compiled.mT.is_contiguous()


_REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[Any, list[tuple[str, Any]]] = {
    te.mhc_fused_projection: [
        ("x", _REQUIRED), ("phi", _REQUIRED), ("use_tf32", True), ("norm_weight", None),
        ("fused_grad_x_acc_buffer", None), ("use_split_k", False),
    ],
    te.mhc_fused_scale: [(name, _REQUIRED) for name in ("H", "alpha", "beta", "ms", "n")],
    te.mhc_fused_sinkhorn: [("H_res", _REQUIRED), ("n", 4), ("recompute_hist", True), ("iters", 20)],
    te.mhc_fused_aggregate: [
        ("x", _REQUIRED), ("H_pre", _REQUIRED), ("n", _REQUIRED), ("use_tf32", True), ("fused_grad_x_acc_buffer", None),
    ],
    te.mhc_fused_expand_combine: [
        *((name, _REQUIRED) for name in ("f", "bias", "H_post", "x", "H_res", "n")),
        ("use_tf32", True), ("fused_grad_x_acc_buffer", None),
    ],
    te.mhc_generate_mix_and_aggregate: [
        *((name, _REQUIRED) for name in ("x", "phi", "alpha", "beta")),
        ("norm_weight", None), ("use_tf32", True), ("fused_grad_x_acc_buffer", None), ("use_split_k", False),
    ],
}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signatures(function: Any) -> None:
    parameters = inspect.signature(function).parameters.items()
    assert [(name, parameter.default) for name, parameter in parameters] == SIGNATURES[function]


X, PHI, ALPHA, BETA = torch.randn(3, 2, 5, 4), torch.randn(24, 20), torch.randn(3), torch.randn(1, 24)
GENERATE, COMBINE = te.mhc_generate_mix_and_aggregate, te.mhc_fused_expand_combine


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"phi must be \(n\*n \+ 2n, n\*C\) = \(24, 20\), got \(24, 16\)",
         lambda: GENERATE(X, PHI[:, :16], ALPHA, BETA)),
        (ValueError, r"alpha must be \(3,\) = \(3,\), got \(2,\)", lambda: GENERATE(X, PHI, ALPHA[:2], BETA)),
        (ValueError, r"beta must be \(1, n\*n \+ 2n\) = \(1, 24\), got \(24, 1\)",
         lambda: GENERATE(X, PHI, ALPHA, BETA.T)),
        (ValueError, r"norm_weight must be \(n\*C,\)", lambda: GENERATE(X, PHI, ALPHA, BETA, torch.ones(4))),
        (ValueError, "fused_grad_x_acc_buffer must be None",
         lambda: GENERATE(X, PHI, ALPHA, BETA, fused_grad_x_acc_buffer=torch.zeros(3, 2, 5, 4))),
        (ValueError, "fused_grad_x_acc_buffer must be None",
         lambda: te.mhc_fused_aggregate(X, X[..., 0, :], 4, True, X)),
        (ValueError, r"phi must be .*24 rows for n = 4, got \(23, 20\)", lambda: te.mhc_fused_projection(X, PHI[:23])),
        (ValueError, r"x must be \(M, n\*C\) or \(\.\.\., C, n\) with n = 4",
         lambda: te.mhc_fused_projection(X.mT, PHI)),
        (ValueError, r"x must be .* with n = 4, of the 24 rows", lambda: te.mhc_fused_projection(X[0, 0, :, :3], PHI)),
        (ValueError, r"x must be \(s, b, C, n\) with n = 2, got n = 4",
         lambda: te.mhc_fused_aggregate(X, X[..., 0, :], 2)),
        (ValueError, r"H_pre must be \(s, b, n\) = \(3, 2, 4\)", lambda: te.mhc_fused_aggregate(X, ALPHA, 4)),
        (TypeError, "n must be an int, got 4.0", lambda: te.mhc_fused_aggregate(X, X[..., 0, :], 4.0)),
        (ValueError, r"f must be \(s, b, C\) = \(3, 2, 5\), got \(3, 2, 4\)",
         lambda: COMBINE(X[..., 0, :], None, X[..., 0, :], X, X[..., :4, :], 4)),
        (ValueError, r"H_res must be \(s, b, n, n\) = \(3, 2, 4, 4\)",
         lambda: COMBINE(X[..., 0], None, X[..., 0, :], X, X, 4)),
        (ValueError, r"H must be \(M, 32\) with n\*n \+ 2n = 24 columns or more, got \(5, 23\)",
         lambda: te.mhc_fused_scale(torch.ones(5, 23), ALPHA, BETA, torch.ones(5), 4)),
        (ValueError, r"ms must be \(M,\) = \(5,\)",
         lambda: te.mhc_fused_scale(torch.ones(5, 32), ALPHA, BETA, torch.ones(4), 4)),
        (ValueError, r"H_res must be \(s, b, n, n\)", lambda: te.mhc_fused_sinkhorn(X)),
        (ValueError, "iterations must be at least 1", lambda: te.mhc_fused_sinkhorn(X[..., :4, :], iters=0)),
        (TypeError, r"x must be a torch.Tensor \(\.\.\., C, n\), got list", lambda: te.to_streams_first([1.0])),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message):
        call()


def test_no_tokens() -> None:
    out, H_post, H_res = GENERATE(torch.randn(0, 2, 5, 4), PHI, ALPHA, BETA)
    assert (out.shape, H_post.shape, H_res.shape) == ((0, 2, 5), (0, 2, 4), (0, 2, 4, 4))
    assert COMBINE(out, None, H_post, torch.randn(0, 2, 5, 4), H_res, 4).shape == (0, 2, 5, 4)
    assert te.mhc_fused_projection(torch.randn(0, 2, 5, 4), PHI)[0].shape == (0, 32)
