"""mhckit.compat.liger against Liger's formulas in float64, forward and gradients, and against Liger itself.

Liger's own kernels run on a GPU or, without one, in Triton's interpreter; both need liger-kernel to be installed.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhckit.compat import liger
from mhckit.testing import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x", "phi", "b", "alpha_pre", "alpha_post", "alpha_res")
UNUSUAL: dict[str, Any] = dict(tmax=3, rms_eps=0.3, pre_eps=0.07, sinkhorn_eps=0.02, post_mult=1.3)
SHAPES = [((2, 3), 4, 7), ((5,), 3, 9), ((1, 2, 2), 2, 5), ((4,), 8, 3)]


def _inputs(
    lead: tuple[int, ...] = (2, 3),
    streams: int = 4,
    channels: int = 7,
    dtype: torch.dtype = torch.float32,
    phi_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Leaves of a call, with logits of std near 1 and alphas of either sign."""
    generator = torch.Generator().manual_seed(21)
    width, columns = streams * channels, streams * streams + 2 * streams
    values = {
        "x": torch.randn(*lead, streams, channels, generator=generator).to(dtype),
        "phi": (torch.randn(width, columns, generator=generator) / width**0.5).to(phi_dtype),
        "b": torch.randn(columns, generator=generator),
        "alpha_pre": torch.tensor(0.7),
        "alpha_post": torch.tensor(-1.2),
        "alpha_res": torch.tensor(1.5),
        "f_out": torch.randn(*lead, channels, generator=generator).to(dtype),
    }
    return {name: value.to(device).requires_grad_() for name, value in values.items()}


def _formula(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    *alphas: Tensor,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """h_pre, h_post, h_res in float64, whatever the dtypes; gradients flow through the casts."""
    n = x.shape[-2]
    x, phi, b = x.double(), phi.double(), b.double()
    flat = torch.cat([x[..., i, :] for i in range(n)], -1)
    logits = torch.einsum("...k,kp->...p", flat, phi) / (flat.square().mean(-1, keepdim=True) + rms_eps).sqrt()
    l_pre, l_post, l_res = (
        alpha.double() * part + bias
        for alpha, part, bias in zip(alphas, logits.split([n, n, n * n], -1), b.split([n, n, n * n]), strict=True)
    )
    rows = [l_res[..., o * n : (o + 1) * n] for o in range(n)]
    h_res = torch.stack([torch.softmax(row, -1) + sinkhorn_eps for row in rows], -2)
    for step in range(2 * tmax - 1):  # columns first: the softmax was the first row step
        h_res = h_res / (h_res.sum(-2 if step % 2 == 0 else -1, keepdim=True) + sinkhorn_eps)
    return 1 / (1 + torch.exp(-l_pre)) + pre_eps, post_mult / (1 + torch.exp(-l_post)), h_res


def _read(x: Tensor, h_pre: Tensor) -> Tensor:
    return torch.einsum("...i,...ic->...c", h_pre.double(), x.double())


def _write(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    mixed = torch.einsum("...oi,...ic->...oc", h_res.double(), x.double())
    return mixed + h_post.double()[..., None] * f_out.double()[..., None, :]


def _by_formula(leaves: dict[str, Tensor], **settings: Any) -> tuple[Tensor, ...]:
    h_pre, h_post, h_res = _formula(*(leaves[name] for name in NAMES), **settings)
    x, f_out = leaves["x"], leaves["f_out"]
    return h_pre, h_post, h_res, _write(x, f_out, h_post, h_res), _read(x, h_pre)


def _by_functions(module: Any, leaves: dict[str, Tensor], **settings: Any) -> tuple[Tensor, ...]:
    h_pre, h_post, h_res = module.liger_mhc_coeffs(*(leaves[name] for name in NAMES), allow_fp32=True, **settings)
    x_out, x_in = module.liger_mhc_apply(leaves["x"], leaves["f_out"], h_pre, h_post, h_res, return_x_in=True)
    return h_pre, h_post, h_res, x_out, x_in


def _gradients(outputs: tuple[Tensor, ...], leaves: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(22)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device) for o in outputs]
    loss = sum((o.double() * w).sum() for o, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(loss, list(leaves))  # type: ignore[arg-type]


def _assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], bound: float = 1e-5) -> None:
    assert [tensor.shape for tensor in got] == [tensor.shape for tensor in want]
    for index, (a, b) in enumerate(zip(_scalars_together(got), _scalars_together(want), strict=True)):
        assert relative_error(a, b) < bound, index


