r"""Megatron-LM's mHC: the fused functions, the native ones beside them, and HyperConnectionModule.

    proj_rms      proj = x W^T                                   r = 1 / (||x|| / sqrt(K) + eps)
    compute_h     l = r proj alpha[group] + bias                 h_pre = sigmoid(l) + eps      h_post = 2 sigmoid(l)
    sinkhorn      R = softmax(l) + eps, columns; then `num_iterations - 1` times rows, columns; / (sum + eps)
    h_aggregate   out[c] = sum_i h_pre[i] x[i,c]
    h_post_bda    out[o,c] = sum_i h_res[i,o] residual[i,c] + h_post[o] (x[c] + bias[c])

s, b tokens; n streams, i in and o out; C channels; K = n*C; W [n*n + 2n, K], rows n pre, n post, n*n res. So h_res is
[in, out]: Megatron multiplies the streams by its transpose.

The names come from ``megatron.core.fusions.fused_mhc_kernels`` and ``megatron.core.transformer.hyper_connection``, with
the math that Megatron has had since its pull request 4624. Before that h_res was applied untransposed, Sinkhorn started
from exp(l - rowmax) and h_pre had no eps: a checkpoint of that time is wrong here, see ``Recipe.preset("megatron")``.

What differs on purpose:
- Streams may be [s, b, n, C], as there, or flat, [s, b, n*C]; the result has the shape of the argument.
- Results have the dtype of the streams, where Megatron's kernels take the dtype of h_res; n need not be a power of two.
- ``backend``: "native" takes the native function; "auto", "triton" and "cutile" all take mhckit's operators, on any
  device. Those sum in float32 and are deterministic; the native functions compute in the dtype they are given.
- A token of zeros has zero gradient through r, not NaN, and none of the functions waits for the GPU.
- HyperConnectionModule is a plain nn.Module that imports nothing of Megatron: no sharded state dict, no recompute
  manager (use torch.utils.checkpoint), no single-pass mHC (``Recipe.preset("deepseek_v41")``).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhckit.modules._base import HyperModule
from mhckit.ops import activate, coefficients, enter, expand, post, pre, project, sinkhorn
from mhckit.ops._check import check_eps, check_optional, check_shape, check_tensor
from mhckit.recipe import Recipe

__all__ = [
    "HyperConnectionModule",
    "fused_h_aggregate",
    "fused_h_post_bda",
    "fused_proj_rms",
    "fused_proj_rms_compute_h",
    "fused_sinkhorn",
    "native_h_aggregate",
    "native_h_post_bda",
    "native_proj_rms",
    "native_sinkhorn",
]

EPS = 1e-6  # of the norm, of Sinkhorn and of h_pre
BACKENDS = ("auto", "native", "triton", "cutile")


def native_sinkhorn(input_logits: Tensor, num_iterations: int, eps: float = EPS) -> Tensor:
    """``fused_sinkhorn`` in plain torch."""
    matrix = input_logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(num_iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def native_h_aggregate(x: Tensor, h_pre: Tensor) -> Tensor:
    """``fused_h_aggregate`` in plain torch."""
    return (_as_streams("x", x, h_pre) * h_pre[..., None]).sum(-2)


def native_h_post_bda(
    h_res: Tensor, original_residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    """``fused_h_post_bda`` in plain torch."""
    mixed = h_res.mT @ _as_streams("original_residual", original_residual, h_post)
    written = h_post[..., None] * (x if bias is None else x + bias)[..., None, :]
    return (mixed + written).reshape(original_residual.shape)


def native_proj_rms(x: Tensor, weight: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """``fused_proj_rms`` in plain torch."""
    rms = x.norm(dim=-1, keepdim=True) / math.sqrt(x.shape[-1])
    return x @ weight.t(), 1 / (rms + eps)


def fused_sinkhorn(input_logits: Tensor, num_iterations: int, eps: float = EPS, *, backend: str = "auto") -> Tensor:
    """Doubly stochastic matrices from logits.

    Args:
        input_logits: [..., n, n].
        num_iterations: how often rows and columns are normalised; the softmax is the first row step.
        eps: added to the softmax and to every sum.
        backend: see the module.

    Returns:
        [..., n, n] in the dtype and orientation of input_logits.
    """
    logits = check_tensor("input_logits", input_logits, "[..., n, n]")
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2] or not logits.shape[-1]:
        raise ValueError(f"input_logits must be [..., n, n], got {tuple(logits.shape)}")
    if _is_native(backend):
        return native_sinkhorn(logits, num_iterations, eps)
    matrix = sinkhorn(logits, recipe=_recipe(logits.shape[-1], num_iterations, eps, stored="out_in"))
    assert matrix is not None
    return matrix.to(logits.dtype)


def fused_h_aggregate(x: Tensor, h_pre: Tensor, *, backend: str = "auto") -> Tensor:
    """What the sublayer reads: the streams, weighted by h_pre and added.

    Args:
        x: streams [s, b, n, C] or [s, b, n*C].
        h_pre: [s, b, n].
        backend: see the module.

    Returns:
        [s, b, C] in the dtype of x.
    """
    x = _as_streams("x", x, check_tensor("h_pre", h_pre, "[s, b, n]"))
    check_shape("h_pre", h_pre, "[s, b, n]", x.shape[:-1], like=x)
    return native_h_aggregate(x, h_pre) if _is_native(backend) else pre(x, h_pre)


def fused_h_post_bda(
    h_res: Tensor,
    original_residual: Tensor,
    h_post: Tensor,
    x: Tensor,
    bias: Tensor | None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Write the sublayer's output back: h_res^T @ original_residual + h_post (x + bias).

    Args:
        h_res: [s, b, n, n], [in, out].
        original_residual: streams [s, b, n, C] or [s, b, n*C].
        h_post: [s, b, n].
        x: the sublayer's output [s, b, C].
        bias: [C], its last bias, or None.
        backend: see the module.

    Returns:
        streams in the shape and dtype of original_residual.
    """
    streams = _as_streams("original_residual", original_residual, check_tensor("h_post", h_post, "[s, b, n]"))
    *lead, n, channels = streams.shape
    check_shape("h_res", h_res, "[s, b, n, n]", (*lead, n, n), like=streams)
    check_shape("h_post", h_post, "[s, b, n]", (*lead, n), like=streams)
    check_shape("x", x, "[s, b, C]", (*lead, channels), like=streams)
    check_optional("bias", bias, "[C]", (channels,), like=streams)
    if _is_native(backend):
        return native_h_post_bda(h_res, original_residual, h_post, x, bias)
    return post(streams, x, h_post, h_res.mT, f_bias=bias).reshape(original_residual.shape)


