r"""Enter: the first sublayer's coefficients and input, with no write-back before them.

    mix = coefficients(x)        x_in = mix.pre . x  [then RMSNorm]          (shifted: x_in = stream 0)

The streams are returned too, the same values: the chain of junctions continues from that output, so that this node's
backward receives their gradient g and adds its own part to it,

    dx = g + pre d + dz phi + k x

instead of leaving autograd to add gradients of x in passes of its own.

T tokens; N streams; C channels; P rows of phi; K = N*C.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhckit.recipe import Recipe

from ._backend import choose
from ._check import Checked, check_dtype, check_eps, check_optional, check_parameters, check_streams
from ._read import OutNorm, empty_read, first_pre, read_backward, read_reference
from ._register import Operator, call_backward, contiguous, dtype_name, needed, pack, register, room_for, rounded
from .coefficients import (
    Parameters,
    as_mix,
    hide_kept,
    mix_gradients,
    parameters_with_gradients,
    save_with_coefficients,
)
from .mix import Mix


def enter_reference(
    x: Tensor,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    norm_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    out_norm_eps: float,
    out_dtype: torch.dtype,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    """x_in, pre, post, res, z, mean_square, u."""
    parameters = Parameters(phi, scale, bias, norm_weight)
    out_norm = OutNorm(out_norm_weight, out_norm_eps)
    shifted_pre = first_pre(x) if recipe.shifted else None
    read = read_reference(x, shifted_pre, parameters, out_norm, out_dtype, recipe)
    return read.x_in, *pack(read.coefficients, otherwise=read.coefficients.pre), read.u


def enter_backward(
    g: Tensor | None,
    dx_in: Tensor | None,
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    x: Tensor,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    norm_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    z: Tensor | None,
    mean_square: Tensor | None,
    u: Tensor | None,
    need_phi: bool,
    need_out_norm: bool,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    """dx, dphi, dscale, dbias, dnorm_weight, dout_norm_weight."""
    parameters = Parameters(phi, scale, bias, norm_weight)
    gradients = read_backward(
        g,
        dx_in,
        mix_gradients(dpre, dpost, dres, x, recipe),
        x,
        first_pre(x) if recipe.shifted else None,
        parameters,
        out_norm_weight,
        z,
        mean_square,
        u,
        recipe,
        need_phi,
        need_out_norm,
    )
    return rounded(
        (gradients.y, *gradients.parameters, gradients.out_norm_weight), (x, *parameters, out_norm_weight), otherwise=x
    )


def _fwd_fake(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, out_norm_weight, _out_norm_eps, out_dtype, recipe = rest
    return empty_read(x, out_norm_weight, out_dtype, recipe)


def _bwd_fake(*args: Any) -> tuple[Tensor, ...]:
    _g, _dx_in, _dpre, _dpost, _dres, x, *parameters, out_norm_weight, _z, _ms, _u, need_phi, need_out_norm, _ = args
    parameters = parameters_with_gradients(Parameters(*parameters), need_phi)
    return room_for((x, *parameters, out_norm_weight if need_out_norm else None), otherwise=x)


_fwd = register(
    "enter_fwd",
    "(Tensor x, Tensor? phi, Tensor? scale, Tensor bias, Tensor? norm_weight, Tensor? out_norm_weight,"
    " float out_norm_eps, str out_dtype, str recipe)"
    " -> (Tensor x_in, Tensor pre, Tensor post, Tensor res, Tensor z, Tensor mean_square, Tensor u)",
    reference=enter_reference,
    fake=_fwd_fake,
)
_bwd = register(
    "enter_bwd",
    "(Tensor? dx_out, Tensor? dx_in, Tensor? dpre, Tensor? dpost, Tensor? dres,"
    " Tensor x, Tensor? phi, Tensor? scale, Tensor bias, Tensor? norm_weight, Tensor? out_norm_weight,"
    " Tensor? z, Tensor? mean_square, Tensor? u, bool need_phi, bool need_out_norm, str recipe)"
    " -> (Tensor dx, Tensor dphi, Tensor dscale, Tensor dbias, Tensor dnorm_weight, Tensor dout_norm_weight)",
    reference=enter_backward,
    fake=_bwd_fake,
)


class _Enter(Operator):
    results = 5

    @staticmethod
    def forward(
        x: Tensor,
        phi: Tensor | None,
        scale: Tensor | None,
        bias: Tensor,
        norm_weight: Tensor | None,
        out_norm_weight: Tensor | None,
        out_norm_eps: float,
        out_dtype: torch.dtype,
        recipe: Recipe,
        backend: str,
    ) -> tuple[Tensor, ...]:
        parameters = (phi, scale, bias, norm_weight, out_norm_weight)
        return x.view_as(x), *_fwd(x, *parameters, out_norm_eps, dtype_name(out_dtype), recipe.key, backend)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, _out_norm_eps, _out_dtype, ctx.recipe, ctx.backend = inputs
        save_with_coefficients(ctx, tensors, *output[5:], normed=tensors[-1] is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _Enter.save(ctx, inputs, output)
        hide_kept(ctx, *output[4:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, need_phi, _, _, need_norm_weight, need_out_norm, *_ = ctx.needs_input_grad
        needs = (need_phi or need_norm_weight, need_out_norm)
        gradients = call_backward(_bwd, *grads[:5], *ctx.saved_tensors, *needs, ctx.recipe.key, ctx.backend)
        return needed(gradients, ctx.needs_input_grad)


_checked = Checked()


def enter(
    x: Tensor,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    *,
    recipe: Recipe,
    norm_weight: Tensor | None = None,
    out_norm_weight: Tensor | None = None,
    out_norm_eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Mix]:
    """Read the first sublayer's input from the streams.

    Args:
        x: streams [..., N, C].
        phi: [P, N*C] with ``P = recipe.rows``; None for a static recipe.
        scale: one entry per group of rows, [3] ([2] without a residual map); None for a static recipe.
        bias: [P]; for a static recipe the logits themselves.
        recipe: the math.
        norm_weight: [N*C], multiplies the columns of phi.
        out_norm_weight: [C]; if given, x_in comes out RMS-normalised and multiplied by it.
        out_norm_eps: added to the mean square under the root of that norm.
        out_dtype: dtype of x_in, the dtype of x by default.

    Returns:
        x (the same values; continue the chain from this one), x_in [..., C], and the Mix of the sublayer.
    """
    given = (x, phi, scale, bias, norm_weight, out_norm_weight)
    if not _checked.passed(given, recipe):
        _, _, channels = check_streams(x, recipe)
        check_parameters(x, phi, scale, bias, norm_weight, recipe)
        check_optional("out_norm_weight", out_norm_weight, "[C]", (channels,), like=x)
        _checked.remember(given, recipe)
    tensors = contiguous(*given)
    out_norm_eps = check_eps("out_norm_eps", out_norm_eps)
    out_dtype = check_dtype("out_dtype", out_dtype, x.dtype)
    backend = choose("enter", x, recipe.streams)
    x, x_in, pre, post, res, *_ = _Enter.call(*tensors, out_norm_eps, out_dtype, recipe, backend)
    return x, x_in, as_mix(pre, post, res, recipe)
