r"""Project: the linear map from a token's streams to its coefficients, and their mean square.

    z[t,p]  = sum_k x[t,k] phi[p,k] w[k]          ms[t] = mean_k x[t,k]^2

    dx[t,k] = sum_p dz[t,p] phi[p,k] w[k] + 2/K dms[t] x[t,k]
    dphi[p,k] = w[k] V[p,k]     dw[k] = sum_p phi[p,k] V[p,k]     with V[p,k] = sum_t dz[t,p] x[t,k]

T tokens (every leading dimension); N streams and C channels, flattened stream-major to K = N*C; P rows of phi.
w is an optional RMSNorm weight over K, folded into phi.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._backend import choose
from ._check import check_optional, check_streams, check_tensor
from ._register import Operator, accumulator, call_backward, contiguous, empty, needed, register, room_for, rounded


def project_reference(x_TNC: Tensor, phi_PK: Tensor, norm_weight_K: Tensor | None) -> tuple[Tensor, Tensor]:
    x_TK = x_TNC.to(accumulator(x_TNC)).flatten(-2)
    return x_TK @ _fold(phi_PK, norm_weight_K, x_TK).mT, x_TK.square().mean(-1)


def project_backward(
    dz_TP: Tensor,
    dms_T: Tensor,
    x_TNC: Tensor,
    phi_PK: Tensor,
    norm_weight_K: Tensor | None,
    need_phi: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dphi, dnorm_weight; unrounded, so that fusions can add to dx. The last two take another pass over x."""
    x_TK = x_TNC.to(accumulator(x_TNC)).flatten(-2)
    dx_TK = dz_TP @ _fold(phi_PK, norm_weight_K, x_TK) + (2 / x_TK.shape[-1]) * dms_T[..., None] * x_TK
    dx_TNC = dx_TK.unflatten(-1, x_TNC.shape[-2:])
    if not need_phi:
        return dx_TNC, None, None
    dphi_PK = dz_TP.reshape(-1, phi_PK.shape[0]).mT @ x_TK.reshape(-1, phi_PK.shape[1])
    if norm_weight_K is None:
        return dx_TNC, dphi_PK, None
    return dx_TNC, dphi_PK * norm_weight_K.to(x_TK.dtype), (dphi_PK * phi_PK.to(x_TK.dtype)).sum(0)


def _fold(phi_PK: Tensor, norm_weight_K: Tensor | None, like: Tensor) -> Tensor:
    phi_PK = phi_PK.to(like.dtype)
    return phi_PK if norm_weight_K is None else phi_PK * norm_weight_K.to(like.dtype)


def _fwd_fake(x: Tensor, phi: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    lead, acc = x.shape[:-2], accumulator(x)
    return empty(x, *lead, phi.shape[0], dtype=acc), empty(x, *lead, dtype=acc)


def _bwd_reference(
    dz: Tensor | None, dms: Tensor | None, x: Tensor, phi: Tensor, norm_weight: Tensor | None, need_phi: bool
) -> tuple[Tensor, ...]:
    lead, acc = x.shape[:-2], accumulator(x)
    dz = x.new_zeros(*lead, phi.shape[0], dtype=acc) if dz is None else dz
    dms = x.new_zeros(lead, dtype=acc) if dms is None else dms
    gradients = project_backward(dz, dms, x, phi, norm_weight, need_phi)
    return rounded(gradients, (x, phi, norm_weight), otherwise=x)


def _bwd_fake(
    dz: Tensor | None, dms: Tensor | None, x: Tensor, phi: Tensor, norm_weight: Tensor | None, need_phi: bool
) -> tuple[Tensor, ...]:
    return room_for((x, *((phi, norm_weight) if need_phi else (None, None))), otherwise=x)


_fwd = register(
    "project_fwd",
    "(Tensor x, Tensor phi, Tensor? norm_weight) -> (Tensor z, Tensor mean_square)",
    reference=project_reference,
    fake=_fwd_fake,
)
_bwd = register(
    "project_bwd",
    "(Tensor? dz, Tensor? dmean_square, Tensor x, Tensor phi, Tensor? norm_weight, bool need_phi)"
    " -> (Tensor dx, Tensor dphi, Tensor dnorm_weight)",
    reference=_bwd_reference,
    fake=_bwd_fake,
)


class _Project(Operator):
    @staticmethod
    def forward(x: Tensor, phi: Tensor, norm_weight: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
        return _fwd(x, phi, norm_weight, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.backend = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, need_phi, need_norm_weight, *_ = ctx.needs_input_grad
        need_phi = need_phi or need_norm_weight
        gradients = call_backward(_bwd, *grads, *ctx.saved_tensors, need_phi, ctx.backend)
        return needed(gradients, ctx.needs_input_grad)


def project(x: Tensor, phi: Tensor, *, norm_weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """z = x phi^T and the mean square of x, per token, in float32 (float64 for float64 x).

    Args:
        x: streams [..., N, C].
        phi: [P, N*C].
        norm_weight: [N*C], multiplies the columns of phi.

    Returns:
        z [..., P] and mean_square [...].
    """
    _, streams, channels = check_streams(x)
    width = streams * channels
    check_tensor("phi", phi, "[P, N*C]", like=x)
    if phi.ndim != 2 or phi.shape[0] < 1 or phi.shape[1] != width:
        raise ValueError(f"phi must be [P, N*C] with P >= 1 and N*C = {width}, got {tuple(phi.shape)}")
    check_optional("norm_weight", norm_weight, "[N*C]", (width,), like=x)
    return _Project.call(*contiguous(x, phi, norm_weight), choose("project", x, streams))