def fused_proj_rms(x: Tensor, weight: Tensor, eps: float = EPS, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The projection of every token's streams, and the reciprocal of their root mean square.

    Args:
        x: [M, K], or [..., K].
        weight: [N, K].
        eps: added to the root mean square.
        backend: see the module.

    Returns:
        proj [M, N] = x @ weight^T and r [M, 1], in the dtype of x.
    """
    eps = check_eps("eps", eps)
    _check_projection(x, weight)
    if _is_native(backend):
        return native_proj_rms(x, weight, eps)
    proj, mean_square = project(x.unflatten(-1, (_streams_of(weight), -1)), weight)
    return proj.to(x.dtype), _reciprocal_rms(mean_square, eps).to(x.dtype)


def fused_proj_rms_compute_h(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    n: int,
    eps: float = EPS,
    compute_h_eps: float = EPS,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``fused_proj_rms`` and the activations after it.

    Args:
        x: [M, n*C].
        weight: [n*n + 2n, n*C].
        alpha_pre, alpha_post, alpha_res: [1] each.
        bias: [n*n + 2n].
        n: streams.
        eps: added to the root mean square.
        compute_h_eps: added to h_pre.
        backend: see the module; "native" computes in float32 too.

    Returns:
        h_pre [M, n], h_post [M, n], h_res [M, n*n] (the logits of ``fused_sinkhorn``) and r [M, 1], in float32.
    """
    recipe = _recipe(n, norm_eps=eps, pre_eps=compute_h_eps)
    _check_projection(x, weight)
    check_shape("weight", weight, "[n*n + 2n, n*C]", (recipe.rows, x.shape[-1]))
    check_shape("bias", bias, "[n*n + 2n]", (recipe.rows,), like=x)
    if _is_native(backend):
        proj, r = native_proj_rms(x.float(), weight.float(), eps)
        return *_native_compute_h(proj, r, _alpha(alpha_pre, alpha_post, alpha_res), bias, n, compute_h_eps), r
    proj, mean_square = project(x.unflatten(-1, (n, -1)), weight)
    alpha = _alpha(alpha_pre, alpha_post, alpha_res)
    h_pre, h_post, h_res = activate(proj, mean_square, alpha, bias, recipe=recipe)
    assert h_res is not None
    return h_pre, h_post, h_res.flatten(-2), _reciprocal_rms(mean_square, eps)


class HyperConnectionModule(HyperModule):
    """The hyper-connection of one sublayer, with Megatron's parameter names, methods and return values.

        aggregated, h_res, h_post = hc(hidden_states)
        output_with_bias = sublayer(aggregated)
        hidden_states = hc.fused_h_res_h_post_bda(h_res, hidden_states, h_post, output_with_bias, p, training, True)

    Args:
        config: any object with ``mhc_num_residual_streams`` (or ``num_residual_streams``), ``hidden_size``,
            ``mhc_sinkhorn_iterations``, ``mhc_init_gating_factor`` and ``sequence_parallel``. ``use_fused_mhc`` chooses
            between mhckit's operators and plain torch; an object without it gets the operators.
            ``perform_initialization=False`` leaves ``mapping_proj`` as nn.Linear made it.
        layer_number: kept as an attribute; nothing depends on it.

    Parameters, in float32 whatever the model is cast to: ``mapping_proj.weight`` [n*n + 2n, n*C], ``alpha_pre``,
    ``alpha_post``, ``alpha_res`` [1], ``bias`` [n*n + 2n]. With ``sequence_parallel`` each is marked so, for Megatron's
    all-reduce of their gradients. Coefficients are returned in the dtype of the streams; on the fused path the read
    weights are not rounded to it before they are used.
    """

    def __init__(self, config: Any, layer_number: int) -> None:
        if getattr(config, "mhc_single_pass", False):
            raise ValueError(
                "config.mhc_single_pass must be False: use Recipe.preset('deepseek_v41') for single-pass mHC"
            )
        n = getattr(config, "mhc_num_residual_streams", None)
        n = config.num_residual_streams if n is None else n
        super().__init__(
            config.hidden_size,
            _recipe(n, config.mhc_sinkhorn_iterations),
            out_dtype=None,
            keep_float32=True,
            backend=None,
        )
        self.config, self.layer_number = config, layer_number
        self.n, self.hidden_size = n, config.hidden_size
        self.sinkhorn_iterations = config.mhc_sinkhorn_iterations
        self.norm_eps = self.sinkhorn_eps = self.compute_h_eps = EPS
        self.use_fused = bool(getattr(config, "use_fused_mhc", True))

        def scalar() -> nn.Parameter:
            return nn.Parameter(torch.full((1,), float(config.mhc_init_gating_factor), dtype=torch.float32))

        self.mapping_proj = nn.Linear(n * self.hidden_size, self.recipe.rows, bias=False, dtype=torch.float32)
        self.alpha_pre, self.alpha_post, self.alpha_res = scalar(), scalar(), scalar()
        self.bias = nn.Parameter(torch.zeros(self.recipe.rows, dtype=torch.float32))
        if getattr(config, "perform_initialization", True):
            nn.init.xavier_uniform_(self.mapping_proj.weight)
        if config.sequence_parallel:
            for parameter in self.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(
        self, hidden_states: Tensor, mhc_recompute_manager: None = None, return_residual: bool = False
    ) -> tuple[Tensor, ...]:
        """Read the sublayer's input from the streams.

        Args:
            hidden_states: streams [s, b, n*C].
            mhc_recompute_manager: must be None.
            return_residual: return the streams too; writing to that tensor rather than to hidden_states saves autograd
                an addition on the fused path.

        Returns:
            aggregated [s, b, C], h_res [s, b, n, n], h_post [s, b, n], and on request residual [s, b, n*C].
        """
        _refuse("mhc_recompute_manager", mhc_recompute_manager)
        streams = self._check_streams("hidden_states", hidden_states)
        if self.use_fused:
            with self.use_own_backend():
                streams, aggregated, mix = enter(streams, *self._parameters_of_mix(), recipe=self.recipe)
            assert mix.res is not None
            h_post, h_res = mix.post.to(streams.dtype), mix.res.mT.to(streams.dtype)
        else:
            h_pre, h_post, h_res = self.compute_mappings(hidden_states)
            aggregated = self.aggregate(hidden_states, h_pre)
        return aggregated, h_res, h_post, *([streams.flatten(-2)] if return_residual else [])

    def compute_mappings(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h_pre [s, b, n], h_post [s, b, n] and h_res [s, b, n, n], in the dtype of the streams x [s, b, n*C]."""
        streams = self._check_streams("x", x)
        weight, alpha, bias = self._parameters_of_mix()
        if self.use_fused:
            with self.use_own_backend():
                h_pre, h_post, res = coefficients(streams, weight, alpha, bias, recipe=self.recipe)
            assert res is not None
            h_res = res.mT
        else:
            proj, r = native_proj_rms(x.float(), weight.float(), self.norm_eps)
            h_pre, h_post, h_res = _native_compute_h(proj, r, alpha, bias, self.n, self.compute_h_eps)
            h_res = native_sinkhorn(h_res.unflatten(-1, (self.n, self.n)), self.sinkhorn_iterations, self.sinkhorn_eps)
        return h_pre.to(x.dtype), h_post.to(x.dtype), h_res.to(x.dtype)

    def aggregate(self, x: Tensor, h_pre: Tensor) -> Tensor:
        """[s, b, C] from streams x [s, b, n*C] and h_pre [s, b, n]."""
        return fused_h_aggregate(x, h_pre, backend=self._backend_name())

    def apply_h_res(self, h_res: Tensor, residual: Tensor) -> Tensor:
        """The streams [s, b, n*C], mixed by h_res [s, b, n, n]; nothing is written to them."""
        return (h_res.mT @ self._check_streams("residual", residual)).flatten(-2)

    def apply_h_post(
        self, x_with_bias: tuple[Tensor, Tensor | None], h_post: Tensor, manager: None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [s, b, C] and bias [C] (or None), each spread over the streams by h_post [s, b, n]: [s, b, n*C]."""
        _refuse("manager", manager)
        x, bias = x_with_bias
        return _spread(x, h_post), None if bias is None else _spread(bias, h_post)

    def fused_h_res_h_post_bda(
        self,
        h_res: Tensor,
        original_residual: Tensor,
        h_post: Tensor,
        layer_output_with_bias: tuple[Tensor, Tensor | None],
        dropout_prob: float,
        training: bool,
        fused: bool,
        manager: None = None,
    ) -> Tensor:
        """Write the sublayer's output to the streams: h_res^T @ original_residual + dropout(h_post (x + bias)).

        Args:
            h_res, h_post: from forward.
            original_residual: streams [s, b, n*C] that forward read.
            layer_output_with_bias: x [s, b, C] and bias [C] or None.
            dropout_prob: each element of each stream is dropped on its own. Above 0, in training, plain torch runs.
            training: whether dropout applies.
            fused: no effect.
            manager: must be None.

        Returns:
            streams [s, b, n*C].
        """
        _refuse("manager", manager)
        self._check_streams("original_residual", original_residual)
        x, bias = layer_output_with_bias
        if dropout_prob == 0 or not training:
            return fused_h_post_bda(h_res, original_residual, h_post, x, bias, backend=self._backend_name())
        written = _spread(x if bias is None else x + bias, h_post)
        return self.apply_h_res(h_res, original_residual) + F.dropout(written, dropout_prob, training)

    @staticmethod
    def input_expand(x: Tensor, n: int) -> Tensor:
        """Streams [s, b, n*C], each a copy of x [s, b, C]."""
        return expand(x, n).flatten(-2)

    @staticmethod
    def output_contract(x: Tensor, n: int) -> Tensor:
        """The mean [s, b, C] of streams x [s, b, n*C]."""
        return x.unflatten(-1, (n, -1)).mean(-2)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, n={self.n}, use_fused_mhc={self.use_fused}"

    def _parameters_of_mix(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.mapping_proj.weight, _alpha(self.alpha_pre, self.alpha_post, self.alpha_res), self.bias

    def _backend_name(self) -> str:
        return "auto" if self.use_fused else "native"

    def _check_streams(self, name: str, x: Tensor) -> Tensor:
        """Streams [s, b, n, C]."""
        check_tensor(name, x, "[s, b, n*C]", like=self.bias)
        check_shape(name, x, "[s, b, n*C]", (*x.shape[:-1], self.n * self.hidden_size))
        return x.unflatten(-1, (self.n, self.hidden_size))


def _recipe(
    n: int,
    iterations: int = 20,
    eps: float = EPS,
    stored: str = "in_out",
    norm_eps: float = EPS,
    pre_eps: float = EPS,
) -> Recipe:
    return _cached_recipe(n, iterations, check_eps("eps", eps), stored, norm_eps, pre_eps)


@functools.lru_cache(maxsize=256)
def _cached_recipe(n: int, iterations: int, eps: float, stored: str, norm_eps: float, pre_eps: float) -> Recipe:
    """Without eps, the softmax is an ordinary first step."""
    start = dict(init="softmax", eps=eps, eps_mode="add") if eps else dict(init="exp", eps=0.0, eps_mode="none")
    fields = dict(streams=n, iterations=iterations, stored=stored, norm_eps=norm_eps, pre_eps=pre_eps)
    return Recipe.preset("megatron", **fields, **start)


def _native_compute_h(
    proj: Tensor, r: Tensor, alpha: Tensor, bias: Tensor, n: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (n, n, n * n)
    logits = zip((proj * r).split(sizes, -1), alpha, bias.split(sizes), strict=True)
    h_pre, h_post, h_res = (part * scale + shift for part, scale, shift in logits)
    return h_pre.sigmoid() + eps, 2 * h_post.sigmoid(), h_res


def _alpha(*alphas: Tensor) -> Tensor:
    """[3] from pre, post, res of one element each."""
    for name, alpha in zip(("alpha_pre", "alpha_post", "alpha_res"), alphas, strict=True):
        if check_tensor(name, alpha, "[1]").numel() != 1:
            raise ValueError(f"{name} must be [1], got {tuple(alpha.shape)}")
    return torch.cat([alpha.reshape(1) for alpha in alphas])


def _reciprocal_rms(mean_square: Tensor, eps: float) -> Tensor:
    """[..., 1]; the root has no gradient at zero."""
    positive = mean_square > 0
    rms = torch.where(positive, torch.where(positive, mean_square, 1.0).sqrt(), 0.0)
    return (1 / (rms + eps))[..., None]


def _spread(x: Tensor, h_post: Tensor) -> Tensor:
    return (h_post[..., None] * x[..., None, :]).flatten(-2)


def _as_streams(name: str, x: Tensor, weights: Tensor) -> Tensor:
    """Streams [s, b, n, C] from that or from [s, b, n*C]; weights [s, b, n] tell which."""
    check_tensor(name, x, "[s, b, n, C]")
    n = weights.shape[-1] if weights.ndim else 0
    if n and x.ndim == weights.ndim and x.shape[-1] and x.shape[-1] % n == 0:
        return x.unflatten(-1, (n, -1))
    if not n or x.ndim != weights.ndim + 1 or x.shape[-2] != n:
        raise ValueError(f"{name} must be [s, b, n, C] or [s, b, n*C] with n = {n}, got {tuple(x.shape)}")
    return x


def _streams_of(weight: Tensor) -> int:
    """How to divide the columns of weight for the projection; any division gives the same sums."""
    n = math.isqrt(weight.shape[0] + 1) - 1
    return n if n >= 1 and n * n + 2 * n == weight.shape[0] and weight.shape[1] % n == 0 else 1


def _check_projection(x: Tensor, weight: Tensor) -> None:
    check_tensor("x", x, "[M, K]")
    check_tensor("weight", weight, "[N, K]", like=x)
    if x.ndim < 1 or weight.ndim != 2 or not x.shape[-1] or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight must be [N, K] for x [M, K], got {tuple(weight.shape)} for x {tuple(x.shape)}")


def _is_native(backend: str) -> bool:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    return backend == "native"


def _refuse(name: str, manager: object) -> None:
    if manager is not None:
        raise ValueError(
            f"{name} must be None: Megatron's recompute managers are not supported; use torch.utils.checkpoint"
        )
