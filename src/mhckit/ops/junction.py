r"""Junction: everything between two sublayers, as one operator.

    y = res x + post (f + b)                      write back sublayer l         (post)
    mix' = coefficients(y)                        pre, post, res of sublayer l+1
    x_in' = mix'.pre . y  [then RMSNorm]          what sublayer l+1 reads       (shifted: mix.pre . y)

y is rounded to the dtype of the streams once, and everything after it is computed from the rounded y. The backward
first gathers the gradient of y from all three of its uses, unrounded,

    G = g + pre d + dz phi + k y                                                (see _read)
    dx = res^T G     df = post G     dres = G x^T     dpost = G (f + b)         (post)

so x crosses memory once and autograd never adds gradients of it.

T tokens; N streams; C channels; P rows of phi; K = N*C.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhckit.recipe import Recipe

from ._backend import choose
from ._check import (
    Checked,
    check_dtype,
    check_eps,
    check_mix,
    check_optional,
    check_parameters,
    check_shape,
    check_streams,
)
from ._read import OutNorm, empty_read, read_backward, read_reference
from ._register import (
    Operator,
    call_backward,
    contiguous,
    dtype_name,
    empty,
    needed,
    pack,
    register,
    room_for,
    rounded,
)
from .coefficients import (
    Parameters,
    as_mix,
    hide_kept,
    mix_gradients,
    parameters_with_gradients,
    save_with_coefficients,
)
from .mix import Mix
from .post import post_backward, post_reference


def junction_reference(
    x: Tensor,
    f: Tensor,
    f_bias: Tensor | None,
    shifted_pre: Tensor | None,
    post: Tensor,
    res: Tensor | None,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    norm_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    out_norm_eps: float,
    out_dtype: torch.dtype,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    """y, x_in, pre, post, res, z, mean_square, u."""
    y = post_reference(x, f, f_bias, post, res).to(x.dtype)
    parameters = Parameters(phi, scale, bias, norm_weight)
    read = read_reference(y, shifted_pre, parameters, OutNorm(out_norm_weight, out_norm_eps), out_dtype, recipe)
    return y, read.x_in, *pack(read.coefficients, otherwise=read.coefficients.pre), read.u


def junction_backward(
    g: Tensor | None,
    dx_in: Tensor | None,
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    x: Tensor,
    f: Tensor,
    f_bias: Tensor | None,
    shifted_pre: Tensor | None,
    post: Tensor,
    res: Tensor | None,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    norm_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    y: Tensor,
    z: Tensor | None,
    mean_square: Tensor | None,
    u: Tensor | None,
    need_phi: bool,
    need_out_norm: bool,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    """Gradients of x, f, f_bias, shifted_pre, post, res, phi, scale, bias, norm_weight, out_norm_weight."""
    parameters = Parameters(phi, scale, bias, norm_weight)
    read = read_backward(
        g,
        dx_in,
        mix_gradients(dpre, dpost, dres, x, recipe),
        y,
        shifted_pre,
        parameters,
        out_norm_weight,
        z,
        mean_square,
        u,
        recipe,
        need_phi,
        need_out_norm,
    )
    write = post_backward(read.y, x, f, f_bias, post, res)
    gradients = (write.x, write.f, write.f_bias, read.shifted_pre, write.post, write.res)
    inputs = (x, f, f_bias, shifted_pre, post, res)
    return rounded(
        (*gradients, *read.parameters, read.out_norm_weight), (*inputs, *parameters, out_norm_weight), otherwise=x
    )


def _fwd_fake(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, out_norm_weight, _out_norm_eps, out_dtype, recipe = rest
    return empty(x, *x.shape), *empty_read(x, out_norm_weight, out_dtype, recipe)


def _bwd_fake(*args: Any) -> tuple[Tensor, ...]:
    _g, _dx_in, _dpre, _dpost, _dres, *inputs, _y, _z, _ms, _u, need_phi, need_out_norm, _recipe = args
    *write, phi, scale, bias, norm_weight, out_norm_weight = inputs
    parameters = parameters_with_gradients(Parameters(phi, scale, bias, norm_weight), need_phi)
    return room_for((*write, *parameters, out_norm_weight if need_out_norm else None), otherwise=write[0])


_INPUTS = (
    "Tensor x, Tensor f, Tensor? f_bias, Tensor? shifted_pre, Tensor post, Tensor? res,"
    " Tensor? phi, Tensor? scale, Tensor bias, Tensor? norm_weight, Tensor? out_norm_weight"
)
_fwd = register(
    "junction_fwd",
    f"({_INPUTS}, float out_norm_eps, str out_dtype, str recipe) -> (Tensor y, Tensor x_in, Tensor pre_out,"
    " Tensor post_out, Tensor res_out, Tensor z, Tensor mean_square, Tensor u)",
    reference=junction_reference,
    fake=_fwd_fake,
)
_bwd = register(
    "junction_bwd",
    f"(Tensor? dy, Tensor? dx_in, Tensor? dpre_out, Tensor? dpost_out, Tensor? dres_out, {_INPUTS},"
    " Tensor y, Tensor? z, Tensor? mean_square, Tensor? u, bool need_phi, bool need_out_norm, str recipe)"
    " -> (Tensor dx, Tensor df, Tensor df_bias, Tensor dshifted_pre, Tensor dpost, Tensor dres,"
    " Tensor dphi, Tensor dscale, Tensor dbias, Tensor dnorm_weight, Tensor dout_norm_weight)",
    reference=junction_backward,
    fake=_bwd_fake,
)


class _Junction(Operator):
    results = 5

    @staticmethod
    def forward(
        x: Tensor,
        f: Tensor,
        f_bias: Tensor | None,
        shifted_pre: Tensor | None,
        post: Tensor,
        res: Tensor | None,
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
        write = (x, f, f_bias, shifted_pre, post, res)
        parameters = (phi, scale, bias, norm_weight, out_norm_weight)
        return _fwd(*write, *parameters, out_norm_eps, dtype_name(out_dtype), recipe.key, backend)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, _out_norm_eps, _out_dtype, ctx.recipe, ctx.backend = inputs
        save_with_coefficients(ctx, (*tensors, output[0]), *output[5:], normed=tensors[-1] is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _Junction.save(ctx, inputs, output)
        hide_kept(ctx, *output[4:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *_write, need_phi, _, _, need_norm_weight, need_out_norm = ctx.needs_input_grad[:11]
        needs = (need_phi or need_norm_weight, need_out_norm)
        gradients = call_backward(_bwd, *grads[:5], *ctx.saved_tensors, *needs, ctx.recipe.key, ctx.backend)
        return needed(gradients, ctx.needs_input_grad)


_checked = Checked()


def junction(
    x: Tensor,
    f: Tensor,
    mix: Mix,
    phi: Tensor | None,
    scale: Tensor | None,
    bias: Tensor,
    *,
    recipe: Recipe,
    f_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    out_norm_weight: Tensor | None = None,
    out_norm_eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Mix]:
    """Write a sublayer's output into the streams and read the next sublayer's input from them.

    Args:
        x: the streams the sublayer read from [..., N, C].
        f: the sublayer's output [..., C].
        mix: the sublayer's Mix, from ``enter`` or the junction before it.
        phi, scale, bias, norm_weight: parameters of the *next* sublayer, as in ``enter``.
        recipe: the math.
        f_bias: [C], the sublayer's last bias, added to f on the way.
        out_norm_weight: [C]; if given, x_in comes out RMS-normalised and multiplied by it.
        out_norm_eps: added to the mean square under the root of that norm.
        out_dtype: dtype of x_in, the dtype of x by default.

    Returns:
        y [..., N, C], the new streams; x_in [..., C], the next sublayer's input; and the next sublayer's Mix.
    """
    parts = mix if type(mix) is Mix else (mix,)
    given = (x, f, f_bias, *parts, phi, scale, bias, norm_weight, out_norm_weight)
    if not _checked.passed(given, recipe):
        lead, _, channels = check_streams(x, recipe)
        check_shape("f", f, "[..., C]", (*lead, channels), like=x)
        mix = check_mix(mix, x, recipe)
        check_parameters(x, phi, scale, bias, norm_weight, recipe)
        check_optional("f_bias", f_bias, "[C]", (channels,), like=x)
        check_optional("out_norm_weight", out_norm_weight, "[C]", (channels,), like=x)
        _checked.remember(given, recipe)
    shifted_pre = mix.pre if recipe.shifted else None
    tensors = contiguous(x, f, f_bias, shifted_pre, mix.post, mix.res, phi, scale, bias, norm_weight, out_norm_weight)
    out_norm_eps = check_eps("out_norm_eps", out_norm_eps)
    out_dtype = check_dtype("out_dtype", out_dtype, x.dtype)
    y, x_in, pre, post, res, *_ = _Junction.call(
        *tensors, out_norm_eps, out_dtype, recipe, choose("junction", x, recipe.streams)
    )
    return y, x_in, as_mix(pre, post, res, recipe)
