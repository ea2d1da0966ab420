r"""The interface of mHC-triton: ``from mhckit.compat.mhc_triton import HyperConnection`` in place of ``from mhc``.

    r = 1 / sqrt(mean(x^2) + eps)                   over the n*C values of a token
    l = alpha r (x phi) + bias                      columns of phi: 0..n-1 pre | n..2n-1 post | n*n residual, row-major
    H_pre  = sigmoid(l_pre) / (sum over streams + eps)             H_post = 2 sigmoid(l_post)
    H_res  = sinkhorn_knopp(l_res)                  |l| + eps; rows, then columns divided by (their sum + eps), in turn
    branch_input[c] = sum_i H_pre[i] H[i,c]
    H_new[o,c]      = sum_i H_res[o,i] H[i,c] + H_post[o] branch_output[c]

n streams, o out and i in; C = dim channels; tensors of streams are [batch, seq, n, C].

What differs on purpose:

- Coefficients are computed per token. The original computes one set from the mean over the sequence, so that a token
  sees those after it. With one token, or without dynamic weights, the two agree.
- alpha stays on its device: no host synchronisation.
- H_new is rounded once, and H_res H is not stored in between.
- Any number of streams, any leading axes, and the CPU too. On a GPU, more than 8 streams need
  ``mhckit.backend("reference")``.

|l| has slope +1 at l = 0, as in the original's kernels: the residual matrix starts as the identity, and with slope 0
its zeros could never learn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mhckit.modules._base import set_values
from mhckit.ops import Mix, coefficients, enter, leave, post, pre, sinkhorn
from mhckit.ops._check import check_shape, check_tensor
from mhckit.recipe import Recipe

from ._check import check_count, check_positive_eps, check_scalar
from ._recipes import recipe_of

__all__ = ["HyperConnection", "fused_add_residual", "fused_dynamic_weights", "fused_stream_mix", "sinkhorn_knopp"]

# Added to residual logits: lost in the rounding of any but a zero, which it puts on the rising side of |l|.
_TINY = 1e-30
_SMALL_EPS = 1e-8  # where the original does not use its eps argument


class HyperConnection(nn.Module):
    """One sublayer's connection to the streams: ``branch_input, add_residual = hc(H)``, then ``H = add_residual(f)``.

    Coefficients are per token; the original's come from the mean over the sequence (see the module's docstring).

    Args:
        dim: C, the width of the model.
        num_streams: n; the original takes 4 only.
        layer_idx: position of the layer; the initial H_pre favours stream ``layer_idx % n``.
        dynamic: compute the coefficients from the streams; False learns one set for all tokens. H_post of a static
            connection is sigmoid, without the factor 2.
        sinkhorn_iters: how often rows and columns are normalised.
        init_scale: initial alpha.
        eps: of the norm, of H_pre's sum and of Sinkhorn; static connections use 1e-8.
        use_fused_weights: False gives the original's earlier parameters and math: H_post without the factor 2, and
            eps for the norm alone (1e-8 elsewhere).

    Parameters: ``H_post_base`` [n], ``H_pre_base`` [n], ``H_res_base`` [n, n]. Dynamic: ``phi`` [n*C, n*n + 2n] and
    ``alpha_pre``, ``alpha_post``, ``alpha_res`` [1]; with ``use_fused_weights=False`` instead ``W_post.weight`` [n,
    n*C], ``W_pre.weight`` [n, n*C], ``W_res.weight`` [n*n, n*C] and ``scale_post``, ``scale_pre``, ``scale_res`` [1].
    Checkpoints that hold the scalars as [] load too.
    """

    mhckit_projections = ("phi", "W_pre.weight", "W_post.weight", "W_res.weight")
    mhckit_no_decay = (
        "H_pre_base", "H_post_base", "H_res_base", "alpha_pre", "alpha_post", "alpha_res", "scale_pre", "scale_post",
        "scale_res",
    )  # fmt: skip

    def __init__(
        self,
        dim: int,
        num_streams: int = 4,
        layer_idx: int = 0,
        dynamic: bool = True,
        sinkhorn_iters: int = 20,
        init_scale: float = 0.1,
        eps: float = 1e-6,
        use_fused_weights: bool = True,
    ) -> None:
        super().__init__()
        self.dim = check_count("dim", dim)
        self.num_streams = n = check_count("num_streams", num_streams)
        self.layer_idx = check_count("layer_idx", layer_idx, least=0)
        self.dynamic = dynamic
        self.sinkhorn_iters = check_count("sinkhorn_iters", sinkhorn_iters)
        self.init_scale = float(init_scale)
        self.eps = check_positive_eps(eps)
        self.use_fused_weights = use_fused_weights and dynamic
        if self.use_fused_weights:
            self.recipe = _fused_recipe(n, sinkhorn_iters, self.eps)
        else:
            self.recipe = _recipe(n, sinkhorn_iters, _SMALL_EPS, self.eps, dynamic, 1.0)
        self.H_post_base = nn.Parameter(torch.empty(n))
        self.H_pre_base = nn.Parameter(torch.empty(n))
        self.H_res_base = nn.Parameter(torch.empty(n, n))
        if self.use_fused_weights:
            self.phi = nn.Parameter(torch.empty(n * dim, n * n + 2 * n))
            self.alpha_pre, self.alpha_post, self.alpha_res = (nn.Parameter(torch.empty(1)) for _ in range(3))
        elif dynamic:
            self.W_post = nn.Linear(n * dim, n, bias=False)
            self.W_pre = nn.Linear(n * dim, n, bias=False)
            self.W_res = nn.Linear(n * dim, n * n, bias=False)
            self.scale_post, self.scale_pre, self.scale_res = (nn.Parameter(torch.empty(1)) for _ in range(3))
        self.register_load_state_dict_pre_hook(_load_scalars)
        self.init_weights(layer_idx)

    @torch.no_grad()
    def init_weights(self, layer_idx: int | None = None) -> None:
        """Initial values: H_pre favours stream ``layer_idx % n``, H_res is the identity, projections are zero.

        Args:
            layer_idx: the one given at construction by default.
        """
        if layer_idx is not None:
            self.layer_idx = check_count("layer_idx", layer_idx, least=0)
        identity = torch.eye(self.num_streams)
        set_values(self.H_post_base, torch.ones(self.num_streams))
        set_values(self.H_pre_base, identity[self.layer_idx % self.num_streams])
        set_values(self.H_res_base, identity)
        for scalar in self._scalars():
            nn.init.constant_(scalar, self.init_scale)
        for weight in self._projections():
            nn.init.zeros_(weight)

    def forward(self, H: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What the layer reads, [batch, seq, C], and the function that takes its output [batch, seq, C] to the new H.

        Args:
            H: streams [batch, seq, n, C].
        """
        check_tensor("H", H, "[batch, seq, n, C]")
        wanted = (self.num_streams, self.dim)
        if H.shape[-2:] != wanted:
            raise ValueError(f"H must be [batch, seq, n, C] with (n, C) = {wanted}, got {tuple(H.shape)}")
        phi = scale = None
        if self.dynamic:
            projections = self._projections()
            phi = projections[0].mT if self.use_fused_weights else torch.cat(projections)
            scale = torch.cat(self._scalars())
        bias = torch.cat([self.H_pre_base, self.H_post_base, self.H_res_base.flatten()])
        streams, branch_input, mix = enter(H, phi, scale, _off_zero(bias, self.recipe), recipe=self.recipe)
        return branch_input, functools.partial(_add_residual, streams, mix, self.recipe)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, num_streams={self.num_streams}, dynamic={self.dynamic}, "
            f"sinkhorn_iters={self.sinkhorn_iters}, use_fused_weights={self.use_fused_weights}"
        )

    def _projections(self) -> list[Tensor]:
        if self.use_fused_weights:
            return [self.phi]
        return [self.W_pre.weight, self.W_post.weight, self.W_res.weight] if self.dynamic else []

    def _scalars(self) -> list[Tensor]:
        if self.use_fused_weights:
            return [self.alpha_pre, self.alpha_post, self.alpha_res]
        return [self.scale_pre, self.scale_post, self.scale_res] if self.dynamic else []


