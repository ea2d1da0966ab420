r"""Post: mix the streams and write a sublayer's output back into them.

    y[t,o,c] = sum_i H[t,o,i] x[t,i,c] + p[t,o] (f[t,c] + b[c])              (identity: H = I)

    dx[t,i,c] = sum_o H[t,o,i] g[t,o,c]       df[t,c] = sum_o p[t,o] g[t,o,c]       db[c] = sum_t df[t,c]
    dH[t,o,i] = sum_c g[t,o,c] x[t,i,c]       dp[t,o] = sum_c g[t,o,c] (f[t,c] + b[c])

y is rounded to the dtype of x once. T tokens; O, I output and input stream (both N long); C channels; g = dL/dy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ._backend import choose
from ._check import Checked, check_optional, check_shape, check_streams
from ._register import Operator, accumulator, call_backward, contiguous, empty, needed, register, room_for, rounded


def post_reference(
    x_TIC: Tensor, f_TC: Tensor, f_bias_C: Tensor | None, post_TO: Tensor, res_TOI: Tensor | None
) -> Tensor:
    acc = accumulator(x_TIC)
    x_TIC, f_TC = x_TIC.to(acc), _with_bias(f_TC.to(acc), f_bias_C)
    mixed_TOC = x_TIC if res_TOI is None else res_TOI.to(acc) @ x_TIC
    return mixed_TOC + post_TO.to(acc)[..., None] * f_TC[..., None, :]


class PostGradients(NamedTuple):
    """Unrounded."""

    x: Tensor
    f: Tensor
    f_bias: Tensor | None
    post: Tensor
    res: Tensor | None


def post_backward(
    g_TOC: Tensor, x_TIC: Tensor, f_TC: Tensor, f_bias_C: Tensor | None, post_TO: Tensor, res_TOI: Tensor | None
) -> PostGradients:
    acc = accumulator(x_TIC)
    g_TOC, x_TIC, f_TC = g_TOC.to(acc), x_TIC.to(acc), _with_bias(f_TC.to(acc), f_bias_C)
    df_TC = (post_TO.to(acc)[..., None] * g_TOC).sum(-2)
    return PostGradients(
        x=g_TOC.clone() if res_TOI is None else res_TOI.to(acc).mT @ g_TOC,
        f=df_TC,
        f_bias=None if f_bias_C is None else df_TC.reshape(-1, df_TC.shape[-1]).sum(0),
        post=(g_TOC @ f_TC[..., None])[..., 0],
        res=None if res_TOI is None else g_TOC @ x_TIC.mT,
    )


def _with_bias(f_TC: Tensor, f_bias_C: Tensor | None) -> Tensor:
    return f_TC if f_bias_C is None else f_TC + f_bias_C.to(f_TC.dtype)


def _fwd_reference(x: Tensor, f: Tensor, f_bias: Tensor | None, post: Tensor, res: Tensor | None) -> Tensor:
    return post_reference(x, f, f_bias, post, res).to(x.dtype)


def _fwd_fake(x: Tensor, f: Tensor, f_bias: Tensor | None, post: Tensor, res: Tensor | None) -> Tensor:
    return empty(x, *x.shape)


def _bwd_reference(
    g: Tensor, x: Tensor, f: Tensor, f_bias: Tensor | None, post: Tensor, res: Tensor | None
) -> tuple[Tensor, ...]:
    return rounded(post_backward(g, x, f, f_bias, post, res), (x, f, f_bias, post, res), otherwise=x)


def _bwd_fake(
    g: Tensor, x: Tensor, f: Tensor, f_bias: Tensor | None, post: Tensor, res: Tensor | None
) -> tuple[Tensor, ...]:
    return room_for((x, f, f_bias, post, res), otherwise=x)


_fwd = register(
    "post_fwd",
    "(Tensor x, Tensor f, Tensor? f_bias, Tensor post, Tensor? res) -> Tensor",
    reference=_fwd_reference,
    fake=_fwd_fake,
)
_bwd = register(
    "post_bwd",
    "(Tensor dy, Tensor x, Tensor f, Tensor? f_bias, Tensor post, Tensor? res)"
    " -> (Tensor dx, Tensor df, Tensor df_bias, Tensor dpost, Tensor dres)",
    reference=_bwd_reference,
    fake=_bwd_fake,
)


class _Post(Operator):
    @staticmethod
    def forward(x: Tensor, f: Tensor, f_bias: Tensor | None, post: Tensor, res: Tensor | None, backend: str) -> Tensor:
        return _fwd(x, f, f_bias, post, res, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gradients = call_backward(_bwd, dy, *ctx.saved_tensors, ctx.backend)
        return needed(gradients, ctx.needs_input_grad)


_checked = Checked()


def post(x: Tensor, f: Tensor, post: Tensor, res: Tensor | None, *, f_bias: Tensor | None = None) -> Tensor:
    """Write a sublayer's output into the streams: y = res x + post (f + f_bias).

    Args:
        x: streams [..., N, C].
        f: the sublayer's output [..., C].
        post: write weights [..., N].
        res: residual matrix [..., N_out, N_in]; None leaves the streams unmixed.
        f_bias: [C], the sublayer's last bias, added to f on the way.

    Returns:
        y [..., N, C] in the dtype of x.
    """
    given = (x, f, f_bias, post, res)
    if not _checked.passed(given):
        lead, streams, channels = check_streams(x)
        check_shape("f", f, "[..., C]", (*lead, channels), like=x)
        check_shape("post", post, "[..., N]", (*lead, streams), like=x)
        check_optional("res", res, "[..., N_out, N_in]", (*lead, streams, streams), like=x)
        check_optional("f_bias", f_bias, "[C]", (channels,), like=x)
        _checked.remember(given)
    return _Post.call(*contiguous(*given), choose("post", x, x.shape[-2]))
