"""mhckit.compat.mhc_cu against mHC.cu's math, written out here in plain torch."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mhckit.compat import mhc_cu
from mhckit.compat.mhc_cu import MHCLayer, rmsnorm, sinkhorn_knopp
from mhckit.testing import relative_error


def _plain_sinkhorn(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    """Rows first; a sum up to eps leaves its row alone and empties its column."""
    for _ in range(iterations):
        rows = matrix.sum(-1, keepdim=True)
        matrix = torch.where(rows > eps, matrix / rows.clamp(min=eps), matrix)
        cols = matrix.sum(-2, keepdim=True)
        matrix = torch.where(cols > eps, matrix / cols.clamp(min=eps), torch.zeros_like(matrix))
    return matrix


def _plain_rmsnorm(a: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * a / (a.square().mean(-1, keepdim=True) + eps).sqrt()


def _plain_layer(layer: MHCLayer, x: Tensor, rounding=lambda tensor: tensor) -> Tensor:
    """The layer's math in float32; ``rounding`` is applied where the original rounds to bfloat16."""
    n, eps = layer.expansion_rate, layer.eps
    if layer.use_dynamic_h:
        flat = rounding(x.flatten(1))
        rms = (flat.square().mean(-1, keepdim=True) + eps).sqrt()

        def logits(phi: Tensor, alpha: Tensor, b: Tensor) -> Tensor:
            return alpha * (flat @ rounding(phi).T) / rms + b.flatten()

        h_pre = logits(layer.phi_pre, layer.alpha_pre, layer.b_pre)
        h_post = logits(layer.phi_post, layer.alpha_post, layer.b_post)
        h_res = logits(layer.phi_res, layer.alpha_res, layer.b_res).reshape(-1, n, n)
    else:
        h_pre, h_post, h_res = (h.expand(len(x), *h.shape) for h in (layer.H_pre, layer.H_post, layer.H_res))
    mixing = _plain_sinkhorn(h_res.exp(), layer.sinkhorn_iters, eps)
    a = rounding(torch.einsum("bi,bic->bc", h_pre.sigmoid(), x))
    f = rounding(_plain_rmsnorm(a, layer.rmsnorm_weight.float(), eps))
    return torch.einsum("boi,bic->boc", mixing, x) + 2 * h_post.sigmoid()[..., None] * f[:, None]


def _layer(dynamic: bool, hidden_dim: int = 13, expansion_rate: int = 4, **options) -> MHCLayer:
    """A layer with alpha near 1 and parameters of no symmetry, in float32."""
    generator = torch.Generator().manual_seed(5)
    layer = MHCLayer(hidden_dim, expansion_rate, use_dynamic_h=dynamic, **options).float()
    with torch.no_grad():
        for parameter in layer.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            width = expansion_rate * hidden_dim
            parameter.copy_(values / width**0.5 if parameter.shape[-1:] == (width,) else values)
    return layer


def _streams(tokens: int, layer: MHCLayer) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(tokens, layer.expansion_rate, layer.hidden_dim, generator=generator).requires_grad_()


def _gradients(y: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
    return torch.autograd.grad((y.float() * weights).sum(), inputs)


def _assert_same(got, want, bound: float = 1e-5) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        assert relative_error(a, b) < bound, index


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    ("tokens", "hidden_dim", "streams", "iterations"), [(7, 13, 4, 20), (1, 5, 4, 20), (3, 6, 3, 2), (2, 4, 1, 20)]
)
def test_layer(dynamic: bool, tokens: int, hidden_dim: int, streams: int, iterations: int) -> None:
    layer = _layer(dynamic, hidden_dim, streams, sinkhorn_iters=iterations)
    x = _streams(tokens, layer)
    ours, plain = layer(x), _plain_layer(layer, x)
    assert ours.dtype == torch.float32
    _assert_same([ours], [plain])
    # One stream: M is 1 and the norm undoes pre, whatever their logits; gradients are zero but for eps and rounding.
    names = [name for name, _ in layer.named_parameters() if streams > 1 or not name.endswith(("_pre", "_res"))]
    leaves = [x, *(layer.get_parameter(name) for name in names)]
    _assert_same(_gradients(ours, leaves), _gradients(plain, leaves), bound=2e-5)


def test_every_token_has_its_own_coefficients_in_backward() -> None:
    """The gradient of a batch is that of its tokens, one by one."""
    layer = _layer(dynamic=True)
    x = _streams(5, layer)
    together = torch.autograd.grad(layer(x).square().sum(), x)[0]
    alone = [torch.autograd.grad(layer(x[[t]]).square().sum(), x)[0][t] for t in range(5)]
    assert relative_error(together, torch.stack(alone)) < 1e-5
    assert relative_error(together[0] / x[0], together[1] / x[1]) > 0.1


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_original_roundings(dynamic: bool) -> None:
    """bfloat16 streams and the original's bfloat16 intermediates: near, in float32 as there."""
    layer = _layer(dynamic)
    layer.rmsnorm_weight = torch.nn.Parameter(layer.rmsnorm_weight.bfloat16())
    x = _streams(7, layer).detach().bfloat16()
    ours = layer(x)
    original = _plain_layer(layer, x.float(), rounding=lambda tensor: tensor.bfloat16().float())
    assert ours.dtype == torch.float32
    assert relative_error(ours, original) < 1e-2
    ours.sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32, torch.bfloat16}