def _scalars_together(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Scalars last, as one vector: the gradient of an alpha is a sum over tokens, and alone it may nearly cancel."""
    scalars = [tensor for tensor in tensors if tensor.ndim == 0]
    return [*(tensor for tensor in tensors if tensor.ndim), *([torch.stack(scalars)] if scalars else [])]


@pytest.mark.parametrize("settings", [{}, UNUSUAL], ids=["defaults", "unusual"])
@pytest.mark.parametrize(("lead", "streams", "channels"), SHAPES)
def test_functions(lead: tuple[int, ...], streams: int, channels: int, settings: dict[str, Any]) -> None:
    leaves = _inputs(lead, streams, channels)
    want, got = _by_formula(leaves, **settings), _by_functions(liger, leaves, **settings)
    if streams > 2:  # asymmetric: a transposed matrix would show; of size 2 doubly stochastic matrices are symmetric
        assert relative_error(want[2], want[2].mT) > 0.1
    _assert_close(got, want)
    _assert_close(_gradients(got, leaves.values()), _gradients(want, leaves.values()))


@pytest.mark.parametrize("name", UNUSUAL)
def test_every_setting_arrives(name: str) -> None:
    leaves, setting = _inputs(), {name: UNUSUAL[name]}
    got, want, default = _by_functions(liger, leaves, **setting), _by_formula(leaves, **setting), _by_formula(leaves)
    _assert_close(got, want)
    assert max(relative_error(a, b) for a, b in zip(want, default, strict=True)) > 1e-3


@pytest.mark.parametrize("settings", [{"sinkhorn_eps": 0.0}, {"tmax": 1}, {"sinkhorn_eps": 0.0, "tmax": 1}])
def test_corner_settings(settings: dict[str, Any]) -> None:
    leaves = _inputs()
    got, want = _by_functions(liger, leaves, **settings), _by_formula(leaves, **settings)
    _assert_close(got, want)
    _assert_close(_gradients(got, leaves.values()), _gradients(want, leaves.values()))


@pytest.mark.parametrize("phi_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype, phi_dtype: torch.dtype) -> None:
    """Coefficients as exact as in float32; the rest is off by its last rounding."""
    leaves = _inputs(dtype=dtype, phi_dtype=phi_dtype)
    got, want = _by_functions(liger, leaves, **UNUSUAL), _by_formula(leaves, **UNUSUAL)
    assert [o.dtype for o in got] == [torch.float32] * 3 + [dtype] * 2
    _assert_close(got[:3], want[:3])
    _assert_close(got[3:], want[3:], torch.finfo(dtype).eps)
    # Each gradient of x is the sum of three rounded ones: of coefficients, pre and post_res.
    ours, exact = _gradients(got, leaves.values()), _gradients(want, leaves.values())
    assert [g.dtype for g in ours] == [leaf.dtype for leaf in leaves.values()]
    _assert_close(ours, exact, 4 * torch.finfo(dtype).eps)


def _layer(channels: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(channels, channels, dtype=dtype), nn.Tanh())


def _module(leaves: dict[str, Tensor], layer: nn.Module, cls: Any = liger.LigerMHC, **settings: Any) -> Any:
    """A module with the values of the leaves."""
    *_, streams, channels = leaves["x"].shape
    module = cls(layer, hc=streams, c=channels, phi_dtype=leaves["phi"].dtype, allow_fp32=True, **settings)
    with torch.no_grad():
        for name in NAMES[1:]:
            getattr(module, name).copy_(leaves[name])
    return module


@pytest.mark.parametrize("settings", [{}, UNUSUAL], ids=["defaults", "unusual"])
def test_module(settings: dict[str, Any]) -> None:
    leaves = _inputs()
    module = _module(leaves, _layer(7), **settings)
    got = module(leaves["x"])

    exact = copy.deepcopy(module).double()
    x = leaves["x"].detach().double().requires_grad_()
    h_pre, h_post, h_res = _formula(x, *(getattr(exact, name) for name in NAMES[1:]), **settings)
    want = _write(x, exact.layer(_read(x, h_pre)), h_post, h_res)
    _assert_close((got,), (want,))
    _assert_close(
        _gradients((got,), [leaves["x"], *module.parameters()]), _gradients((want,), [x, *exact.parameters()])
    )


def test_forward_returns_coefficients() -> None:
    """A layer may be any callable; the coefficients it returns can be differentiated together with x_out."""
    leaves = _inputs()
    arguments = (leaves["x"], torch.tanh, *(leaves[name] for name in NAMES[1:]))
    x_out, coeffs = liger.liger_mhc_forward(*arguments, allow_fp32=True, return_coeffs=True, **UNUSUAL)
    assert type(coeffs) is tuple
    h_pre, h_post, h_res = _formula(*(leaves[name] for name in NAMES), **UNUSUAL)
    x = leaves["x"]
    want = (_write(x, _read(x, h_pre).tanh(), h_post, h_res), h_pre, h_post, h_res)
    _assert_close((x_out, *coeffs), want)
    used = [leaves[name] for name in NAMES]
    _assert_close(_gradients((x_out, *coeffs), used), _gradients(want, used))
    assert torch.equal(liger.liger_mhc_forward(*arguments, allow_fp32=True, **UNUSUAL), x_out)


def test_layer_reads_its_own_dtype() -> None:
    """A float32 layer on bfloat16 streams reads x_in before any rounding; its gradients come back in float32."""
    leaves = _inputs(dtype=torch.bfloat16, phi_dtype=torch.float16)
    seen = []
    layer = _layer(7)
    layer.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[0]))
    module = _module(leaves, layer)
    assert module(leaves["x"]).dtype == torch.bfloat16
    assert seen[0].dtype == torch.float32
    assert relative_error(seen[0], _read(leaves["x"], _formula(*(leaves[name] for name in NAMES))[0])) < 1e-6

    without_parameters = _module(leaves, nn.Identity())
    assert without_parameters(leaves["x"]).dtype == torch.bfloat16


def test_streams_that_are_not_contiguous() -> None:
    leaves = _inputs()
    turned = leaves["x"].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not turned.is_contiguous()
    got, want = _by_functions(liger, leaves | {"x": turned}), _by_functions(liger, leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_apply_without_x_in() -> None:
    leaves = _inputs()
    coeffs = liger.liger_mhc_coeffs(*(leaves[name] for name in NAMES), allow_fp32=True)
    x_out = liger.liger_mhc_apply(leaves["x"], leaves["f_out"], *coeffs)
    assert isinstance(x_out, Tensor)
    assert torch.equal(x_out, liger.liger_mhc_post_res(leaves["x"], leaves["f_out"], *coeffs[1:]))


def test_compiles_as_one_graph() -> None:
    leaves = _inputs()
    module = _module(leaves, _layer(7), tmax=4)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    wanted = [leaves["x"], *module.parameters()]
    got, want = compiled(leaves["x"]), module(leaves["x"])
    assert torch.equal(got, want)
    _assert_close(_gradients((got,), wanted), _gradients((want,), wanted), 1e-6)

    arguments = [leaves[name] for name in NAMES]
    want = liger.liger_mhc_coeffs(*arguments, allow_fp32=True, tmax=6)
    function = torch.compile(liger.liger_mhc_coeffs, fullgraph=True, backend="aot_eager")
    got = function(*arguments, allow_fp32=True, tmax=6)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 4, 7)}, TypeError, "allow_fp32=True, got torch.float32 with allow_fp32=False"),
        ({"phi": torch.zeros(24, 28)}, ValueError, r"phi must be \[N\*C, N\*N \+ 2\*N\] = \(28, 24\), got \(24, 28\)"),
        ({"b": torch.zeros(23)}, ValueError, r"b must be \[N\*N \+ 2\*N\] = \(24,\), got \(23,\)"),
        ({"alpha_post": torch.ones(2)}, ValueError, r"alpha_post must be a scalar \[\] = \(\), got \(2,\)"),
        ({"alpha_res": 1.0}, TypeError, r"alpha_res must be a torch.Tensor \[\], got float"),
        ({"tmax": 0}, ValueError, "iterations must be at least 1, got 0 .*tmax is iterations"),
        ({"rms_eps": 0.0}, ValueError, "norm_eps must be positive and finite, got 0.0 .*rms_eps is norm_eps"),
    ],
)
def test_errors_of_coefficients(change: dict[str, Any], error: type[Exception], message: str) -> None:
    leaves: dict[str, Any] = _inputs(dtype=torch.bfloat16) | change
    settings = {name: value for name, value in change.items() if name not in NAMES}
    with pytest.raises(error, match=message):
        liger.liger_mhc_coeffs(*(leaves[name] for name in NAMES), **settings)


def test_errors_of_the_rest() -> None:
    leaves = _inputs(dtype=torch.bfloat16)
    x, f_out = leaves["x"], leaves["f_out"]
    h_pre, h_post, h_res = liger.liger_mhc_coeffs(*(leaves[name] for name in NAMES))
    with pytest.raises(ValueError, match=r"h_pre must be \[..., N\] = \(2, 3, 4\), got \(2, 3, 4, 4\)"):
        liger.liger_mhc_pre(x, h_res)
    with pytest.raises(ValueError, match=r"f_out must be \[..., C\] = \(2, 3, 7\), got \(2, 3, 4, 7\)"):
        liger.liger_mhc_post_res(x, x, h_post, h_res)
    with pytest.raises(ValueError, match=r"h_post must be \[..., N\]"):
        liger.liger_mhc_post_res(x, f_out, h_res, h_res)
    with pytest.raises(ValueError, match=r"h_res must be \[..., N_out, N_in\]"):
        liger.liger_mhc_post_res(x, f_out, h_post, h_pre)
    with pytest.raises(ValueError, match="hc must be at least 1, got 0"):
        liger.LigerMHC(nn.Identity(), hc=0, c=8)
    with pytest.raises(ValueError, match=r"x must be \[..., N, C\] = \(..., 4, 8\), got \(2, 3, 4, 7\)"):
        liger.LigerMHC(nn.Identity(), hc=4, c=8)(x)


# Against Liger itself.


def _real() -> Any:
    pytest.importorskip("liger_kernel")
    import liger_kernel.transformers.functional as functional

    return functional


@pytest.mark.parametrize("name", [name for name in liger.__all__ if name != "LigerMHC"])
def test_signatures(name: str) -> None:
    _assert_same_signature(getattr(liger, name), getattr(_real(), name))


def test_signature_of_the_module() -> None:
    real = pytest.importorskip("liger_kernel.transformers").LigerMHC
    _assert_same_signature(liger.LigerMHC.__init__, real.__init__)
    _assert_same_signature(liger.LigerMHC.forward, real.forward)


def _assert_same_signature(ours: Any, theirs: Any) -> None:
    def described(function: Any) -> list[tuple[Any, ...]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert described(ours) == described(theirs)


@pytest.mark.parametrize("options", [{}, {"phi_dtype": torch.float32, "tmax": 5, **UNUSUAL}])
def test_same_parameters(options: dict[str, Any]) -> None:
    real = pytest.importorskip("liger_kernel.transformers").LigerMHC
    modules = []
    for cls in (liger.LigerMHC, real):
        torch.manual_seed(3)
        modules.append(cls(nn.Linear(6, 6, dtype=torch.bfloat16), hc=4, c=6, **options))
    ours, theirs = modules
    state, wanted = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        assert state[name].dtype == value.dtype, name
        assert state[name].shape == value.shape, name
        assert torch.equal(state[name], value), name
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert repr(ours) == repr(theirs)
    public = {name: value for name, value in vars(theirs).items() if not name.startswith("_") and name != "training"}
    assert {name: getattr(ours, name) for name in public} == public

    other = real(nn.Linear(6, 6, dtype=torch.bfloat16), hc=4, c=6, **options)
    ours.load_state_dict(other.state_dict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in ours.state_dict().items())
    theirs.load_state_dict(ours.state_dict())


# On a GPU Liger multiplies in TF32.
REAL_BOUND = 5e-3 if DEVICE == "cuda" else 1e-5


@pytest.mark.parametrize("settings", [{}, UNUSUAL], ids=["defaults", "unusual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_functions(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    real = _real()
    leaves = _inputs(dtype=dtype, channels=20, device=DEVICE)
    got, want = _by_functions(liger, leaves, **settings), _by_functions(real, leaves, **settings)
    assert [o.dtype for o in got] == [o.dtype for o in want]
    low = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    _assert_close(got[:3], want[:3], REAL_BOUND)
    _assert_close(got[3:], want[3:], REAL_BOUND + low)
    ours, theirs = _gradients(got, leaves.values()), _gradients(want, leaves.values())
    assert [g.dtype for g in ours] == [g.dtype for g in theirs]
    _assert_close(ours, theirs, 10 * REAL_BOUND + 4 * low)  # sums over tokens cancel, in float32 on either side


def test_real_module() -> None:
    real = pytest.importorskip("liger_kernel.transformers").LigerMHC
    leaves = _inputs(channels=20, device=DEVICE)
    ours = _module(leaves, _layer(20).to(DEVICE), **UNUSUAL)
    theirs = _module(leaves, copy.deepcopy(ours.layer), real, **UNUSUAL)
    got, want = ours(leaves["x"]), theirs(leaves["x"])
    _assert_close((got,), (want,), REAL_BOUND)
    _assert_close(
        _gradients((got,), [leaves["x"], *ours.parameters()]),
        _gradients((want,), [leaves["x"], *theirs.parameters()]),
        10 * REAL_BOUND,
    )
