r"""Activate: from projected streams to pre, post and the logits of the residual map.

    r = 1 / sqrt(ms + eps)   or   1 / (sqrt(ms) + eps)
    l[t,p] = z[t,p] r[t] scale[group(p)] + bias[p]           (static: l = bias;  free: scale tanh(z r) + bias)
    rows of l:  0..N-1 pre | N..2N-1 post | the rest: the residual map
    pre = sigmoid(l_pre) + pre_eps  [/ (its sum over streams + eps)]
    post = post_scale sigmoid(l_post) + post_eps

    With D = dL/dl:    dz = D scale r    dbias = sum_t D    dscale[g] = sum_t sum_{p in g} D z r
                       dms = -1/2 r^2 sum_p dz z   (inside)    or    -1/2 r / sqrt(ms) sum_p dz z   (outside)

T tokens; N streams; P rows, R of them for the residual map.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhckit.recipe import Recipe

from ._backend import choose
from ._check import check_recipe, check_scale_and_bias, check_shape, check_tensor
from ._register import Operator, accumulator, call_backward, contiguous, empty, needed, register, room_for, rounded


def reciprocal_rms(mean_square: Tensor, recipe: Recipe) -> Tensor:
    if recipe.norm_eps_position == "inside":
        return torch.rsqrt(mean_square + recipe.norm_eps)
    return 1 / (mean_square.sqrt() + recipe.norm_eps)


def reciprocal_rms_backward(dr: Tensor, mean_square: Tensor, recipe: Recipe) -> Tensor:
    r = reciprocal_rms(mean_square, recipe)
    if recipe.norm_eps_position == "inside":
        return -0.5 * dr * r * r * r
    rms = mean_square.sqrt()
    return torch.where(rms > 0, -0.5 * dr * r * r / rms, 0)


def activate_reference(
    z_TP: Tensor | None, ms_T: Tensor | None, scale: Tensor | None, bias_P: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [T, N], post [T, N] and the residual logits [T, R]; static recipes have z None and no T."""
    pre_TN, post_TN, res_TR = _logits(z_TP, ms_T, scale, bias_P, recipe)[0].split(_sizes(recipe), -1)
    if recipe.residual == "free":
        return pre_TN.clone(), post_TN.clone(), res_TR.clone()
    pre_TN = pre_TN.sigmoid() + recipe.pre_eps
    if recipe.normalized_pre:
        pre_TN = pre_TN / (pre_TN.sum(-1, keepdim=True) + recipe.normalized_pre_eps)
    return pre_TN, recipe.post_scale * post_TN.sigmoid() + recipe.post_eps, res_TR.clone()


class ActivateGradients(NamedTuple):
    """Unrounded; dz, dms and dscale are None for static recipes."""

    z: Tensor | None
    ms: Tensor | None
    scale: Tensor | None
    bias: Tensor


def activate_backward(
    dpre_TN: Tensor,
    dpost_TN: Tensor,
    dres_TR: Tensor,
    z_TP: Tensor | None,
    ms_T: Tensor | None,
    scale: Tensor | None,
    bias_P: Tensor,
    recipe: Recipe,
) -> ActivateGradients:
    logits_TP, activated_TP = _logits(z_TP, ms_T, scale, bias_P, recipe)
    if recipe.residual != "free":
        pre_TN, post_TN, _ = logits_TP.split(_sizes(recipe), -1)
        dpre_TN = _pre_backward(dpre_TN, pre_TN, recipe)
        post_TN = post_TN.sigmoid()
        dpost_TN = dpost_TN * recipe.post_scale * post_TN * (1 - post_TN)
    dlogits_TP = torch.cat([dpre_TN, dpost_TN, dres_TR], -1)
    dbias_P = dlogits_TP.reshape(-1, bias_P.shape[0]).sum(0)
    if z_TP is None or ms_T is None or scale is None or activated_TP is None:
        return ActivateGradients(None, None, None, dbias_P)
    dscale_P = (dlogits_TP * activated_TP).reshape(-1, bias_P.shape[0]).sum(0)
    dscale = torch.stack([group.sum() for group in dscale_P.split(recipe.groups)])
    dnormed_TP = dlogits_TP * _scale_per_row(scale, recipe).to(dlogits_TP.dtype)
    if recipe.residual == "free":
        dnormed_TP = dnormed_TP * (1 - activated_TP.square())
    ms_T = ms_T.to(dlogits_TP.dtype)
    dz_TP = dnormed_TP * reciprocal_rms(ms_T, recipe)[..., None]
    dms_T = reciprocal_rms_backward((dnormed_TP * z_TP).sum(-1), ms_T, recipe)
    return ActivateGradients(dz_TP, dms_T, dscale, dbias_P)


def _logits(
    z_TP: Tensor | None, ms_T: Tensor | None, scale: Tensor | None, bias_P: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor | None]:
    """Logits and what scale multiplies in them: the normalised projection, through tanh if free."""
    if z_TP is None or ms_T is None or scale is None:
        return bias_P.to(accumulator(bias_P)), None
    acc = accumulator(z_TP)
    activated_TP = z_TP.to(acc) * reciprocal_rms(ms_T.to(acc), recipe)[..., None]
    if recipe.residual == "free":
        activated_TP = activated_TP.tanh()
    return activated_TP * _scale_per_row(scale, recipe).to(acc) + bias_P.to(acc), activated_TP


