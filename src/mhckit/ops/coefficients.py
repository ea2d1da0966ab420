r"""Coefficients: everything a token's streams decide about one sublayer.

    z, ms = project(x)      pre, post, L = activate(z, ms)      res = sinkhorn(L)

The backward runs the three in reverse: dL = sinkhorn', then D = activate', then dx, dphi = project'. z and ms are kept
from forward; everything else is computed again. A static recipe has no projection: its bias is the logits of every
token.

T tokens; N streams; C channels; P rows of phi; K = N*C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhckit.recipe import Recipe

from ._backend import choose
from ._check import Checked, check_parameters, check_streams
from ._register import (
    Operator,
    accumulator,
    call_backward,
    contiguous,
    empty,
    mark_hidden,
    needed,
    pack,
    register,
    room_for,
    rounded,
)
from .activate import activate_backward, activate_reference, shape_residual_logits
from .mix import Mix
from .project import project_backward, project_reference
from .sinkhorn import sinkhorn_backward, sinkhorn_reference


class Parameters(NamedTuple):
    """What a sublayer learns about its coefficients: phi [P, K], scale [groups], bias [P], norm_weight [K]."""

    phi: Tensor | None
    scale: Tensor | None
    bias: Tensor
    norm_weight: Tensor | None


class ParameterGradients(NamedTuple):
    """Gradients of Parameters; None where there is nothing to learn or nobody asked."""

    phi: Tensor | None
    scale: Tensor | None
    bias: Tensor
    norm_weight: Tensor | None


class Coefficients(NamedTuple):
    """Mix, and what backward needs of its computation: z [T, P] and ms [T], None for static recipes."""

    pre: Tensor
    post: Tensor
    res: Tensor | None
    z: Tensor | None
    ms: Tensor | None


def coefficients_reference(x_TNC: Tensor, parameters: Parameters, recipe: Recipe) -> Coefficients:
    phi_PK, scale, bias_P, norm_weight_K = parameters
    acc = accumulator(x_TNC)
    z_TP = ms_T = None
    if phi_PK is not None:
        z_TP, ms_T = project_reference(x_TNC, phi_PK, norm_weight_K)
    pre_TN, post_TN, logits_TR = activate_reference(z_TP, ms_T, scale, bias_P.to(acc), recipe)
    logits = shape_residual_logits(logits_TR, recipe)
    res_TOI = None if logits is None else sinkhorn_reference(logits, recipe)
    if recipe.round_mix:
        post_TN = post_TN.to(x_TNC.dtype).to(acc)
        res_TOI = None if res_TOI is None else res_TOI.to(x_TNC.dtype).to(acc)
    if phi_PK is None:
        tokens = x_TNC.shape[:-2]
        pre_TN, post_TN = pre_TN.expand(*tokens, -1), post_TN.expand(*tokens, -1)
        res_TOI = None if res_TOI is None else res_TOI.expand(*tokens, -1, -1)
    return Coefficients(pre_TN, post_TN, res_TOI, z_TP, ms_T)


def coefficients_backward(
    dmix: Mix,
    x_TNC: Tensor,
    z_TP: Tensor | None,
    ms_T: Tensor | None,
    parameters: Parameters,
    recipe: Recipe,
    need_phi: bool,
) -> tuple[Tensor | None, ParameterGradients]:
    """dx (None for static recipes, whose coefficients do not depend on x) and parameter gradients; unrounded."""
    phi_PK, scale, bias_P, norm_weight_K = parameters
    bias_P = bias_P.to(accumulator(x_TNC))
    if phi_PK is None:
        dmix = _sum_over_tokens(dmix)
    logits = shape_residual_logits(activate_reference(z_TP, ms_T, scale, bias_P, recipe)[2], recipe)
    if logits is None or dmix.res is None:
        dlogits_TR = dmix.pre.new_empty(*dmix.pre.shape[:-1], 0)
    else:
        dlogits_TR = sinkhorn_backward(dmix.res, logits, recipe).reshape(*dmix.pre.shape[:-1], recipe.residual_logits)
    dz_TP, dms_T, dscale, dbias_P = activate_backward(
        dmix.pre, dmix.post, dlogits_TR, z_TP, ms_T, scale, bias_P, recipe
    )
    if phi_PK is None or dz_TP is None or dms_T is None:
        return None, ParameterGradients(None, None, dbias_P, None)
    dx_TNC, dphi_PK, dnorm_weight_K = project_backward(dz_TP, dms_T, x_TNC, phi_PK, norm_weight_K, need_phi)
    return dx_TNC, ParameterGradients(dphi_PK, dscale, dbias_P, dnorm_weight_K)


def _sum_over_tokens(dmix: Mix) -> Mix:
    """Gradient of the one Mix that all tokens of a static recipe share."""
    n = dmix.pre.shape[-1]
    dres_TOI = dmix.res
    return Mix(
        dmix.pre.reshape(-1, n).sum(0),
        dmix.post.reshape(-1, n).sum(0),
        None if dres_TOI is None else dres_TOI.reshape(-1, n, n).sum(0),
    )


def mix_gradients(dpre: Tensor | None, dpost: Tensor | None, dres: Tensor | None, x: Tensor, recipe: Recipe) -> Mix:
    """Gradients of a Mix, with zeros where autograd had none."""
    n = recipe.streams

    def given(gradient: Tensor | None, *shape: int) -> Tensor:
        return x.new_zeros(*x.shape[:-2], *shape, dtype=accumulator(x)) if gradient is None else gradient

    return Mix(given(dpre, n), given(dpost, n), None if recipe.residual == "identity" else given(dres, n, n))


def as_mix(pre: Tensor, post: Tensor, res: Tensor | None, recipe: Recipe) -> Mix:
    """A Mix from the results of an operator, where an absent res stands for None."""
    return Mix(pre, post, None if recipe.residual == "identity" else res)


def parameters_with_gradients(parameters: Parameters, need_phi: bool) -> tuple[Tensor | None, ...]:
    """Those parameters whose gradients a backward returns; None for the rest."""
    return tuple(parameters) if need_phi else (None, parameters.scale, parameters.bias, None)


def save_with_coefficients(
    ctx: Any,
    tensors: Sequence[Any],
    z: Tensor | None,
    ms: Tensor | None,
    u: Tensor | None = None,
    normed: bool | None = None,
) -> None:
    """Save what backward needs of an operator that computes coefficients: its inputs, z and ms, and a norm's u, if the
    operator can have one (``normed`` is then whether it has).

    z, ms and u are outputs for this purpose alone, and saved as None where they are absent.
    """
    norms = () if normed is None else (u if normed else None,)
    ctx.save_for_backward(*tensors, *((z, ms) if ctx.recipe.dynamic else (None, None)), *norms)
    ctx.set_materialize_grads(False)


def hide_kept(ctx: Any, res: Tensor | None, *kept: Tensor | None) -> None:
    """Outputs of such an operator that are no results: those kept for backward, and a res that stands for None."""
    mark_hidden(ctx, *kept, res if ctx.recipe.residual == "identity" else None)


def empty_coefficients(x: Tensor, recipe: Recipe) -> tuple[Tensor, ...]:
    """Room for Coefficients; fakes and kernels allocate with it."""
    n, acc = recipe.streams, accumulator(x)
    shapes = (
        (n,),
        (n,),
        None if recipe.residual == "identity" else (n, n),
        (recipe.rows,) if recipe.dynamic else None,
        () if recipe.dynamic else None,
    )
    return tuple(empty(x, *((0,) if shape is None else (*x.shape[:-2], *shape)), dtype=acc) for shape in shapes)


def _fwd_reference(
    x: Tensor, phi: Tensor | None, scale: Tensor | None, bias: Tensor, norm_weight: Tensor | None, recipe: Recipe
) -> tuple[Tensor, ...]:
    values = coefficients_reference(x, Parameters(phi, scale, bias, norm_weight), recipe)
    return pack(values, otherwise=values.pre)


def _fwd_fake(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return empty_coefficients(x, rest[-1])


def _bwd_reference(
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    x: Tensor,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    norm_weight: Tensor | None,
    z: Tensor | None,
    ms: Tensor | None,
    need_phi: bool,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    parameters = Parameters(phi, scale, bias, norm_weight)
    dmix = mix_gradients(dpre, dpost, dres, x, recipe)
    dx, gradients = coefficients_backward(dmix, x, z, ms, parameters, recipe, need_phi)
    return rounded((torch.zeros_like(x) if dx is None else dx, *gradients), (x, *parameters), otherwise=x)


def _bwd_fake(*args: Any) -> tuple[Tensor, ...]:
    _dpre, _dpost, _dres, x, *parameters, _z, _ms, need_phi, _recipe = args
    return room_for((x, *parameters_with_gradients(Parameters(*parameters), need_phi)), otherwise=x)


_fwd = register(
    "coefficients_fwd",
    "(Tensor x, Tensor? phi, Tensor? scale, Tensor bias, Tensor? norm_weight, str recipe)"
    " -> (Tensor pre, Tensor post, Tensor res, Tensor z, Tensor mean_square)",
    reference=_fwd_reference,
    fake=_fwd_fake,
)
_bwd = register(
    "coefficients_bwd",
    "(Tensor? dpre, Tensor? dpost, Tensor? dres, Tensor x, Tensor? phi, Tensor? scale, Tensor bias,"
    " Tensor? norm_weight, Tensor? z, Tensor? mean_square, bool need_phi, str recipe)"
    " -> (Tensor dx, Tensor dphi, Tensor dscale, Tensor dbias, Tensor dnorm_weight)",
    reference=_bwd_reference,
    fake=_bwd_fake,
)


class _Coefficients(Operator):
    results = 3

    @staticmethod
    def forward(
        x: Tensor,
        phi: Tensor | None,
        scale: Tensor | None,
        bias: Tensor,
        norm_weight: Tensor | None,
        recipe: Recipe,
        backend: str,
    ) -> tuple[Tensor, ...]:
        return _fwd(x, phi, scale, bias, norm_weight, recipe.key, backend)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.recipe, ctx.backend = inputs
        save_with_coefficients(ctx, tensors, *output[3:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _Coefficients.save(ctx, inputs, output)
        hide_kept(ctx, *output[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, need_phi, _, _, need_norm_weight, *_ = ctx.needs_input_grad
        need_phi = need_phi or need_norm_weight
        gradients = call_backward(_bwd, *grads[:3], *ctx.saved_tensors, need_phi, ctx.recipe.key, ctx.backend)
        return needed(gradients, ctx.needs_input_grad)


_checked = Checked()


def coefficients(
    x: Tensor,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    *,
    recipe: Recipe,
    norm_weight: Tensor | None = None,
) -> Mix:
    """pre, post and the residual matrix of a sublayer, from the streams it will read.

    Args:
        x: streams [..., N, C].
        phi: [P, N*C] with ``P = recipe.rows``; None for a static recipe.
        scale: one entry per group of rows, [3] ([2] without a residual map); None for a static recipe.
        bias: [P]; for a static recipe the logits themselves.
        recipe: the math.
        norm_weight: [N*C], multiplies the columns of phi.

    Returns:
        Mix(pre [..., N], post [..., N], res [..., N_out, N_in] or None).
    """
    given = (x, phi, scale, bias, norm_weight)
    if not _checked.passed(given, recipe):
        check_streams(x, recipe)
        check_parameters(x, phi, scale, bias, norm_weight, recipe)
        _checked.remember(given, recipe)
    tensors = contiguous(*given)
    pre, post, res, *_ = _Coefficients.call(*tensors, recipe, choose("coefficients", x, recipe.streams))
    return as_mix(pre, post, res, recipe)
