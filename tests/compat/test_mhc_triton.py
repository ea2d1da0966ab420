"""mhckit.compat.mhc_triton against mHC-triton's math, written out here in plain torch, per token."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mhckit.compat import mhc_triton
from mhckit.compat.mhc_triton import (
    HyperConnection,
    fused_add_residual,
    fused_dynamic_weights,
    fused_stream_mix,
    sinkhorn_knopp,
)
from mhckit.testing import relative_error

FORMS = {
    "fused": {},
    "separate": {"use_fused_weights": False},
    "static": {"dynamic": False},
}
forms = pytest.mark.parametrize("form", FORMS)


def _plain_sinkhorn(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    matrix = torch.where(matrix >= 0, matrix, -matrix) + eps  # slope 1 at 0
    for _ in range(iterations):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def _plain_weights(
    logits: Tensor, n: int, iterations: int, eps: float, post_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    pre = logits[..., :n].sigmoid()
    pre = pre / (pre.sum(-1, keepdim=True) + eps)
    post = post_scale * logits[..., n : 2 * n].sigmoid()
    return pre, post, _plain_sinkhorn(logits[..., 2 * n :].unflatten(-1, (n, n)), iterations, eps)


def _plain_dynamic_weights(
    x: Tensor, phi: Tensor, bias: Tensor, alphas: list[Tensor], iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    n = round((phi.shape[1] + 1) ** 0.5) - 1
    scale = torch.cat([alpha.reshape(1).expand(size) for alpha, size in zip(alphas, (n, n, n * n), strict=True)])
    rms = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return _plain_weights(scale * (x @ phi) / rms + bias, n, iterations, eps, 2.0)


def _plain_layer(hc: HyperConnection, H: Tensor, branch_output: Tensor) -> tuple[Tensor, Tensor]:
    """branch_input and H_new, with the coefficients of every token computed from that token."""
    n, x = hc.num_streams, H.flatten(-2)
    bias = torch.cat([hc.H_pre_base, hc.H_post_base, hc.H_res_base.flatten()])
    if hc.use_fused_weights:
        alphas = [hc.alpha_pre, hc.alpha_post, hc.alpha_res]
        pre, post, res = _plain_dynamic_weights(x, hc.phi, bias, alphas, hc.sinkhorn_iters, hc.eps)
    else:
        logits = bias.expand(*H.shape[:-2], -1)
        if hc.dynamic:
            x = x / (x.square().mean(-1, keepdim=True) + hc.eps).sqrt()
            deltas = hc.W_pre(x) * hc.scale_pre, hc.W_post(x) * hc.scale_post, hc.W_res(x) * hc.scale_res
            logits = logits + torch.cat(deltas, -1)
        pre, post, res = _plain_weights(logits, n, hc.sinkhorn_iters, 1e-8, 1.0)
    branch_input = torch.einsum("bsi,bsic->bsc", pre, H)
    mixed = torch.einsum("bsoi,bsic->bsoc", res, H)
    return branch_input, mixed + post[..., None] * branch_output[..., None, :]


def _connection(form: str, dim: int = 11, num_streams: int = 4, **options) -> HyperConnection:
    """A connection with alpha near 1 and parameters of no symmetry."""
    generator = torch.Generator().manual_seed(5)
    hc = HyperConnection(dim, num_streams, **FORMS[form], **options)
    with torch.no_grad():
        for parameter in hc.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            width = num_streams * dim
            parameter.copy_(values / width**0.5 if width in parameter.shape else values)
    return hc


def _inputs(batch: int, seq: int, hc: HyperConnection) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    H = torch.randn(batch, seq, hc.num_streams, hc.dim, generator=generator)
    branch_output = torch.randn(batch, seq, hc.dim, generator=generator)
    return H.requires_grad_(), branch_output.requires_grad_()


def _gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    losses = [(output.float() * torch.randn(output.shape, generator=generator)).sum() for output in outputs]
    return torch.autograd.grad(torch.stack(losses).sum(), inputs)


def _assert_same(got, want, bound: float = 1e-5) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        assert relative_error(a, b) < bound, index


@forms
@pytest.mark.parametrize(
    ("batch", "seq", "dim", "streams", "iterations"), [(2, 5, 11, 4, 20), (1, 1, 3, 4, 20), (2, 3, 6, 3, 2)]
)
def test_connection(form: str, batch: int, seq: int, dim: int, streams: int, iterations: int) -> None:
    hc = _connection(form, dim, streams, sinkhorn_iters=iterations)
    H, f = _inputs(batch, seq, hc)
    branch_input, add_residual = hc(H)
    ours, plain = (branch_input, add_residual(f)), _plain_layer(hc, H, f)
    _assert_same(ours, plain)
    leaves = [H, f, *hc.parameters()]
    _assert_same(_gradients(ours, leaves), _gradients(plain, leaves), bound=5e-5)


@forms
def test_eps_reaches_what_it_reaches_in_the_original(form: str) -> None:
    hc = _connection(form, eps=0.05)
    H, f = _inputs(2, 3, hc)
    branch_input, add_residual = hc(H)
    _assert_same((branch_input, add_residual(f)), _plain_layer(hc, H, f))


@forms
def test_bfloat16(form: str) -> None:
    hc = _connection(form)
    H, f = (tensor.detach().bfloat16() for tensor in _inputs(2, 5, hc))
    branch_input, add_residual = hc(H)
    H_new = add_residual(f)
    assert branch_input.dtype == H_new.dtype == torch.bfloat16
    _assert_same((branch_input, H_new), _plain_layer(hc, H.float(), f.float()), bound=5e-3)
    hc.bfloat16()
    branch_input, add_residual = hc(H)
    (branch_input.sum() + add_residual(f).sum()).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in hc.parameters())


@forms
def test_causality(form: str) -> None:
    """A later token changes nothing before it."""
    hc = _connection(form)
    H, f = (tensor.detach() for tensor in _inputs(2, 6, hc))
    later = H.clone()
    later[:, 4:] += 1
    for a, b in zip(*((hc(x)[0], hc(x)[1](f)) for x in (H, later)), strict=True):
        assert torch.equal(a[:, :4], b[:, :4])
        assert not torch.equal(a[:, 4:], b[:, 4:])


def test_one_token_is_the_original() -> None:
    """Of one token the mean over the sequence is itself: weights of the pooled H, applied to all of it."""
    hc = _connection("fused")
    H, f = _inputs(3, 1, hc)
    bias = torch.cat([hc.H_pre_base, hc.H_post_base, hc.H_res_base.flatten()])
    alphas = hc.alpha_pre, hc.alpha_post, hc.alpha_res
    H_pre, H_post, H_res = fused_dynamic_weights(H.mean(1).flatten(1), hc.phi, bias, *alphas)
    branch_input, H_residual = fused_stream_mix(H, H_pre, H_res)
    ours, add_residual = hc(H)
    _assert_same((ours, add_residual(f)), (branch_input, fused_add_residual(H_residual, f, H_post)))


@pytest.mark.parametrize("shape", [(5, 44), (1, 4), (2, 3, 20)])
def test_fused_dynamic_weights(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(shape, generator=generator).requires_grad_()
    phi = (torch.randn(shape[-1], 24, generator=generator) / shape[-1] ** 0.5).requires_grad_()
    bias = torch.randn(24, generator=generator).requires_grad_()
    alphas = [torch.tensor(0.7), torch.tensor([-1.2]), torch.tensor(1.5)]
    for alpha in alphas:
        alpha.requires_grad_()
    ours = fused_dynamic_weights(x, phi, bias, *alphas)
    plain = _plain_dynamic_weights(x, phi, bias, alphas, 20, 1e-6)
    _assert_same(ours, plain)
    assert relative_error(ours[2], ours[2].mT) > 0.1
    leaves = [x, phi, bias, *alphas]
    _assert_same(_gradients(ours, leaves), _gradients(plain, leaves), bound=5e-5)
    half = fused_dynamic_weights(x.bfloat16(), phi, bias, *alphas, sinkhorn_iters=3, eps=1e-3)
    assert {output.dtype for output in half} == {torch.float32}
    _assert_same(half, _plain_dynamic_weights(x.bfloat16().float(), phi, bias, alphas, 3, 1e-3))


@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 2, 2), (4, 4), (2, 5, 7, 7)])
@pytest.mark.parametrize("iterations", [1, 20])
def test_sinkhorn_knopp(shape: tuple[int, ...], iterations: int) -> None:
    M = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    M[..., 0, 1] = 0
    M[..., -1, 0] = -0.0
    M.requires_grad_()
    ours, plain = sinkhorn_knopp(M, iterations), _plain_sinkhorn(M, iterations, 1e-8)
    _assert_same([ours], [plain])
    _assert_same(_gradients((ours,), [M]), _gradients((plain,), [M]), bound=1e-4)
    assert sinkhorn_knopp(M.bfloat16(), iterations, eps=1e-3).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_token", [False, True])
def test_stream_mix_and_add_residual(dtype: torch.dtype, per_token: bool) -> None:
    generator = torch.Generator().manual_seed(10)
    batch, seq, n, dim = 2, 3, 4, 5
    lead = (batch, seq) if per_token else (batch,)
    H = torch.randn(batch, seq, n, dim, generator=generator).to(dtype).requires_grad_()
    f = torch.randn(batch, seq, dim, generator=generator).to(dtype).requires_grad_()
    weights = [torch.randn(*lead, *shape, generator=generator).requires_grad_() for shape in ((n,), (n, n), (n,))]
    H_pre, H_res, H_post = weights
    branch_input, H_residual = fused_stream_mix(H, H_pre, H_res)
    H_new = fused_add_residual(H_residual, f, H_post)
    assert branch_input.dtype == H_residual.dtype == H_new.dtype == dtype

    w = "bs" if per_token else "b"
    mixed = torch.einsum(f"{w}oi,bsic->bsoc", H_res, H.float())
    plain_input = torch.einsum(f"{w}i,bsic->bsc", H_pre, H.float())
    written = torch.einsum(f"{w}o,bsc->bsoc", H_post, f.float())
    ours, plain = (branch_input, H_residual, H_new), (plain_input, mixed, mixed + written)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    _assert_same(ours, plain, bound)
    leaves = [H, f, *weights]
    _assert_same(_gradients(ours, leaves), _gradients(plain, leaves), bound)


def test_signatures() -> None:
    options = {
        "num_streams": 4,
        "layer_idx": 0,
        "dynamic": True,
        "sinkhorn_iters": 20,
        "init_scale": 0.1,
        "eps": 1e-6,
        "use_fused_weights": True,
    }
    assert list(_parameters(HyperConnection).items()) == [("dim", inspect.Parameter.empty), *options.items()]
    weights = ["x", "phi", "bias", "alpha_pre", "alpha_post", "alpha_res"]
    assert list(_parameters(fused_dynamic_weights)) == [*weights, "sinkhorn_iters", "eps"]
    assert list(_parameters(sinkhorn_knopp).items())[1:] == [("num_iters", 20), ("eps", 1e-8)]
    assert list(_parameters(fused_stream_mix)) == ["H", "H_pre", "H_res"]
    assert list(_parameters(fused_add_residual)) == ["H_residual", "branch_output", "H_post"]
    assert all(hasattr(mhc_triton, name) for name in mhc_triton.__all__)


def _parameters(function) -> dict[str, object]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def test_state_dict() -> None:
    base = {"H_post_base": (4,), "H_pre_base": (4,), "H_res_base": (4, 4)}
    fused = {"phi": (20, 24), "alpha_pre": (1,), "alpha_post": (1,), "alpha_res": (1,)}
    separate = {f"W_{part}.weight": (rows, 20) for part, rows in (("post", 4), ("pre", 4), ("res", 16))}
    separate |= {f"scale_{part}": (1,) for part in ("post", "pre", "res")}
    for form, own in (("fused", fused), ("separate", separate), ("static", {})):
        state = HyperConnection(5, **FORMS[form]).state_dict()
        assert {name: tuple(value.shape) for name, value in state.items()} == base | own
        assert {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.parametrize("form", ["fused", "separate"])
def test_scalars_saved_without_an_axis_load(form: str) -> None:
    source, outer = _connection(form), torch.nn.ModuleList([HyperConnection(11, **FORMS[form])])
    state = {f"0.{name}": value[0] if value.shape == (1,) else value for name, value in source.state_dict().items()}
    outer.load_state_dict(state)
    for name, value in source.state_dict().items():
        assert torch.equal(outer[0].state_dict()[name], value)


@forms
def test_initial_values(form: str) -> None:
    hc = HyperConnection(5, layer_idx=6, init_scale=0.3, **FORMS[form])
    expected = {"H_post_base": torch.ones(4), "H_pre_base": torch.tensor([0.0, 0, 1, 0]), "H_res_base": torch.eye(4)}

    def assert_initial() -> None:
        for name, value in hc.named_parameters():
            scalar = torch.tensor([0.3]) if value.shape == (1,) else torch.zeros_like(value)
            assert torch.equal(value, expected.get(name, scalar)), name

    assert_initial()
    with torch.no_grad():
        for parameter in hc.parameters():
            parameter.add_(1)
    hc.init_weights()
    assert_initial()
    hc.init_weights(layer_idx=3)
    expected["H_pre_base"] = torch.tensor([0.0, 0, 0, 1])
    assert hc.layer_idx == 3
    assert_initial()


@forms
def test_initial_zeros_learn(form: str) -> None:
    """At the identity every entry of the residual matrix, on or off the diagonal, has the gradient of |l| + eps."""
    hc = HyperConnection(5, **FORMS[form])
    H, f = _inputs(2, 3, hc)
    branch_input, add_residual = hc(H)
    ours, plain = (branch_input, add_residual(f)), _plain_layer(hc, H, f)
    _assert_same(ours, plain)
    got, want = (_gradients(outputs, [hc.H_res_base])[0] for outputs in (ours, plain))
    off_diagonal = ~torch.eye(4, dtype=torch.bool)
    assert got[off_diagonal].abs().min() > 1e-3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@forms
def test_training_step(form: str) -> None:
    torch.manual_seed(0)
    hc, layer = HyperConnection(8, **FORMS[form]), torch.nn.Linear(8, 8)
    H, target = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 4, 8)
    optimizer = torch.optim.Adam([*hc.parameters(), *layer.parameters()], lr=0.02)
    losses = []
    for step in range(20):
        branch_input, add_residual = hc(H)
        loss = (add_residual(layer(branch_input)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        learning = [name for name, p in hc.named_parameters() if p.grad is not None and p.grad.any()]
        idle = [name for name, _ in hc.named_parameters() if name not in learning]
        # Projections start at zero, and so does what alpha multiplies.
        assert all(name.startswith(("alpha", "scale")) for name in idle) and (step == 0 or not idle)
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1] < 0.9 * losses[0]


class _NoSynchronisation(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read on the host"
        return func(*args, **(kwargs or {}))


@forms
def test_no_host_synchronisation(form: str) -> None:
    hc = _connection(form)
    H, f = _inputs(2, 3, hc)
    with _NoSynchronisation():
        branch_input, add_residual = hc(H)
        (branch_input.sum() + add_residual(f).sum()).backward()
        sinkhorn_knopp(H.detach()[0, :, :, :4])


@forms
def test_compiles_whole(form: str) -> None:
    hc = _connection(form)
    H, f = _inputs(2, 3, hc)

    def block(H: Tensor, f: Tensor) -> Tensor:
        branch_input, add_residual = hc(H)
        return add_residual(f * branch_input)

    _assert_same([torch.compile(block, fullgraph=True, backend="aot_eager")(H, f)], [block(H, f)])


def test_errors() -> None:
    hc = HyperConnection(5)
    H = torch.randn(2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"H must be \[batch, seq, n, C\] with .* = \(4, 5\), got \(2, 3, 5, 4\)"):
        hc(H.mT)
    with pytest.raises(ValueError, match=r"branch_output must be \[batch, seq, C\] = \(2, 3, 5\), got \(2, 3, 4, 5\)"):
        hc(H)[1](H)
    with pytest.raises(TypeError, match=r"H must be a torch\.Tensor"):
        hc(None)
    with pytest.raises(ValueError, match=r"H_pre must be .* = \(2, 4\) or \(2, 3, 4\), got \(4,\)"):
        fused_stream_mix(H, torch.ones(4), torch.ones(2, 4, 4))
    with pytest.raises(ValueError, match=r"H_res must be .* = \(2, 4, 4\) or \(2, 3, 4, 4\), got \(2, 4\)"):
        fused_stream_mix(H, torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"H_residual must be \[batch, seq, n, C\]"):
        fused_add_residual(H[0], H[0, :, 0], torch.ones(3, 4))
    bias, alpha = torch.zeros(24), torch.ones(())
    with pytest.raises(ValueError, match=r"phi must be \[n\*C, n\*n \+ 2n\] with n\*C = 20, got \(24, 20\)"):
        fused_dynamic_weights(torch.ones(2, 20), torch.ones(24, 20), bias, alpha, alpha, alpha)
    with pytest.raises(ValueError, match=r"x must be \[..., n\*C\] with n = 4 \(from phi\), got \(2, 21\)"):
        fused_dynamic_weights(torch.ones(2, 21), torch.ones(21, 24), bias, alpha, alpha, alpha)
    with pytest.raises(ValueError, match=r"alpha_post must have one element, got \(3,\)"):
        fused_dynamic_weights(torch.ones(2, 20), torch.ones(20, 24), bias, alpha, torch.ones(3), alpha)
    with pytest.raises(ValueError, match=r"M must be \[..., n, n\] with n >= 1, got \(4, 3\)"):
        sinkhorn_knopp(torch.ones(4, 3))
    with pytest.raises(ValueError, match="eps must be above 0 and below 1, got 0"):
        sinkhorn_knopp(torch.ones(4, 4), eps=0)
    with pytest.raises(ValueError, match="layer_idx must be at least 0, got -1"):
        HyperConnection(5, layer_idx=-1)
    with pytest.raises(TypeError, match="num_streams must be an int, got '4'"):
        HyperConnection(5, num_streams="4")  # type: ignore[arg-type]
