"""Equality with the systems the presets are named after, forward and gradients, in float32 to 1e-5.

The Hugging Face models run their own code. Liger-Kernel's connection needs a GPU, so its math is written out here.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection, Glm5NextTextHyperHead
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection, HYV4HyperHead

import mhckit
from mhckit import Mix, Recipe
from mhckit.testing import relative_error

BATCH, TOKENS, STREAMS, CHANNELS = 2, 7, 4, 24


def _config(norm_eps: float) -> SimpleNamespace:
    return SimpleNamespace(
        hc_mult=STREAMS,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        hc_magnitude=2,
        rms_norm_eps=norm_eps,
        hidden_size=CHANNELS,
    )


def _randomised(module: nn.Module) -> nn.Module:
    """Parameters far from any symmetric or trivial value: logits of std near 1, different scales."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if parameter.ndim == 2:
                parameter.mul_(parameter.shape[1] ** -0.5)
    return module


def _streams() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(BATCH, TOKENS, STREAMS, CHANNELS, generator=generator)
    f = torch.randn(BATCH, TOKENS, CHANNELS, generator=generator)
    return x.requires_grad_(), f.requires_grad_()


def _deepseek_layer(module: nn.Module, x: Tensor, f: Tensor) -> tuple[Tensor, ...]:
    """As in the decoder layers of DeepSeek-V4 and GLM-5-next: read, sublayer, write."""
    post, comb, collapsed = module(x)
    y = post.unsqueeze(-1) * f.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x)
    return collapsed, post, comb.transpose(-1, -2), y


def _hy_layer(module: nn.Module, x: Tensor, f: Tensor) -> tuple[Tensor, ...]:
    post, collapsed = module(x)
    return collapsed, post, post.unsqueeze(-1) * f.unsqueeze(-2) + x


SYSTEMS = {
    "deepseek_v4": (DeepseekV4HyperConnection, 1e-6, _deepseek_layer),
    "glm5_next": (Glm5NextTextHyperConnection, 1e-5, _deepseek_layer),
    "hy_v4": (HYV4HyperConnection, 1e-5, _hy_layer),
}


def _assert_same(got, want) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        assert relative_error(a, b) < 1e-5, index


def _gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(13)
    weights = [torch.randn(o.shape, generator=generator) for o in outputs]
    return torch.autograd.grad(sum((o * w).sum() for o, w in zip(outputs, weights, strict=True)), inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", SYSTEMS)
def test_hugging_face_connection(preset: str) -> None:
    cls, norm_eps, layer = SYSTEMS[preset]
    recipe = Recipe.preset(preset)
    module = _randomised(cls(_config(norm_eps)))
    x, f = _streams()
    theirs = layer(module, x, f)
    if preset != "hy_v4":
        assert relative_error(theirs[2], theirs[2].mT) > 0.1  # asymmetric: a transposed matrix would show

    entered, x_in, mix = mhckit.enter(x, module.fn, module.scale, module.base, recipe=recipe)
    y = mhckit.leave(entered, f, mix, recipe=recipe)
    ours = (x_in, mix.post, *(() if mix.res is None else (mix.res,)), y)
    _assert_same(ours, theirs)
    leaves = [x, f, module.fn, module.scale, module.base]
    _assert_same(_gradients(ours, leaves), _gradients(theirs, leaves))


@pytest.mark.parametrize("preset", SYSTEMS)
def test_hugging_face_chain(preset: str) -> None:
    """Two sublayers and the head between the same parameters: our junction against their write, then read."""
    cls, norm_eps, layer = SYSTEMS[preset]
    recipe = Recipe.preset(preset)
    first, second = _randomised(cls(_config(norm_eps))), _randomised(cls(_config(norm_eps)))
    with torch.no_grad():
        second.base.mul_(-0.7)
    head_cls = {"deepseek_v4": DeepseekV4HyperHead, "glm5_next": None, "hy_v4": HYV4HyperHead}[preset]
    head = Glm5NextTextHyperHead() if head_cls is None else _randomised(head_cls(_config(norm_eps)))
    weight = torch.randn(CHANNELS, CHANNELS, requires_grad=True)
    x, f = _streams()

    h, *_, y = layer(first, x, f)
    h, *_, y = layer(second, y, (layer(second, y, f)[0] @ weight).tanh())
    theirs = (h, y, head(y))

    streams, _, mix = mhckit.enter(x, first.fn, first.scale, first.base, recipe=recipe)
    streams, h, mix = mhckit.junction(streams, f, mix, second.fn, second.scale, second.base, recipe=recipe)
    out = mhckit.leave(streams, (h @ weight).tanh(), mix, recipe=recipe)
    learned = {} if head_cls is None else dict(fn=head.hc_fn, scale=head.hc_scale, base=head.hc_base)
    ours = (h, out, mhckit.head(out, recipe=recipe, **learned))
    _assert_same(ours, theirs)
    leaves = [x, f, weight, *(p for m in (first, second, head) for p in m.parameters())]
    _assert_same(_gradients(ours, leaves), _gradients(theirs, leaves))


def _liger_coefficients(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Liger's design: phi [N*C, P], softmax over rows first, h_res [out, in], eps added to every sum."""
    n, eps = x.shape[-2], 1e-6
    flat = x.flatten(-2)
    inverse_rms = torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + 1e-6)
    mix = (flat @ phi) * inverse_rms
    h_pre = torch.sigmoid(alpha_pre * mix[..., :n] + b[:n])
    h_post = 2.0 * torch.sigmoid(alpha_post * mix[..., n : 2 * n] + b[n : 2 * n])
    logits = (alpha_res * mix[..., 2 * n :] + b[2 * n :]).reshape(*x.shape[:-2], n, n)
    h_res = torch.softmax(logits, dim=-1) + eps
    h_res = h_res / (h_res.sum(dim=-2, keepdim=True) + eps)
    for _ in range(19):
        h_res = h_res / (h_res.sum(dim=-1, keepdim=True) + eps)
        h_res = h_res / (h_res.sum(dim=-2, keepdim=True) + eps)
    return h_pre, h_post, h_res


def test_liger() -> None:
    recipe = Recipe.preset("liger")
    generator = torch.Generator().manual_seed(14)
    phi = (torch.randn(STREAMS * CHANNELS, recipe.rows, generator=generator) / 10).requires_grad_()
    b = torch.randn(recipe.rows, generator=generator).requires_grad_()
    alphas = [torch.tensor(value, requires_grad=True) for value in (0.7, -1.2, 1.5)]
    x, f = _streams()

    h_pre, h_post, h_res = _liger_coefficients(x, phi, b, *alphas)
    x_in = (x * h_pre.unsqueeze(-1)).sum(dim=-2)
    x_out = h_res @ x + h_post.unsqueeze(-1) * f.unsqueeze(-2)
    theirs = (h_pre, h_post, h_res, x_in, x_out)

    streams, ours_in, mix = mhckit.enter(x, phi.mT, torch.stack(alphas), b, recipe=recipe)
    assert isinstance(mix, Mix)
    assert mix.res is not None
    ours = (mix.pre, mix.post, mix.res, ours_in, mhckit.leave(streams, f, mix, recipe=recipe))
    _assert_same(ours, theirs)
    leaves = [x, f, phi, b, *alphas]
    _assert_same(_gradients(ours, leaves), _gradients(theirs, leaves))