def test_functional_forms() -> None:
    layer = _layer(dynamic=True)
    x = _streams(3, layer)
    named = dict(layer.named_parameters())
    for dynamic_form in (mhc_cu.mhc_layer_fused_dynamic, mhc_cu.mhc_layer_fused_dynamic_inference):
        y = dynamic_form(x, **named, sinkhorn_iters=20, eps=1e-5)
        assert torch.equal(y, layer(x))
        assert y.requires_grad == (dynamic_form is mhc_cu.mhc_layer_fused_dynamic)
    numbers = {name: value.item() for name, value in named.items() if name.startswith("alpha")}
    assert torch.equal(mhc_cu.mhc_layer_fused_dynamic(x, **(named | numbers)), layer(x))
    static = _layer(dynamic=False)
    for static_form in (mhc_cu.mhc_layer_fused, mhc_cu.mhc_layer_fused_inference):
        assert torch.equal(static_form(x, **dict(static.named_parameters())), static(x))
    assert layer(x.reshape(3, 1, 4, 13)).shape == (3, 1, 4, 13)


@pytest.mark.parametrize("shape", [(4, 4), (5, 4, 4), (3, 3), (1, 1), (16, 16)])
@pytest.mark.parametrize("iterations", [1, 20])
def test_sinkhorn_knopp(shape: tuple[int, ...], iterations: int) -> None:
    generator = torch.Generator().manual_seed(8)
    inp = torch.rand(shape, generator=generator).square().add(1e-3).requires_grad_()
    ours, plain = sinkhorn_knopp(inp, iterations), _plain_sinkhorn(inp, iterations, 1e-8)
    _assert_same([ours], [plain])
    if shape[-1] > 1:
        _assert_same(_gradients(ours, [inp]), _gradients(plain, [inp]), bound=5e-5)


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_sinkhorn_knopp_at_zeros(eps: float) -> None:
    """Single zeros, an empty row and an empty column: values and gradients of the linear iteration."""
    generator = torch.Generator().manual_seed(9)
    inp = torch.rand(3, 4, 4, generator=generator) + 0.1
    inp[0, 1, 2] = inp[0, 3, 0] = 0
    inp[1, 2] = 0
    inp[2, :, 1] = 0
    inp.requires_grad_()
    ours = sinkhorn_knopp(inp, 20, eps)
    plain = _plain_sinkhorn(inp, 20, max(eps, 1e-20))
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
    assert ours[1, 2].eq(0).logical_or(ours[1, 2] < 1e-20).all()
    assert ours[2, :, 1].eq(0).all()
    got, want = _gradients(ours, [inp])[0], _gradients(plain, [inp])[0]
    assert want[0, 1, 2].abs() > 1e-3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_sinkhorn_knopp_of_small_and_large_matrices() -> None:
    generator = torch.Generator().manual_seed(10)
    inp = torch.rand(2, 8, 8, generator=generator) + 0.01
    plain = _plain_sinkhorn(inp.double(), 20, 1e-8)
    assert relative_error(sinkhorn_knopp(inp * 1e6), plain) < 1e-5
    assert relative_error(sinkhorn_knopp(inp * 1e-6), plain) < 1e-5
    assert sinkhorn_knopp(inp * 1e-12, 3).isfinite().all()
    assert sinkhorn_knopp(inp.bfloat16()).dtype == torch.float32
    assert sinkhorn_knopp(-inp).isnan().all()


@pytest.mark.parametrize("shape", [(6, 13), (1, 1), (2, 3, 5), (4,)])
def test_rmsnorm(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(11)
    inp = torch.randn(shape, generator=generator).bfloat16().float().requires_grad_()
    weight = torch.randn(shape[-1:], generator=generator).bfloat16().float().requires_grad_()
    ours, plain = rmsnorm(inp, weight, 1e-3), _plain_rmsnorm(inp, weight, 1e-3)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), plain, rtol=1 / 128, atol=0)
    got, want = _gradients(ours, [inp, weight]), _gradients(plain, [inp, weight])
    torch.testing.assert_close(got, want, rtol=1e-2, atol=2e-2)


def test_signatures() -> None:
    layer = {"expansion_rate": 4, "sinkhorn_iters": 20, "eps": 1e-5, "alpha_init": 0.01, "use_dynamic_h": True}
    assert _parameters(MHCLayer) == {"hidden_dim": inspect.Parameter.empty} | layer
    assert list(_parameters(MHCLayer)) == ["hidden_dim", *layer]
    assert list(_parameters(sinkhorn_knopp).items())[1:] == [("num_iters", 20), ("eps", 1e-8)]
    assert list(_parameters(rmsnorm)) == ["inp", "weight", "eps"]
    static = ["x_expanded", "rmsnorm_weight", "H_pre", "H_post", "H_res", "sinkhorn_iters", "eps"]
    assert list(_parameters(mhc_cu.mhc_layer_fused)) == static
    parts = [f"{kind}_{part}" for kind in ("phi", "alpha", "b") for part in ("pre", "post", "res")]
    dynamic = [*static[:2], *parts, *static[-2:]]
    assert list(_parameters(mhc_cu.mhc_layer_fused_dynamic)) == dynamic
    assert list(_parameters(mhc_cu.mhc_layer_fused_dynamic_inference)) == dynamic