def _pre_backward(dpre_TN: Tensor, logits_TN: Tensor, recipe: Recipe) -> Tensor:
    sigmoid_TN = logits_TN.sigmoid()
    if recipe.normalized_pre:
        raw_TN = sigmoid_TN + recipe.pre_eps
        total_T1 = raw_TN.sum(-1, keepdim=True) + recipe.normalized_pre_eps
        dpre_TN = (dpre_TN - (dpre_TN * raw_TN).sum(-1, keepdim=True) / total_T1) / total_T1
    return dpre_TN * sigmoid_TN * (1 - sigmoid_TN)


def _sizes(recipe: Recipe) -> list[int]:
    return [recipe.streams, recipe.streams, recipe.residual_logits]


def _scale_per_row(scale: Tensor, recipe: Recipe) -> Tensor:
    return torch.cat([entry.expand(size) for entry, size in zip(scale, recipe.groups, strict=True)])


def _fwd_fake(
    z: Tensor | None, mean_square: Tensor | None, scale: Tensor | None, bias: Tensor, recipe: Recipe
) -> tuple[Tensor, ...]:
    like = bias if z is None else z
    lead = () if z is None else z.shape[:-1]
    return tuple(empty(like, *lead, size, dtype=accumulator(like)) for size in _sizes(recipe))


def _bwd_reference(
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    z: Tensor | None,
    mean_square: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    like = bias if z is None else z
    lead = () if z is None else z.shape[:-1]
    dpre, dpost, dres = (
        like.new_zeros(*lead, size, dtype=accumulator(like)) if gradient is None else gradient
        for gradient, size in zip((dpre, dpost, dres), _sizes(recipe), strict=True)
    )
    gradients = activate_backward(dpre, dpost, dres, z, mean_square, scale, bias, recipe)
    return rounded(gradients, (z, mean_square, scale, bias), otherwise=bias)


def _bwd_fake(*args: Any) -> tuple[Tensor, ...]:
    _dpre, _dpost, _dres, z, mean_square, scale, bias, _recipe = args
    return room_for((z, mean_square, scale, bias), otherwise=bias)


_fwd = register(
    "activate_fwd",
    "(Tensor? z, Tensor? mean_square, Tensor? scale, Tensor bias, str recipe)"
    " -> (Tensor pre, Tensor post, Tensor res_logits)",
    reference=activate_reference,
    fake=_fwd_fake,
)
_bwd = register(
    "activate_bwd",
    "(Tensor? dpre, Tensor? dpost, Tensor? dres_logits, Tensor? z, Tensor? mean_square, Tensor? scale, Tensor bias,"
    " str recipe) -> (Tensor dz, Tensor dmean_square, Tensor dscale, Tensor dbias)",
    reference=_bwd_reference,
    fake=_bwd_fake,
)


class _Activate(Operator):
    @staticmethod
    def forward(
        z: Tensor | None,
        mean_square: Tensor | None,
        scale: Tensor | None,
        bias: Tensor,
        recipe: Recipe,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _fwd(z, mean_square, scale, bias, recipe.key, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.recipe, ctx.backend = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = call_backward(_bwd, *grads, *ctx.saved_tensors, ctx.recipe.key, ctx.backend)
        return needed(gradients, ctx.needs_input_grad)


def activate(
    z: Tensor | None, mean_square: Tensor | None, scale: Tensor | None, bias: Tensor, *, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor | None]:
    """pre, post and the logits of the residual map from what ``project`` returned.

    Args:
        z: [..., P]; None for a static recipe.
        mean_square: [...]; None for a static recipe.
        scale: [3] ([2] without a residual map); None for a static recipe.
        bias: [P]; for a static recipe the logits themselves.
        recipe: the math.

    Returns:
        pre [..., N], post [..., N] and the residual logits: [..., N, N] as stored, [..., N!] for permutation, None for
        identity. Static recipes have no leading dimensions.
    """
    check_recipe(recipe)
    if recipe.dynamic:
        z = check_tensor("z", z, "[..., P]")
        check_shape("z", z, "[..., P]", (*z.shape[:-1], recipe.rows))
        check_shape("mean_square", mean_square, "[...]", z.shape[:-1], like=z)
    elif z is not None or mean_square is not None:
        raise ValueError("z and mean_square must be None: the recipe is static (dynamic=False)")
    check_scale_and_bias(scale, bias, recipe, like=z)
    tensors = contiguous(z, mean_square, scale, bias)
    pre, post, logits = _Activate.call(*tensors, recipe, choose("activate", bias if z is None else z, recipe.streams))
    return pre, post, shape_residual_logits(logits, recipe)


def shape_residual_logits(logits: Tensor, recipe: Recipe) -> Tensor | None:
    """[..., R] as the residual map wants it: [..., N, N], [..., N!] for permutation, None for identity."""
    if recipe.residual == "identity":
        return None
    return logits if recipe.residual == "permutation" else logits.unflatten(-1, (recipe.streams, recipe.streams))
