r"""Pre: collapse the streams into the one vector a sublayer reads, with an optional RMSNorm on the way.

    a[t,c] = sum_i p[t,i] x[t,i,c]                                x_in = a
    with a norm weight w:  u[t] = 1 / sqrt(mean_c a[t,c]^2 + eps)     x_in[t,c] = a u w

    With e = dL/dx_in:    d[t,c] = e   or   u (w e - a u^2 mean_c(w e a))           (the gradient of a)
    dx[t,i,c] = p[t,i] d[t,c]     dp[t,i] = sum_c d[t,c] x[t,i,c]     dw[c] = sum_t e a u

a is not rounded before the norm. T tokens; I streams; C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._backend import choose
from ._check import check_dtype, check_eps, check_optional, check_shape, check_streams
from ._register import (
    Operator,
    absent,
    accumulator,
    call_backward,
    contiguous,
    dtype_name,
    empty,
    mark_hidden,
    needed,
    register,
    room_for,
    rounded,
)


def pre_reference(
    x_TIC: Tensor, pre_TI: Tensor, norm_weight_C: Tensor | None, norm_eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x_in [T, C], rounded once to out_dtype, and the norm's u [T] (absent without a norm)."""
    acc = accumulator(x_TIC)
    a_TC = (pre_TI.to(acc)[..., None] * x_TIC.to(acc)).sum(-2)
    if norm_weight_C is None:
        return a_TC.to(out_dtype), absent(a_TC)
    u_T = torch.rsqrt(a_TC.square().mean(-1) + norm_eps)
    return (a_TC * u_T[..., None] * norm_weight_C.to(acc)).to(out_dtype), u_T


def pre_backward(
    dx_in_TC: Tensor,
    x_TIC: Tensor,
    pre_TI: Tensor,
    norm_weight_C: Tensor | None,
    u_T: Tensor | None,
    need_norm_weight: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dpre, dnorm_weight; none of them rounded."""
    acc = accumulator(x_TIC)
    x_TIC, pre_TI, d_TC = x_TIC.to(acc), pre_TI.to(acc), dx_in_TC.to(acc)
    dnorm_weight_C = None
    if norm_weight_C is not None and u_T is not None:
        a_TC = (pre_TI[..., None] * x_TIC).sum(-2)
        normed_TC = a_TC * u_T[..., None]
        if need_norm_weight:
            dnorm_weight_C = (d_TC * normed_TC).reshape(-1, d_TC.shape[-1]).sum(0)
        d_TC = d_TC * norm_weight_C.to(acc)
        d_TC = u_T[..., None] * (d_TC - normed_TC * (d_TC * normed_TC).mean(-1, keepdim=True))
    return pre_TI[..., None] * d_TC[..., None, :], (x_TIC @ d_TC[..., None])[..., 0], dnorm_weight_C


def _fwd_fake(
    x: Tensor, pre: Tensor, norm_weight: Tensor | None, norm_eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    lead, channels, acc = x.shape[:-2], x.shape[-1], accumulator(x)
    u = empty(x, 0, dtype=acc) if norm_weight is None else empty(x, *lead, dtype=acc)
    return empty(x, *lead, channels, dtype=out_dtype), u


def _bwd_reference(dx_in: Tensor, x: Tensor, pre: Tensor, norm_weight: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return rounded(pre_backward(dx_in, x, pre, norm_weight, *rest), (x, pre, norm_weight), otherwise=x)


def _bwd_fake(dx_in: Tensor, x: Tensor, pre: Tensor, norm_weight: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    _u, need_norm_weight = rest
    return room_for((x, pre, norm_weight if need_norm_weight else None), otherwise=x)


_fwd = register(
    "pre_fwd",
    "(Tensor x, Tensor pre, Tensor? norm_weight, float norm_eps, str out_dtype) -> (Tensor x_in, Tensor u)",
    reference=pre_reference,
    fake=_fwd_fake,
)
_bwd = register(
    "pre_bwd",
    "(Tensor dx_in, Tensor x, Tensor pre, Tensor? norm_weight, Tensor? u, bool need_norm_weight)"
    " -> (Tensor dx, Tensor dpre, Tensor dnorm_weight)",
    reference=_bwd_reference,
    fake=_bwd_fake,
)


class _Pre(Operator):
    results = 1

    @staticmethod
    def forward(
        x: Tensor, pre: Tensor, norm_weight: Tensor | None, norm_eps: float, out_dtype: torch.dtype, backend: str
    ) -> tuple[Tensor, Tensor]:
        return _fwd(x, pre, norm_weight, norm_eps, dtype_name(out_dtype), backend)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, _norm_eps, _out_dtype, ctx.backend = inputs
        _x_in, u = output
        ctx.save_for_backward(*tensors, None if tensors[-1] is None else u)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _Pre.save(ctx, inputs, output)
        mark_hidden(ctx, output[1])

    @staticmethod
    def backward(ctx: Any, dx_in: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = call_backward(_bwd, dx_in, *ctx.saved_tensors, ctx.needs_input_grad[2], ctx.backend)
        return needed(gradients, ctx.needs_input_grad)


def pre(
    x: Tensor,
    pre: Tensor,
    *,
    out_norm_weight: Tensor | None = None,
    out_norm_eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Collapse streams with read weights: x_in = sum_i pre_i x_i, then optionally RMSNorm.

    Args:
        x: streams [..., N, C].
        pre: [..., N].
        out_norm_weight: [C]; if given, x_in comes out RMS-normalised and multiplied by it.
        out_norm_eps: added to the mean square under the root of that norm.
        out_dtype: dtype of x_in, the dtype of x by default.

    Returns:
        x_in [..., C].
    """
    lead, streams, channels = check_streams(x)
    check_shape("pre", pre, "[..., N]", (*lead, streams), like=x)
    check_optional("out_norm_weight", out_norm_weight, "[C]", (channels,), like=x)
    out_norm_eps = check_eps("out_norm_eps", out_norm_eps)
    out_dtype = check_dtype("out_dtype", out_dtype, x.dtype)
    tensors = contiguous(x, pre, out_norm_weight)
    return _Pre.call(*tensors, out_norm_eps, out_dtype, choose("pre", x, streams))[0]
