"""Megatron's module of one hyper-connection."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhckit.modules._base import HyperModule
from mhckit.ops import coefficients, enter, expand
from mhckit.ops._check import check_shape, check_tensor

from ._functions import fused_h_aggregate, fused_h_post_bda, one_scale, recipe_of_streams
from ._native import EPS, native_compute_h, native_proj_rms, native_sinkhorn


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

    mhckit_projections = ("mapping_proj.weight",)
    mhckit_no_decay = ("bias", "alpha_pre", "alpha_post", "alpha_res")

    def __init__(self, config: Any, layer_number: int) -> None:
        if getattr(config, "mhc_single_pass", False):
            raise ValueError(
                "config.mhc_single_pass must be False: use Recipe.preset('deepseek_v41') for single-pass mHC"
            )
        n = getattr(config, "mhc_num_residual_streams", None)
        n = config.num_residual_streams if n is None else n
        super().__init__(
            config.hidden_size,
            recipe_of_streams(n, config.mhc_sinkhorn_iterations),
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
            h_pre, h_post, h_res = native_compute_h(proj, r, alpha, bias, self.n, self.compute_h_eps)
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
        return self.mapping_proj.weight, one_scale(self.alpha_pre, self.alpha_post, self.alpha_res), self.bias

    def _backend_name(self) -> str:
        return "auto" if self.use_fused else "native"

    def _check_streams(self, name: str, x: Tensor) -> Tensor:
        """Streams [s, b, n, C]."""
        check_tensor(name, x, "[s, b, n*C]", like=self.bias)
        check_shape(name, x, "[s, b, n*C]", (*x.shape[:-1], self.n * self.hidden_size))
        return x.unflatten(-1, (self.n, self.hidden_size))


def _spread(x: Tensor, h_post: Tensor) -> Tensor:
    return (h_post[..., None] * x[..., None, :]).flatten(-2)


def _refuse(name: str, manager: object) -> None:
    if manager is not None:
        raise ValueError(
            f"{name} must be None: Megatron's recompute managers are not supported; use torch.utils.checkpoint"
        )
