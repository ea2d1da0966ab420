"""HyperHead: from the streams back to one vector, before the final norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mhckit.ops import head
from mhckit.ops._backend import Backend
from mhckit.recipe import Recipe

from . import _init
from ._base import HyperModule, parameter, set_values
from .streams import Streams, as_streams


class HyperHead(HyperModule):
    """Collapses Streams, or a tensor [..., N, C], to [..., C] as ``recipe.head`` says.

    Args:
        dim: C, the width of the model.
        recipe: the math, or the name of a preset.
        out_dtype: dtype of the result; the streams' dtype by default.
        keep_float32: parameters ignore casts below float32.
        backend: as in HyperConnection.
        device: where the parameters are made.

    Parameters (only for ``head="learned"``): ``fn`` [N, N*C], ``scale`` [1], ``base`` [N].
    """

    def __init__(
        self,
        dim: int,
        recipe: Recipe | str = "paper",
        *,
        out_dtype: torch.dtype | None = None,
        keep_float32: bool = True,
        backend: Backend | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(dim, recipe, out_dtype=out_dtype, keep_float32=keep_float32, backend=backend)
        learned, n = self.recipe.head == "learned", self.recipe.streams
        self.fn = parameter(n, n * dim, device=device) if learned else None
        self.scale = parameter(1, device=device) if learned else None
        self.base = parameter(n, device=device) if learned else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise a learned head to the mean of the streams, up to scale."""
        if self.fn is not None and self.scale is not None and self.base is not None:
            nn.init.normal_(self.fn, std=_init.PHI_STD)
            nn.init.constant_(self.scale, _init.SCALE)
            set_values(self.base, _init.initial_head_base(self.recipe))

    def forward(self, streams: Streams | Tensor, pre: Tensor | None = None) -> Tensor:
        """[..., C]. A ``last_pre`` head takes pre from the Streams; a bare tensor needs it as an argument."""
        streams = as_streams(streams)
        if self.recipe.head == "last_pre" and pre is None:
            if streams.mix is None:
                raise ValueError("head='last_pre' needs the last sublayer's pre: pass the Streams, or pre=mix.pre")
            pre = streams.mix.pre
        with self.use_own_backend():
            return head(
                streams.tensor,
                recipe=self.recipe,
                fn=self.fn,
                scale=self.scale,
                base=self.base,
                pre=pre,
                out_dtype=self.out_dtype,
            )

    def extra_repr(self) -> str:
        return f"dim={self.dim}, streams={self.recipe.streams}, head={self.recipe.head!r}"
