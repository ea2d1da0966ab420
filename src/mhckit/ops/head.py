r"""Head: after the last sublayer, the streams become one vector again.

    h[t,c] = sum_i p[t,i] x[t,i,c]
    mean       p = 1/N
    learned    p = sigmoid(scale (x fn^T) r + base) + pre_eps          with r as in `activate`
    last_pre   p = the last sublayer's pre (shifted recipes)

The gradient of x is that of the collapse plus, if learned, that of the projection; both are rounded together, once.

T tokens; N streams (I as a summed axis); C channels; K = N*C.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhckit.recipe import Recipe

from ._backend import choose
from ._check import Checked, check_dtype, check_shape, check_streams
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
from .activate import reciprocal_rms, reciprocal_rms_backward
from .pre import pre_backward, pre_reference
from .project import project_backward, project_reference


def head_reference(
    x_TIC: Tensor,
    fn_NK: Tensor | None,
    scale: Tensor | None,
    base_N: Tensor | None,
    pre_TI: Tensor | None,
    out_dtype: torch.dtype,
    recipe: Recipe,
) -> tuple[Tensor, Tensor, Tensor]:
    """h [T, C], and for a learned head its z [T, N] and mean square [T]."""
    if fn_NK is None:
        weights_TI = _mean_weights(x_TIC) if pre_TI is None else pre_TI
        z_TN = ms_T = None
    else:
        z_TN, ms_T = project_reference(x_TIC, fn_NK, None)
        weights_TI = _sigmoid(z_TN, ms_T, scale, base_N, recipe) + recipe.pre_eps
    h_TC, _ = pre_reference(x_TIC, weights_TI, None, 0.0, out_dtype)
    nothing = x_TIC.new_empty(0, dtype=accumulator(x_TIC))
    return h_TC, absent(nothing) if z_TN is None else z_TN, absent(nothing) if ms_T is None else ms_T


def head_backward(
    dh_TC: Tensor,
    x_TIC: Tensor,
    fn_NK: Tensor | None,
    scale: Tensor | None,
    base_N: Tensor | None,
    pre_TI: Tensor | None,
    z_TN: Tensor | None,
    ms_T: Tensor | None,
    need_fn: bool,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    """dx, dfn, dscale, dbase, dpre."""
    inputs = (x_TIC, fn_NK, scale, base_N, pre_TI)
    if fn_NK is None or z_TN is None or ms_T is None or scale is None:
        weights_TI = _mean_weights(x_TIC) if pre_TI is None else pre_TI
        dx_TIC, dpre_TI, _ = pre_backward(dh_TC, x_TIC, weights_TI, None, None, False)
        gradients = (dx_TIC, None, None, None, dpre_TI)
        return rounded(gradients, inputs, otherwise=x_TIC)
    sigmoid_TN, r_T = _sigmoid(z_TN, ms_T, scale, base_N, recipe), reciprocal_rms(ms_T, recipe)
    dx_TIC, dweights_TN, _ = pre_backward(dh_TC, x_TIC, sigmoid_TN + recipe.pre_eps, None, None, False)
    dlogits_TN = dweights_TN * sigmoid_TN * (1 - sigmoid_TN)
    dnormed_TN = dlogits_TN * scale.to(z_TN.dtype)
    dms_T = reciprocal_rms_backward((dnormed_TN * z_TN).sum(-1), ms_T, recipe)
    dproject_TIC, dfn_NK, _ = project_backward(dnormed_TN * r_T[..., None], dms_T, x_TIC, fn_NK, None, need_fn)
    dscale = (dlogits_TN * z_TN * r_T[..., None]).sum().reshape(1)
    dbase_N = dlogits_TN.reshape(-1, dlogits_TN.shape[-1]).sum(0)
    gradients = (dx_TIC + dproject_TIC, dfn_NK, dscale, dbase_N, None)
    return rounded(gradients, inputs, otherwise=x_TIC)


def _mean_weights(x_TIC: Tensor) -> Tensor:
    return x_TIC.new_full(x_TIC.shape[:-1], 1 / x_TIC.shape[-2], dtype=accumulator(x_TIC))


def _sigmoid(z_TN: Tensor, ms_T: Tensor, scale: Tensor | None, base_N: Tensor | None, recipe: Recipe) -> Tensor:
    """scale and base are given whenever there is a z: the public function checks it."""
    normed_TN = z_TN * reciprocal_rms(ms_T, recipe)[..., None]
    return (normed_TN * scale.to(z_TN.dtype) + base_N.to(z_TN.dtype)).sigmoid()  # type: ignore[union-attr]


def _fwd_fake(x: Tensor, fn: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, out_dtype, _recipe = rest
    lead, acc = x.shape[:-2], accumulator(x)
    h = empty(x, *lead, x.shape[-1], dtype=out_dtype)
    if fn is None:
        return h, empty(x, 0, dtype=acc), empty(x, 0, dtype=acc)
    return h, empty(x, *lead, fn.shape[0], dtype=acc), empty(x, *lead, dtype=acc)


def _bwd_fake(*args: Any) -> tuple[Tensor, ...]:
    _dh, x, fn, scale, base, pre, _z, _ms, need_fn, _recipe = args
    return room_for((x, fn if need_fn else None, scale, base, pre), otherwise=x)


_fwd = register(
    "head_fwd",
    "(Tensor x, Tensor? fn, Tensor? scale, Tensor? base, Tensor? pre, str out_dtype, str recipe)"
    " -> (Tensor h, Tensor z, Tensor mean_square)",
    reference=head_reference,
    fake=_fwd_fake,
)
_bwd = register(
    "head_bwd",
    "(Tensor dh, Tensor x, Tensor? fn, Tensor? scale, Tensor? base, Tensor? pre, Tensor? z, Tensor? mean_square,"
    " bool need_fn, str recipe) -> (Tensor dx, Tensor dfn, Tensor dscale, Tensor dbase, Tensor dpre)",
    reference=head_backward,
    fake=_bwd_fake,
)


class _Head(Operator):
    results = 1

    @staticmethod
    def forward(
        x: Tensor,
        fn: Tensor | None,
        scale: Tensor | None,
        base: Tensor | None,
        pre: Tensor | None,
        out_dtype: torch.dtype,
        recipe: Recipe,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _fwd(x, fn, scale, base, pre, dtype_name(out_dtype), recipe.key, backend)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, _out_dtype, ctx.recipe, ctx.backend = inputs
        _h, z, ms = output
        learned = tensors[1] is not None
        ctx.save_for_backward(*tensors, *((z, ms) if learned else (None, None)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _Head.save(ctx, inputs, output)
        mark_hidden(ctx, *output[1:])

    @staticmethod
    def backward(ctx: Any, dh: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        need_fn = ctx.needs_input_grad[1]
        gradients = call_backward(_bwd, dh, *ctx.saved_tensors, need_fn, ctx.recipe.key, ctx.backend)
        return needed(gradients, ctx.needs_input_grad)


_checked = Checked()


def head(
    x: Tensor,
    *,
    recipe: Recipe,
    fn: Tensor | None = None,
    scale: Tensor | None = None,
    base: Tensor | None = None,
    pre: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Collapse the streams after the last sublayer.

    Args:
        x: streams [..., N, C], from ``leave``.
        recipe: the math; ``recipe.head`` says which of the rest is needed.
        fn, scale, base: [N, N*C], [1] and [N], for ``head="learned"`` alone.
        pre: [..., N], the last sublayer's ``mix.pre``, for ``head="last_pre"`` alone.
        out_dtype: dtype of the result, the dtype of x by default.

    Returns:
        h [..., C].
    """
    given = (x, fn, scale, base, pre)
    if not _checked.passed(given, recipe):
        _check_given(*given, recipe)
        _checked.remember(given, recipe)
    out_dtype = check_dtype("out_dtype", out_dtype, x.dtype)
    return _Head.call(*contiguous(*given), out_dtype, recipe, choose("head", x, recipe.streams))[0]


def _check_given(
    x: Tensor, fn: Tensor | None, scale: Tensor | None, base: Tensor | None, pre: Tensor | None, recipe: Recipe
) -> None:
    lead, streams, channels = check_streams(x, recipe)
    shapes = {
        "fn": (fn, "learned", "[N, N*C]", (streams, streams * channels)),
        "scale": (scale, "learned", "[1]", (1,)),
        "base": (base, "learned", "[N]", (streams,)),
        "pre": (pre, "last_pre", "[..., N]", (*lead, streams)),
    }
    for name, (tensor, kind, axes, shape) in shapes.items():
        if recipe.head == kind:
            check_shape(name, tensor, axes, shape, like=x)
        elif tensor is not None:
            raise ValueError(
                f"{name} must be None: it belongs to head={kind!r} and the recipe has head={recipe.head!r}"
            )
