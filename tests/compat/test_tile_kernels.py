"""mhckit.compat.tile_kernels against the formulas of TileKernels in float64, forward and gradients.

Its package cannot be installed here; signatures and orientation are those of its source, written down below.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from mhckit.compat import tile_kernels
from mhckit.testing import relative_error

UNUSUAL: dict[str, Any] = dict(
    norm_eps=0.3, post_mult_value=1.7, pre_eps=0.07, sinkhorn_eps=0.02, sinkhorn_repeat=3, n_splits=1
)
SHAPES = [((2, 3), 4, 7), ((5,), 3, 9), ((1, 2, 2), 2, 5), ((4,), 8, 3)]
REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "expand_from_embedding": ({"x": REQUIRED, "mhc_mult": 4}, {}),
    "mhc_pre": (
        {"residual": REQUIRED, "fn": REQUIRED, "scale": REQUIRED, "base": REQUIRED},
        {
            "norm_weight": None,
            "norm_eps": 1e-6,
            "mhc_mult": 4,
            "post_mult_value": 1.0,
            "pre_eps": 1e-6,
            "sinkhorn_eps": 1e-6,
            "sinkhorn_repeat": 10,
            "n_splits": 16,
        },
    ),
    "mhc_post": (
        {"x": REQUIRED, "residual": REQUIRED, "post_layer_mix": REQUIRED, "comb_res_mix": REQUIRED, "out": None},
        {},
    ),
    "mhc_head": (
        {"residual": REQUIRED, "fn": REQUIRED, "scale": REQUIRED, "base": REQUIRED},
        {"norm_weight": None, "norm_eps": 1e-6, "mhc_mult": 4, "pre_eps": 1e-6, "n_splits": 16},
    ),
}


def _inputs(
    lead: tuple[int, ...] = (2, 3),
    streams: int = 4,
    channels: int = 7,
    dtype: torch.dtype = torch.float32,
    rows: int | None = None,
    scales: int = 3,
) -> dict[str, Tensor]:
    """Leaves of a call, with logits of std near 1 and scales of either sign."""
    generator = torch.Generator().manual_seed(31)
    rows, width = rows or streams * (streams + 2), streams * channels
    values = {
        "residual": torch.randn(*lead, streams, channels, generator=generator).to(dtype),
        "fn": torch.randn(rows, width, generator=generator) / width**0.5,
        "scale": torch.tensor([0.8, -1.3, 1.6])[:scales],
        "base": torch.randn(rows, generator=generator),
        "norm_weight": 1 + 0.4 * torch.randn(width, generator=generator),
        "x": torch.randn(*lead, channels, generator=generator).to(dtype),
    }
    return {name: value.requires_grad_() for name, value in values.items()}


def _projection(residual: Tensor, fn: Tensor, norm_weight: Tensor | None, norm_eps: float) -> Tensor:
    """What scale multiplies: an RMSNorm of all streams together, with its weight, times fn, stream by stream."""
    streams, channels = residual.shape[-2:]
    normed = residual.double() / (residual.double().square().mean((-2, -1), keepdim=True) + norm_eps).sqrt()
    if norm_weight is not None:
        normed = normed * norm_weight.double().reshape(streams, channels)
    return torch.einsum("...ic,pic->...p", normed, fn.double().reshape(-1, streams, channels))


def _pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    *,
    norm_eps: float = 1e-6,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """layer_input, post_mix [..., N, 1] and comb_mix [..., in, out], in float64."""
    n = residual.shape[-2]
    per_row = torch.cat([scale[i].double().expand(size) for i, size in enumerate((n, n, n * n))])
    logits = _projection(residual, fn, norm_weight, norm_eps) * per_row + base.double()
    pre_mix = 1 / (1 + torch.exp(-logits[..., :n])) + pre_eps
    post_mix = post_mult_value / (1 + torch.exp(-logits[..., n : 2 * n]))
    starts = [logits[..., 2 * n + i * n : 2 * n + (i + 1) * n] for i in range(n)]
    comb_mix = torch.stack([torch.softmax(row, -1) + sinkhorn_eps for row in starts], -2)
    for step in range(2 * sinkhorn_repeat - 1):  # columns first: the softmax was the first row step
        comb_mix = comb_mix / (comb_mix.sum(-2 if step % 2 == 0 else -1, keepdim=True) + sinkhorn_eps)
    return torch.einsum("...i,...ic->...c", pre_mix, residual.double()), post_mix[..., None], comb_mix


def _post(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor) -> Tensor:
    """Stream o gets what column o of comb_mix takes from the streams."""
    mixed = torch.einsum("...io,...ic->...oc", comb_mix.double(), residual.double())
    return mixed + post_mix.double() * x.double()[..., None, :]


def _by_formula(leaves: dict[str, Tensor], **settings: Any) -> tuple[Tensor, ...]:
    arguments = [leaves[name] for name in ("residual", "fn", "scale", "base")]
    layer_input, post_mix, comb_mix = _pre(*arguments, leaves.get("norm_weight"), **settings)
    return layer_input, post_mix, comb_mix, _post(leaves["x"], leaves["residual"], post_mix, comb_mix)


def _by_functions(leaves: dict[str, Tensor], **settings: Any) -> tuple[Tensor, ...]:
    residual = leaves["residual"]
    layer_input, (post_mix, comb_mix) = tile_kernels.mhc_pre(
        residual,
        leaves["fn"],
        leaves["scale"],
        leaves["base"],
        norm_weight=leaves.get("norm_weight"),
        mhc_mult=residual.shape[-2],
        **settings,
    )
    return layer_input, post_mix, comb_mix, tile_kernels.mhc_post(leaves["x"], residual, post_mix, comb_mix)


def _gradients(outputs: tuple[Tensor, ...], leaves: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(32)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
    loss = sum((o.double() * w).sum() for o, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(loss, list(leaves))  # type: ignore[arg-type]


def _assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], bound: float = 1e-5) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, index
        assert relative_error(a, b) < bound, index


@pytest.mark.parametrize("name", tile_kernels.__all__)
def test_signatures(name: str) -> None:
    positional, keyword = SIGNATURES[name]
    parameters = inspect.signature(getattr(tile_kernels, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == list(positional.items())
    assert [(p.name, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY] == list(keyword.items())
    assert len(parameters) == len(positional) + len(keyword)


@pytest.mark.parametrize("norm_weight", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("settings", [{}, UNUSUAL], ids=["defaults", "unusual"])
@pytest.mark.parametrize(("lead", "streams", "channels"), SHAPES)
def test_pre_and_post(
    lead: tuple[int, ...], streams: int, channels: int, settings: dict[str, Any], norm_weight: bool
) -> None:
    leaves = _inputs(lead, streams, channels)
    if not norm_weight:
        del leaves["norm_weight"]
    got, want = _by_functions(leaves, **settings), _by_formula(leaves, **settings)
    if streams > 2:  # asymmetric: a transposed matrix would show; of size 2 doubly stochastic matrices are symmetric
        assert relative_error(want[2], want[2].mT) > 0.1
    _assert_close(got, want)
    _assert_close(_gradients(got, leaves.values()), _gradients(want, leaves.values()))


@pytest.mark.parametrize("name", [name for name in UNUSUAL if name != "n_splits"])
def test_every_setting_arrives(name: str) -> None:
    leaves, setting = _inputs(), {name: UNUSUAL[name]}
    got, want, default = _by_functions(leaves, **setting), _by_formula(leaves, **setting), _by_formula(leaves)
    _assert_close(got, want)
    assert max(relative_error(a, b) for a, b in zip(want, default, strict=True)) > 1e-3


@pytest.mark.parametrize("settings", [{"sinkhorn_eps": 0.0}, {"sinkhorn_repeat": 1}, {"pre_eps": 0.0}])
def test_corner_settings(settings: dict[str, Any]) -> None:
    leaves = _inputs()
    got, want = _by_functions(leaves, **settings), _by_formula(leaves, **settings)
    _assert_close(got, want)
    _assert_close(_gradients(got, leaves.values()), _gradients(want, leaves.values()))


def test_orientation_by_hand() -> None:
    """comb_mix[0, 1] = 1 sends stream 0 to stream 1 and nothing back."""
    residual = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    comb_mix = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    out = tile_kernels.mhc_post(torch.tensor([3.0, 4.0]), residual, torch.tensor([[0.5], [2.0]]), comb_mix)
    assert out.tolist() == [[1.5, 2.0], [7.0, 10.0]]


def test_bfloat16() -> None:
    """Mixes as exact as in float32; the rest is off by its last rounding."""
    leaves = _inputs(dtype=torch.bfloat16)
    got, want = _by_functions(leaves, **UNUSUAL), _by_formula(leaves, **UNUSUAL)
    assert [o.dtype for o in got] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    eps = torch.finfo(torch.bfloat16).eps
    _assert_close(got[1:3], want[1:3])
    _assert_close((got[0], got[3]), (want[0], want[3]), eps)
    ours, exact = _gradients(got, leaves.values()), _gradients(want, leaves.values())
    assert [g.dtype for g in ours] == [leaf.dtype for leaf in leaves.values()]
    _assert_close(ours, exact, 4 * eps)


def test_norm_weight_counts_without_gradients() -> None:
    leaves = _inputs()
    with torch.no_grad():
        got = _by_functions(leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, _by_functions(leaves), strict=True))


def test_pre_alone_can_be_differentiated() -> None:
    """No gradient waits in the storage for a mhc_post that never comes."""
    leaves = _inputs()
    got, want = _by_functions(leaves)[:3], _by_formula(leaves)[:3]
    del leaves["x"]
    _assert_close(_gradients(got, leaves.values()), _gradients(want, leaves.values()))


def test_post_into_out() -> None:
    leaves = _inputs()
    _, post_mix, comb_mix, want = _by_functions(leaves)
    out = torch.full_like(leaves["residual"], float("nan"), requires_grad=False)
    got = tile_kernels.mhc_post(leaves["x"], leaves["residual"], post_mix, comb_mix, out)
    assert got is out
    assert torch.equal(out, want)
    _assert_close(_gradients((got,), leaves.values()), _gradients(_by_functions(leaves)[3:], leaves.values()), 1e-7)


def test_post_takes_contiguous_and_transposed_matrices() -> None:
    leaves = _inputs()
    _, post_mix, comb_mix, want = _by_functions(leaves)
    assert torch.equal(tile_kernels.mhc_post(leaves["x"], leaves["residual"], post_mix, comb_mix.contiguous()), want)


@pytest.mark.parametrize("norm_weight", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize(("lead", "streams", "channels"), SHAPES)
def test_head(lead: tuple[int, ...], streams: int, channels: int, norm_weight: bool) -> None:
    leaves = _inputs(lead, streams, channels, rows=streams, scales=1)
    del leaves["x"]
    if not norm_weight:
        del leaves["norm_weight"]
    weight, settings = leaves.get("norm_weight"), {"norm_eps": 0.2, "pre_eps": 0.05}
    residual, fn, scale, base = (leaves[name] for name in ("residual", "fn", "scale", "base"))
    got = tile_kernels.mhc_head(residual, fn, scale, base, norm_weight=weight, mhc_mult=streams, **settings)
    logits = _projection(residual, fn, weight, 0.2) * scale.double() + base.double()
    want = torch.einsum("...i,...ic->...c", torch.sigmoid(logits) + 0.05, residual.double())
    _assert_close((got,), (want,))
    _assert_close(_gradients((got,), leaves.values()), _gradients((want,), leaves.values()))


def test_head_with_padded_fn_and_scalar_scale() -> None:
    leaves = _inputs(rows=4, scales=1, dtype=torch.bfloat16)
    residual, fn, scale, base = (leaves[name] for name in ("residual", "fn", "scale", "base"))
    want = tile_kernels.mhc_head(residual, fn, scale, base)
    assert want.dtype == torch.bfloat16
    padded = torch.cat([fn, torch.full((20, 28), float("nan"))])
    assert torch.equal(tile_kernels.mhc_head(residual, padded, scale[0], base), want)


@pytest.mark.parametrize("streams", [1, 3, 4])
def test_expand(streams: int) -> None:
    x = torch.randn(2, 5, 7, dtype=torch.bfloat16, requires_grad=True)
    residual = tile_kernels.expand_from_embedding(x, streams)
    assert residual.shape == (2, 5, streams, 7)
    assert residual.dtype == torch.bfloat16
    assert all(torch.equal(residual[..., i, :], x) for i in range(streams))
    weight = torch.randn(2, 5, streams, 7).bfloat16()
    (gradient,) = torch.autograd.grad(residual, x, weight)
    assert torch.equal(gradient, weight.float().sum(-2).bfloat16())
    assert tile_kernels.expand_from_embedding(x).shape == (2, 5, 4, 7)


def test_compiles_after_a_call() -> None:
    leaves = _inputs()
    want = _by_functions(leaves, sinkhorn_repeat=4)
    got = torch.compile(_by_functions, fullgraph=True, backend="aot_eager")(leaves, sinkhorn_repeat=4)
    _assert_close(got, want, 1e-6)
    _assert_close(_gradients(got, leaves.values()), _gradients(want, leaves.values()), 1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"residual": torch.zeros(2, 3, 7)}, ValueError, r"with mhc_mult = 4, got \(2, 3, 7\)"),
        ({"residual": None}, TypeError, "residual must be a torch.Tensor .*, got NoneType"),
        ({"fn": torch.zeros(28, 24)}, ValueError, r"fn must be .* = \(24, 28\), got \(28, 24\)"),
        ({"scale": torch.zeros(1)}, ValueError, r"scale must be \[3\] = \(3,\), got \(1,\)"),
        ({"base": torch.zeros(4)}, ValueError, r"base must be .* = \(24,\), got \(4,\)"),
        ({"norm_weight": torch.zeros(7)}, ValueError, r"norm_weight must be .* = \(28,\), got \(7,\)"),
        ({"sinkhorn_repeat": 0}, ValueError, "iterations must be at least 1, got 0 .*sinkhorn_repeat is iterations"),
        ({"mhc_mult": 0}, ValueError, "mhc_mult must be a positive int, got 0"),
    ],
)
def test_errors_of_pre(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = _inputs() | change
    del arguments["x"]
    with pytest.raises(error, match=message):
        tile_kernels.mhc_pre(**arguments)


def test_errors_of_the_rest() -> None:
    leaves = _inputs()
    residual, x = leaves["residual"], leaves["x"]
    _, (post_mix, comb_mix) = tile_kernels.mhc_pre(residual, leaves["fn"], leaves["scale"], leaves["base"])
    with pytest.raises(ValueError, match=r"x must be \[..., hidden_size\] = \(2, 3, 7\), got \(2, 3, 4, 7\)"):
        tile_kernels.mhc_post(residual, x[..., None, :].expand_as(residual), post_mix, comb_mix)
    with pytest.raises(ValueError, match=r"post_layer_mix must be \[..., mhc_mult, 1\] = \(2, 3, 4, 1\), got"):
        tile_kernels.mhc_post(x, residual, post_mix.squeeze(-1), comb_mix)
    with pytest.raises(ValueError, match=r"comb_res_mix must be \[..., mhc_mult, mhc_mult\] = \(2, 3, 4, 4\), got"):
        tile_kernels.mhc_post(x, residual, post_mix, post_mix)
    with pytest.raises(TypeError, match=r"out .* must have the dtype of residual, torch.float32, got torch.bfloat16"):
        tile_kernels.mhc_post(x, residual, post_mix, comb_mix, residual.detach().bfloat16())
    with pytest.raises(ValueError, match=r"fn must be .* = \(4, 28\), got \(5, 28\)"):
        tile_kernels.mhc_head(residual, leaves["fn"][:5], leaves["scale"][:1], leaves["base"][:4])
    with pytest.raises(ValueError, match=r"scale must be \[1\] or a scalar, got \(3,\)"):
        tile_kernels.mhc_head(residual, leaves["fn"][:4], leaves["scale"], leaves["base"][:4])
    with pytest.raises(ValueError, match=r"mhc_mult must be a positive int, got 2\.0"):
        tile_kernels.expand_from_embedding(x, 2.0)