def _parameters(function) -> dict[str, object]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def test_state_dict_and_initial_values() -> None:
    dynamic, static = MHCLayer(5, 3), MHCLayer(5, 3, use_dynamic_h=False)
    assert {name: tuple(value.shape) for name, value in dynamic.state_dict().items()} == {
        "rmsnorm_weight": (5,),
        "phi_pre": (3, 15),
        "phi_post": (3, 15),
        "phi_res": (9, 15),
        "b_pre": (3,),
        "b_post": (3,),
        "b_res": (3, 3),
        "alpha_pre": (),
        "alpha_post": (),
        "alpha_res": (),
    }
    shapes = {name: tuple(value.shape) for name, value in static.state_dict().items()}
    assert shapes == {"rmsnorm_weight": (5,), "H_pre": (3,), "H_post": (3,), "H_res": (3, 3)}
    assert dynamic.rmsnorm_weight.dtype == torch.bfloat16
    assert {value.dtype for name, value in dynamic.state_dict().items() if name != "rmsnorm_weight"} == {torch.float32}
    assert dynamic.alpha_res.item() == pytest.approx(0.01)
    assert dynamic.b_res.eq(0).all() and static.H_pre.eq(0).all()
    assert 0.01 < MHCLayer(64).phi_res.std() < 0.03
    assert 0 < static.H_res.abs().max() < 0.1


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_training_step(dynamic: bool) -> None:
    torch.manual_seed(0)
    layer = MHCLayer(8, use_dynamic_h=dynamic).float()
    x, target = torch.randn(16, 4, 8), torch.randn(16, 4, 8)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    losses = []
    for _ in range(20):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1] < 0.95 * losses[0]


class _NoSynchronisation(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_no_host_synchronisation(dynamic: bool) -> None:
    layer = _layer(dynamic)
    x = _streams(3, layer)
    with _NoSynchronisation():
        layer(x).sum().backward()
        sinkhorn_knopp(x.detach()[:, :, :4].exp())


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_compiles_whole(dynamic: bool) -> None:
    layer = _layer(dynamic)
    x = _streams(3, layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    _assert_same([compiled(x)], [layer(x)])


def test_errors() -> None:
    layer = MHCLayer(5, 3)
    named = dict(layer.named_parameters())
    x = torch.randn(2, 3, 5)
    with pytest.raises(ValueError, match=r"x_expanded must be \[B, n, C\] with \(n, C\) = \(3, 5\), got \(2, 4, 5\)"):
        layer(torch.randn(2, 4, 5))
    with pytest.raises(TypeError, match="x_expanded must be a float tensor"):
        layer(torch.ones(2, 3, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"phi_res must be \[n\*n, n\*C\] = \(9, 15\), got \(15, 9\)"):
        mhc_cu.mhc_layer_fused_dynamic(x, **(named | {"phi_res": layer.phi_res.T}))
    with pytest.raises(ValueError, match=r"b_res must be \[n, n\] = \(3, 3\), got \(9,\)"):
        mhc_cu.mhc_layer_fused_dynamic(x, **(named | {"b_res": layer.b_res.flatten()}))
    with pytest.raises(ValueError, match=r"alpha_pre must have one element, got \(3,\)"):
        mhc_cu.mhc_layer_fused_dynamic(x, **(named | {"alpha_pre": torch.ones(3)}))
    with pytest.raises(TypeError, match=r"alpha_pre must be a torch\.Tensor of one element or a number, got str"):
        mhc_cu.mhc_layer_fused_dynamic(x, **(named | {"alpha_pre": "1"}))
    with pytest.raises(ValueError, match=r"rmsnorm_weight must be \[C\] = \(5,\), got \(4,\)"):
        mhc_cu.mhc_layer_fused(x, torch.ones(4), torch.zeros(3), torch.zeros(3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"inp must be \[..., n, n\] with n >= 1, got \(3, 4\)"):
        sinkhorn_knopp(torch.ones(3, 4))
    with pytest.raises(ValueError, match="num_iters must be at least 1, got 0"):
        sinkhorn_knopp(torch.ones(4, 4), 0)
    with pytest.raises(ValueError, match=r"weight must be \[C\] = \(4,\), got \(3,\)"):
        rmsnorm(torch.ones(2, 4), torch.ones(3))
    with pytest.raises(ValueError, match="eps must be above 0 and below 1, got 0"):
        MHCLayer(5, eps=0)
    with pytest.raises(TypeError, match=r"hidden_dim must be an int, got 5\.0"):
        MHCLayer(5.0)  # type: ignore[arg-type]
