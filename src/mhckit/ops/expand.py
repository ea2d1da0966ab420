r"""Expand: every stream starts as a copy of the embedding.

    x[t,n,c] = h[t,c]           dh[t,c] = sum_n dx[t,n,c]

T tokens; N streams; C channels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._backend import choose
from ._check import check_tensor
from ._register import Operator, accumulator, call_backward, empty, needed, register


def expand_reference(h_TC: Tensor, streams: int) -> Tensor:
    return h_TC[..., None, :].repeat_interleave(streams, -2)


def expand_backward(dx_TNC: Tensor) -> Tensor:
    return dx_TNC.to(accumulator(dx_TNC)).sum(-2).to(dx_TNC.dtype)


def _fwd_fake(h: Tensor, streams: int) -> Tensor:
    return empty(h, *h.shape[:-1], streams, h.shape[-1])


def _bwd_fake(dx: Tensor) -> Tensor:
    return empty(dx, *dx.shape[:-2], dx.shape[-1])


_fwd = register("expand_fwd", "(Tensor h, int streams) -> Tensor", reference=expand_reference, fake=_fwd_fake)
_bwd = register("expand_bwd", "(Tensor dx) -> Tensor", reference=expand_backward, fake=_bwd_fake)


class _Expand(Operator):
    @staticmethod
    def forward(h: Tensor, streams: int, backend: str) -> Tensor:
        return _fwd(h, streams, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.backend = inputs[-1]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return needed((call_backward(_bwd, dx, ctx.backend),), ctx.needs_input_grad)


def expand(h: Tensor, streams: int) -> Tensor:
    """Copy h [..., C] into streams [..., N, C]."""
    check_tensor("h", h, "[..., C]")
    if isinstance(streams, bool) or not isinstance(streams, int):
        raise TypeError(f"streams must be an int, got {streams!r}")
    if streams < 1:
        raise ValueError(f"streams must be at least 1, got {streams}")
    if h.ndim < 1 or h.shape[-1] < 1:
        raise ValueError(f"h must be [..., C] with C >= 1, got {tuple(h.shape)}")
    return _Expand.call(h.contiguous(), streams, choose("expand", h, streams))
