"""Megatron's functions and module against its math, written out here; fused against native; a step of training."""

from __future__ import annotations

import copy
import functools
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import assert_same, leaf
from torch import Tensor, nn

from mhckit.compat import megatron
from mhckit.compat.megatron import HyperConnectionModule
from mhckit.testing import relative_error

# s, b, n, C
SIZES = [(3, 2, 4, 13), (1, 1, 4, 7), (5, 1, 2, 8), (2, 3, 3, 5), (2, 1, 1, 6)]
WITHIN = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
BACKENDS = ["auto", "native"]
EPS = 1e-6


def _sinkhorn(logits: Tensor, iterations: int, eps: float = EPS) -> Tensor:
    exp = torch.exp(logits - logits.max(-1, keepdim=True).values)
    matrix = exp / exp.sum(-1, keepdim=True) + eps
    for step in range(2 * iterations - 1):
        axis = -2 if step % 2 == 0 else -1  # columns, rows, columns, ...
        matrix = matrix / (matrix.sum(axis, keepdim=True) + eps)
    return matrix


def _aggregate(x: Tensor, h_pre: Tensor) -> Tensor:
    return torch.einsum("sbnc,sbn->sbc", x.float(), h_pre.float()).to(x.dtype)


def _post_bda(h_res: Tensor, residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    x = x.float() if bias is None else x.float() + bias.float()
    mixed = torch.einsum("sbio,sbic->sboc", h_res.float(), residual.float())
    return (mixed + torch.einsum("sbo,sbc->sboc", h_post.float(), x)).to(residual.dtype)


def _proj_rms(x: Tensor, weight: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    return torch.einsum("...k,pk->...p", x, weight), 1 / (x.square().mean(-1, keepdim=True).sqrt() + eps)


def _mappings(x: Tensor, module: HyperConnectionModule) -> tuple[Tensor, Tensor, Tensor]:
    n = module.n
    proj, r = _proj_rms(x.float(), module.mapping_proj.weight)
    scaled = proj * r
    h_pre = torch.sigmoid(module.alpha_pre * scaled[..., :n] + module.bias[:n]) + EPS
    h_post = 2 * torch.sigmoid(module.alpha_post * scaled[..., n : 2 * n] + module.bias[n : 2 * n])
    logits = (module.alpha_res * scaled[..., 2 * n :] + module.bias[2 * n :]).view(*x.shape[:-1], n, n)
    return h_pre, h_post, _sinkhorn(logits, module.sinkhorn_iterations)


_assert_same = functools.partial(assert_same, smallest=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eps", [1e-6, 1e-3, 0.0])
@pytest.mark.parametrize("iterations", [1, 3, 20])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_sinkhorn(n: int, iterations: int, eps: float, backend: str) -> None:
    logits = (2 * torch.randn(3, 2, n, n)).requires_grad_()
    theirs = _sinkhorn(logits, iterations, eps)
    assert n == 2 or relative_error(theirs, theirs.mT) > 0.05  # doubly stochastic 2 x 2 matrices are symmetric
    _assert_same((megatron.fused_sinkhorn(logits, iterations, eps, backend=backend),), (theirs,), [logits])
    assert megatron.fused_sinkhorn(logits.bfloat16(), iterations, eps, backend=backend).dtype == torch.bfloat16


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("size", SIZES)
def test_h_aggregate(size: tuple[int, ...], dtype: torch.dtype, backend: str, flat: bool) -> None:
    x, h_pre = leaf(*size, dtype=dtype), leaf(*size[:-1], dtype=dtype)
    ours = megatron.fused_h_aggregate(x.flatten(-2) if flat else x, h_pre, backend=backend)
    assert ours.dtype == dtype
    _assert_same((ours,), (_aggregate(x, h_pre),), [x, h_pre], WITHIN[dtype])


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("size", SIZES)
def test_h_post_bda(size: tuple[int, ...], dtype: torch.dtype, backend: str, with_bias: bool, flat: bool) -> None:
    s, b, n, C = size
    h_res, residual, h_post = (leaf(*shape, dtype=dtype) for shape in ((s, b, n, n), size, (s, b, n)))
    x, bias = leaf(s, b, C, dtype=dtype), leaf(C, dtype=dtype) if with_bias else None
    leaves = [h_res, residual, h_post, x, *([] if bias is None else [bias])]
    theirs = _post_bda(h_res, residual, h_post, x, bias)
    given = residual.flatten(-2) if flat else residual
    ours = megatron.fused_h_post_bda(h_res, given, h_post, x, bias, backend=backend)
    assert ours.dtype == dtype
    _assert_same((ours,), (theirs.flatten(-2) if flat else theirs,), leaves, WITHIN[dtype])


def test_h_res_is_in_out() -> None:
    """Output stream 1 receives input stream 0 where h_res[0, 1] is set."""
    h_res, residual = torch.zeros(1, 1, 2, 2), torch.tensor([[[[1.0], [2.0]]]])
    h_res[..., 0, 1] = 1
    for backend in BACKENDS:
        out = megatron.fused_h_post_bda(
            h_res, residual, torch.zeros(1, 1, 2), torch.zeros(1, 1, 1), None, backend=backend
        )
        assert out.flatten().tolist() == [0, 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(6, 52, 24), (1, 15, 15), (3, 8, 5), (2, 7, 8)])
def test_proj_rms(shape: tuple[int, int, int], backend: str) -> None:
    M, K, N = shape
    x, weight = leaf(M, K), leaf(N, K)
    for eps in (1e-6, 0.5):
        proj, r = megatron.fused_proj_rms(x, weight, eps, backend=backend)
        assert (proj.shape, r.shape) == ((M, N), (M, 1))
        _assert_same((proj, r), _proj_rms(x, weight, eps), [x, weight])
    proj, r = megatron.fused_proj_rms(x.bfloat16(), weight.bfloat16(), backend=backend)
    assert proj.dtype == r.dtype == torch.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
def test_proj_rms_of_zeros_has_zero_gradient(backend: str) -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    proj, r = megatron.fused_proj_rms(x, torch.zeros(8, 8), backend=backend)
    torch.testing.assert_close(r, torch.full((2, 1), 1e6))
    (proj.sum() + r.sum()).backward()
    assert x.grad is not None
    assert not x.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_proj_rms_compute_h(backend: str) -> None:
    module = _randomised(_module(n=3))
    x = leaf(6, 3 * 5)
    alphas = [module.alpha_pre, module.alpha_post, module.alpha_res]
    weight, bias = module.mapping_proj.weight, module.bias
    *ours, r = megatron.fused_proj_rms_compute_h(x, weight, *alphas, bias, 3, 1e-6, 0.25, backend=backend)
    proj, want_r = _proj_rms(x, weight)
    pre, post, res = (part * a for part, a in zip((proj * want_r).split((3, 3, 9), -1), alphas, strict=True))
    theirs = (pre + bias[:3]).sigmoid() + 0.25, 2 * (post + bias[3:6]).sigmoid(), res + bias[6:]
    _assert_same((*ours, r), (*theirs, want_r), [x, *module.parameters()])


def _config(n: int = 4, C: int = 5, **fields: Any) -> SimpleNamespace:
    values = dict(
        mhc_num_residual_streams=n,
        hidden_size=C,
        mhc_sinkhorn_iterations=20,
        mhc_init_gating_factor=0.01,
        sequence_parallel=False,
        use_fused_mhc=True,
    )
    return SimpleNamespace(**values | fields)


def _module(n: int = 4, C: int = 5, **fields: Any) -> HyperConnectionModule:
    return HyperConnectionModule(_config(n, C, **fields), layer_number=3)


def _randomised(module: HyperConnectionModule) -> HyperConnectionModule:
    """Logits of std near 1 and different scales: nothing symmetric."""
    with torch.no_grad():
        for parameter, value in ((module.alpha_pre, 0.7), (module.alpha_post, -1.2), (module.alpha_res, 1.5)):
            parameter.fill_(value)
        module.bias.normal_()
        module.mapping_proj.weight.normal_(std=module.mapping_proj.in_features**-0.5)
    return module


def test_module_parameters() -> None:
    module = _module(n=4, C=5, mhc_init_gating_factor=0.02)
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == {
        "alpha_pre": (1,),
        "alpha_post": (1,),
        "alpha_res": (1,),
        "bias": (24,),
        "mapping_proj.weight": (24, 20),
    }
    assert module.alpha_res.item() == pytest.approx(0.02)
    assert not module.bias.any()
    assert module.mapping_proj.weight.abs().max() <= (6 / (24 + 20)) ** 0.5  # Xavier's bound
    assert (module.n, module.hidden_size, module.layer_number) == (4, 5, 3)
    assert {p.dtype for p in module.to(torch.bfloat16).parameters()} == {torch.float32}


def test_module_marks_sequence_parallel_parameters() -> None:
    assert all(p.sequence_parallel for p in _module(sequence_parallel=True).parameters())
    assert not any(hasattr(p, "sequence_parallel") for p in _module().parameters())


def test_module_takes_the_older_name_of_streams() -> None:
    config = _config()
    config.num_residual_streams = 2
    del config.mhc_num_residual_streams, config.use_fused_mhc
    module = HyperConnectionModule(config, 1)
    assert module.n == 2
    assert module.use_fused


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("size", SIZES)
def test_module(size: tuple[int, ...], dtype: torch.dtype, fused: bool) -> None:
    """forward and write-back; all gradients, those of the parameters too."""
    s, b, n, C = size
    module = _randomised(_module(n, C, use_fused_mhc=fused))
    x, f, bias = leaf(s, b, n * C, dtype=dtype), leaf(s, b, C, dtype=dtype), leaf(C, dtype=dtype)

    h_pre, want_post, want_res = _mappings(x, module)
    streams = x.view(size)
    want = _aggregate(streams, h_pre)
    want_y = _post_bda(want_res, streams, want_post, f + want.tanh(), bias).view(s, b, n * C)

    aggregated, h_res, h_post = module(x)
    y = module.fused_h_res_h_post_bda(h_res, x, h_post, (f + aggregated.tanh(), bias), 0.0, True, True)
    assert {t.dtype for t in (aggregated, h_res, h_post, y)} == {dtype}
    assert n < 3 or relative_error(h_res, h_res.mT) > 0.05
    leaves = [x, f, bias, *module.parameters()]
    _assert_same((aggregated, h_res, h_post, y), (want, want_res, want_post, want_y), leaves, 3 * WITHIN[dtype])


@pytest.mark.parametrize("fused", [True, False])
def test_module_mappings_and_aggregate(fused: bool) -> None:
    module = _randomised(_module(n=3, C=7, use_fused_mhc=fused))
    x = leaf(2, 3, 21)
    ours = module.compute_mappings(x)
    _assert_same(ours, _mappings(x, module), [x, *module.parameters()])
    aggregated, h_res, h_post = module(x)
    for a, b in ((module.aggregate(x, ours[0]), aggregated), (ours[1], h_post), (ours[2], h_res)):
        torch.testing.assert_close(a, b)


def test_module_residual_gives_the_same_gradients() -> None:
    """Writing to the returned residual, instead of to hidden_states, changes the autograd graph alone."""
    module, x = _randomised(_module()), leaf(3, 2, 20)
    gradients = []
    for return_residual in (True, False):
        aggregated, h_res, h_post, *rest = module(x, return_residual=return_residual)
        residual = rest[0] if return_residual else x
        y = module.fused_h_res_h_post_bda(h_res, residual, h_post, (aggregated, None), 0.1, False, False)
        gradients.append(torch.autograd.grad(y.square().sum(), [x, *module.parameters()]))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("fused", [True, False])
def test_module_applies_parts(fused: bool) -> None:
    module = _randomised(_module(use_fused_mhc=fused))
    x, f, bias = torch.randn(3, 2, 20), torch.randn(3, 2, 5), torch.randn(5)
    _, h_res, h_post = module(x)
    spread, spread_bias = module.apply_h_post((f, bias), h_post)
    whole = module.fused_h_res_h_post_bda(h_res, x, h_post, (f, bias), 0.0, True, True)
    assert spread_bias is not None
    torch.testing.assert_close(module.apply_h_res(h_res, x) + spread + spread_bias, whole)
    assert module.apply_h_post((f, None), h_post)[1] is None


def test_dropout_drops_what_is_written_per_stream() -> None:
    module = _randomised(_module(C=400))
    x, f, bias = torch.randn(3, 2, 1600), torch.rand(3, 2, 400) + 1, torch.ones(400)
    _, h_res, h_post = module(x)
    mixed = module.apply_h_res(h_res, x)
    plain = module.fused_h_res_h_post_bda(h_res, x, h_post, (f, bias), 0.0, True, True) - mixed
    assert torch.equal(
        module.fused_h_res_h_post_bda(h_res, x, h_post, (f, bias), 0.25, False, True),
        module.fused_h_res_h_post_bda(h_res, x, h_post, (f, bias), 0.0, True, True),
    )
    ratio = (module.fused_h_res_h_post_bda(h_res, x, h_post, (f, bias), 0.25, True, True) - mixed) / plain
    dropped = ratio.abs() < 1e-3
    assert 0.22 < dropped.float().mean() < 0.28
    torch.testing.assert_close(ratio[~dropped], torch.full_like(ratio[~dropped], 4 / 3), rtol=1e-3, atol=0)
    assert not torch.equal(dropped[..., :400], dropped[..., 400:800])


def test_expand_and_contract() -> None:
    h = leaf(3, 2, 5)
    x = HyperConnectionModule.input_expand(h, 4)
    assert torch.equal(x, h.repeat(1, 1, 4))
    contracted = HyperConnectionModule.output_contract(x * torch.tensor([1.0, 2, 3, 6]).repeat_interleave(5), 4)
    torch.testing.assert_close(contracted, 3 * h)
    (dh,) = torch.autograd.grad(contracted.sum(), h)
    torch.testing.assert_close(dh, torch.full_like(h, 3.0))


class _Model(nn.Module):
    """Two sublayers between their connections, as a block of Megatron calls them."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.connections = nn.ModuleList(_module(use_fused_mhc=fused) for _ in range(2))
        self.sublayers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        x = HyperConnectionModule.input_expand(h, 4)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            read, h_res, h_post, residual = connection(x, return_residual=True)
            output = torch.nn.functional.linear(read.tanh(), sublayer.weight), sublayer.bias
            x = connection.fused_h_res_h_post_bda(h_res, residual, h_post, output, 0.0, True, True)
        return HyperConnectionModule.output_contract(x, 4)


def test_training_fused_and_native_alike() -> None:
    torch.manual_seed(3)
    fused, native = _Model(True), _Model(False)
    native.load_state_dict(copy.deepcopy(fused.state_dict()))
    h, target = torch.randn(6, 2, 5), torch.randn(6, 2, 5)
    losses: list[list[float]] = []
    for model in (fused, native):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        losses.append([])
        for _ in range(8):
            loss = (model(h) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_module_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    model, h = _Model(True), torch.randn(3, 2, 5)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(h), model(h))


SIGNATURES = {
    "sinkhorn": (["input_logits", "num_iterations", "eps"], {"eps": 1e-6}),
    "h_aggregate": (["x", "h_pre"], {}),
    "h_post_bda": (["h_res", "original_residual", "h_post", "x", "bias"], {}),
    "proj_rms": (["x", "weight", "eps"], {"eps": 1e-6}),
}


@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("kind", ["fused", "native"])
def test_signatures(kind: str, name: str) -> None:
    names, defaults = SIGNATURES[name]
    parameters = dict(inspect.signature(getattr(megatron, f"{kind}_{name}")).parameters)
    assert parameters.pop("backend", None) is not None or kind == "native"
    assert list(parameters) == names
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == defaults


def test_module_signatures() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(HyperConnectionModule) == ["config", "layer_number"]
    assert names(HyperConnectionModule.forward)[1:] == ["hidden_states", "mhc_recompute_manager", "return_residual"]
    assert names(HyperConnectionModule.fused_h_res_h_post_bda)[1:] == [
        "h_res", "original_residual", "h_post", "layer_output_with_bias",
        "dropout_prob", "training", "fused", "manager",
    ]  # fmt: skip


X, H = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"input_logits must be \[\.\.\., n, n\], got \(3, 2, 4, 5\)",
         lambda: megatron.fused_sinkhorn(X, 20)),
        (ValueError, "iterations must be at least 1", lambda: megatron.fused_sinkhorn(X[..., :4], 0)),
        (ValueError, "eps must be finite and not negative", lambda: megatron.fused_sinkhorn(X[..., :4], 2, -1.0)),
        (ValueError, "backend must be one of 'auto'", lambda: megatron.fused_sinkhorn(X[..., :4], 2, backend="cuda")),
        (ValueError, r"x must be \[s, b, n, C\] or \[s, b, n\*C\] with n = 4, got \(3, 2, 5\)",
         lambda: megatron.fused_h_aggregate(X[:, :, 0], H)),
        (ValueError, r"h_pre must be \[s, b, n\] = \(3, 2, 4\), got \(3, 1, 4\)",
         lambda: megatron.fused_h_aggregate(X, H[:, :1])),
        (ValueError, r"h_res must be \[s, b, n, n\] = \(3, 2, 4, 4\)",
         lambda: megatron.fused_h_post_bda(X, X, H, X[:, :, 0], None)),
        (ValueError, r"x must be \[s, b, C\] = \(3, 2, 5\)",
         lambda: megatron.fused_h_post_bda(X[..., :4], X, H, H, None)),
        (ValueError, r"bias must be \[C\] = \(5,\), got \(4,\)",
         lambda: megatron.fused_h_post_bda(X[..., :4], X, H, X[:, :, 0], torch.ones(4))),
        (ValueError, r"weight must be \[N, K\] for x \[M, K\], got \(24, 19\) for x \(6, 20\)",
         lambda: megatron.fused_proj_rms(torch.ones(6, 20), torch.ones(24, 19))),
        (TypeError, r"h_pre must be a torch.Tensor \[s, b, n\], got NoneType",
         lambda: megatron.fused_h_aggregate(X, None)),
        (ValueError, r"hidden_states must be \[s, b, n\*C\] = \(3, 2, 20\), got \(3, 2, 5\)",
         lambda: _module()(X[:, :, 0])),
        (ValueError, "mhc_recompute_manager must be None", lambda: _module()(X.flatten(-2), object())),
        (ValueError, "config.mhc_single_pass must be False", lambda: _module(mhc_single_pass=True)),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("fused", [True, False])
def test_no_tokens(fused: bool) -> None:
    module, x = _module(use_fused_mhc=fused), torch.randn(0, 2, 20)
    aggregated, h_res, h_post = module(x)
    assert (aggregated.shape, h_res.shape, h_post.shape) == ((0, 2, 5), (0, 2, 4, 4), (0, 2, 4))
    assert module.fused_h_res_h_post_bda(h_res, x, h_post, (aggregated, None), 0.0, True, True).shape == (0, 2, 20)
