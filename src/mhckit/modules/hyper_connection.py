"""HyperConnection: the parameters of one sublayer's connection to the streams."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mhckit.ops._backend import Backend
from mhckit.ops._check import check_eps
from mhckit.recipe import Recipe

from . import _init
from ._base import HyperModule, parameter, set_values
from .streams import Streams, as_streams, read_streams


class HyperConnection(HyperModule):
    """Connects one sublayer to the streams: ``h, streams = hc(streams)``, then ``streams = streams.write(f(h))``.

    Args:
        dim: C, the width of the model.
        recipe: the math, or the name of a preset.
        layer_index: position of the sublayer among all sublayers; rotates the initial spread of post.
        norm: normalise what the sublayer reads (RMSNorm with its own weight), fused into the read. The sublayer then
            needs no norm of its own.
        out_norm_eps: eps of that norm.
        projection_norm_weight: learn an RMSNorm weight over the N*C projected values too.
        out_dtype: dtype of what the sublayer reads; the streams' dtype by default.
        keep_float32: parameters ignore casts below float32.
        backend: ``"auto"``, ``"reference"`` or ``"triton"`` for this module's operators; None follows
            ``mhckit.backend``.
        device: where the parameters are made.

    Parameters: ``phi`` [P, N*C], ``scale`` [3] ([2] without a residual map) and ``bias`` [P]; static recipes have bias
    alone. ``norm_weight`` [N*C] and ``out_norm_weight`` [C] where asked for.
    """

    def __init__(
        self,
        dim: int,
        recipe: Recipe | str = "paper",
        *,
        layer_index: int = 0,
        norm: bool = False,
        out_norm_eps: float = 1e-6,
        projection_norm_weight: bool = False,
        out_dtype: torch.dtype | None = None,
        keep_float32: bool = True,
        backend: Backend | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(dim, recipe, out_dtype=out_dtype, keep_float32=keep_float32, backend=backend)
        if isinstance(layer_index, bool) or not isinstance(layer_index, int) or layer_index < 0:
            raise ValueError(f"layer_index must be an int >= 0, got {layer_index!r}")
        self.layer_index = layer_index
        self.out_norm_eps = check_eps("out_norm_eps", out_norm_eps)
        dynamic, rows, width = self.recipe.dynamic, self.recipe.rows, self.recipe.streams * dim
        if projection_norm_weight and not dynamic:
            raise ValueError("projection_norm_weight=True needs a dynamic recipe: a static one projects nothing")
        self.phi = parameter(rows, width, device=device) if dynamic else None
        self.scale = parameter(len(self.recipe.groups), device=device) if dynamic else None
        self.bias = parameter(rows, device=device)
        self.norm_weight = parameter(width, device=device) if projection_norm_weight else None
        self.out_norm_weight = parameter(dim, device=device) if norm else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise so that the mean of the streams is the plain pre-norm residual network, up to scale."""
        set_values(self.bias, _init.initial_bias(self.recipe, self.layer_index))
        if self.phi is not None and self.scale is not None:
            nn.init.normal_(self.phi, std=_init.PHI_STD)
            nn.init.constant_(self.scale, _init.SCALE)
        for weight in (self.norm_weight, self.out_norm_weight):
            if weight is not None:
                nn.init.ones_(weight)

    def forward(self, streams: Streams | Tensor) -> tuple[Tensor, Streams]:
        """What the sublayer reads, [..., C], and the streams to ``write`` its output to."""
        with self.use_own_backend():
            return read_streams(
                as_streams(streams),
                self.phi,
                self.scale,
                self.bias,
                recipe=self.recipe,
                norm_weight=self.norm_weight,
                out_norm_weight=self.out_norm_weight,
                out_norm_eps=self.out_norm_eps,
                out_dtype=self.out_dtype,
            )

    def extra_repr(self) -> str:
        norm = "" if self.out_norm_weight is None else f", out_norm_eps={self.out_norm_eps}"
        return f"dim={self.dim}, streams={self.recipe.streams}, residual={self.recipe.residual!r}{norm}"