def fused_dynamic_weights(
    x: Tensor,
    phi: Tensor,
    bias: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """H_pre [..., n], H_post [..., n] and H_res [..., n, n] ([out, in]) of flattened streams, in float32.

    Args:
        x: [..., n*C], stream by stream; one row per token gives coefficients per token.
        phi: [n*C, n*n + 2n].
        bias: [n*n + 2n].
        alpha_pre, alpha_post, alpha_res: tensors of one element.
        sinkhorn_iters: how often rows and columns are normalised.
        eps: of the norm, of H_pre's sum and of Sinkhorn.
    """
    check_tensor("x", x, "[..., n*C]")
    check_tensor("phi", phi, "[n*C, n*n + 2n]", like=x)
    width = x.shape[-1] if x.ndim else 0
    n = math.isqrt(phi.shape[-1] + 1) - 1 if phi.ndim else 0
    if n < 1 or phi.shape != (width, n * n + 2 * n):
        raise ValueError(f"phi must be [n*C, n*n + 2n] with n*C = {width}, got {tuple(phi.shape)}")
    if width < 1 or width % n:
        raise ValueError(f"x must be [..., n*C] with n = {n} (from phi), got {tuple(x.shape)}")
    check_shape("bias", bias, "[n*n + 2n]", (phi.shape[-1],), like=x)
    alphas = {"alpha_pre": alpha_pre, "alpha_post": alpha_post, "alpha_res": alpha_res}
    scale = torch.stack([check_scalar(name, alpha, x) for name, alpha in alphas.items()])
    recipe = _fused_recipe(n, check_count("sinkhorn_iters", sinkhorn_iters), check_positive_eps(eps))
    streams = x.float().unflatten(-1, (n, width // n))
    mix = coefficients(streams, phi.mT, scale, _off_zero(bias, recipe), recipe=recipe)
    assert mix.res is not None
    return mix.pre, mix.post, mix.res


def sinkhorn_knopp(M: Tensor, num_iters: int = 20, eps: float = 1e-8) -> Tensor:
    """|M| + eps with rows, then columns divided by (their sum + eps), num_iters times; the dtype of M.

    Args:
        M: square matrices [..., n, n].
        num_iters: how often.
        eps: added to every entry and every sum.
    """
    check_tensor("M", M, "[..., n, n]")
    if M.ndim < 2 or M.shape[-1] != M.shape[-2] or M.shape[-1] < 1:
        raise ValueError(f"M must be [..., n, n] with n >= 1, got {tuple(M.shape)}")
    eps = check_positive_eps(eps)
    recipe = _recipe(M.shape[-1], check_count("num_iters", num_iters), eps, eps, False, 1.0)
    matrix = sinkhorn(M.float() + _TINY, recipe=recipe)
    assert matrix is not None
    return matrix.to(M.dtype)


def fused_stream_mix(H: Tensor, H_pre: Tensor, H_res: Tensor) -> tuple[Tensor, Tensor]:
    """branch_input = sum_i H_pre[i] H[i], [batch, seq, C], and H_residual = H_res H, [batch, seq, n, C].

    Args:
        H: streams [batch, seq, n, C].
        H_pre: [batch, n] for all tokens of a sequence, or [batch, seq, n].
        H_res: [batch, n, n] ([out, in]), or [batch, seq, n, n].

    Both results have the dtype of H.
    """
    _check_streams("H", H)
    n = H.shape[-2]
    H_pre = _per_token("H_pre", H_pre, H, "n", (n,))
    H_res = _per_token("H_res", H_res, H, "n, n", (n, n))
    nothing = H.new_zeros(*H.shape[:-2], H.shape[-1])
    return pre(H, H_pre), post(H, nothing, torch.zeros_like(H_pre), H_res)


def fused_add_residual(H_residual: Tensor, branch_output: Tensor, H_post: Tensor) -> Tensor:
    """H_residual[o] + H_post[o] branch_output, [batch, seq, n, C] in the dtype of H_residual.

    Args:
        H_residual: mixed streams [batch, seq, n, C].
        branch_output: the layer's output [batch, seq, C].
        H_post: [batch, n] for all tokens of a sequence, or [batch, seq, n].
    """
    _check_streams("H_residual", H_residual)
    _check_output(branch_output, H_residual)
    H_post = _per_token("H_post", H_post, H_residual, "n", (H_residual.shape[-2],))
    return post(H_residual, branch_output, H_post, None)


def _add_residual(streams: Tensor, mix: Mix, recipe: Recipe, branch_output: Tensor) -> Tensor:
    _check_output(branch_output, streams)
    return leave(streams, branch_output, mix, recipe=recipe)


def _fused_recipe(streams: int, iterations: int, eps: float) -> Recipe:
    return _recipe(streams, iterations, eps, eps, True, 2.0)


def _recipe(streams: int, iterations: int, eps: float, norm_eps: float, dynamic: bool, post_scale: float) -> Recipe:
    """eps is that of Sinkhorn and of H_pre's sum."""
    return recipe_of(
        "mhc_triton",
        streams=streams,
        iterations=iterations,
        eps=eps,
        normalized_pre_eps=eps,
        norm_eps=norm_eps,
        dynamic=dynamic,
        post_scale=post_scale,
    )


def _off_zero(bias: Tensor, recipe: Recipe) -> Tensor:
    """bias with its residual part off zero, in float32."""
    pre_and_post, res = bias.float().tensor_split([2 * recipe.streams])
    return torch.cat([pre_and_post, res + _TINY])


def _per_token(name: str, weights: Tensor, H: Tensor, axes: str, shape: tuple[int, ...]) -> Tensor:
    """Weights of every token, from those or from weights of a sequence."""
    axes_of_both = f"[batch, {axes}] or [batch, seq, {axes}]"
    check_tensor(name, weights, axes_of_both, like=H)
    batch, seq = H.shape[:2]
    if weights.shape == (batch, *shape):
        weights = weights.unsqueeze(1).expand(batch, seq, *shape)
    elif weights.shape != (batch, seq, *shape):
        raise ValueError(
            f"{name} must be {axes_of_both} = {(batch, *shape)} or {(batch, seq, *shape)}, got {tuple(weights.shape)}"
        )
    return weights


def _load_scalars(_module: nn.Module, state_dict: dict[str, Any], prefix: str, *_rest: Any) -> None:
    """Scalars saved as [] become [1]."""
    for name in ("alpha_pre", "alpha_post", "alpha_res", "scale_pre", "scale_post", "scale_res"):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.ndim == 0:
            state_dict[prefix + name] = value.reshape(1)


def _check_streams(name: str, H: Tensor) -> None:
    check_tensor(name, H, "[batch, seq, n, C]")
    if H.ndim != 4 or 0 in H.shape[-2:]:
        raise ValueError(f"{name} must be [batch, seq, n, C] with n >= 1 and C >= 1, got {tuple(H.shape)}")


def _check_output(branch_output: Tensor, streams: Tensor) -> None:
    shape = (*streams.shape[:-2], streams.shape[-1])
    check_shape("branch_output", branch_output, "[batch, seq, C]", shape, like=streams)
