"""F2: add up the projection, turn it into coefficients, and collapse the streams with them, in one pass over them.

    z = sum_s partial[s]    ms = sum_s square[s] / K    pre, post, H = coefficients(z, ms)
    a[t,c] = sum_i w[t,i] y[t,i,c]          x_in = a,  or with a norm weight g  u a g,  u = 1 / sqrt(mean_c a^2 + eps)

A program first computes the coefficients of BLOCK_T tokens, a matrix per thread group, and then collapses the rows of
these tokens one after the other. WEIGHTS says which w: "pre" just computed, "given", "first" (stream 0), a constant, or
"none" for coefficients alone. Reads y, writes x_in: 10C bytes per token for 4 streams of 2-byte activations; with a
norm the row is read twice, the second time from the nearest cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._coefficients import (
    beside_residual,
    load_group,
    logits_of,
    matrix_index,
    post_of,
    pre_of,
    reciprocal_rms,
    residual_index,
    stream_index,
)
from ._device import channels_exist, collapse, load_float, load_streams, rounded_product, store_as, tokens_of_program
from ._launch import read_launch
from ._math import Math
from ._residual import residual_map
from ._write_project import Projection


@triton.jit(do_not_specialize=["T", "splits"])
def read_kernel(
    y,
    partials,
    squares,
    scale,
    bias,
    weights,
    norm_weight,
    x_in,
    pre,
    post,
    res,
    z,
    mean_square,
    u,
    T,
    C: tl.constexpr,
    splits,
    width,
    norm_eps,
    constant,
    MATH: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    if MATH.rows > 0:
        t, live = tokens_of_program(T, BLOCK_T)
        sums = (partials, squares, splits, width)
        _coefficients(y, sums, scale, bias, pre, post, res, z, mean_square, t, live, T, MATH)
    if WEIGHTS != "none":
        if WEIGHTS == "pre":
            tl.debug_barrier()  # the weights that other threads of this program have just stored are loaded again
        first = tl.program_id(0).to(tl.int64) * BLOCK_T
        for t in range(first, tl.minimum(first + BLOCK_T, T)):
            _collapse_row(y, pre if WEIGHTS == "pre" else weights, norm_weight, x_in, u, t, C, norm_eps, constant,
                          MATH.streams, WEIGHTS, BLOCK_C, STAGES)  # fmt: skip


@triton.jit
def _coefficients(y, sums, scale, bias, pre, post, res, z, mean_square, t, live, T, MATH: tl.constexpr):
    partials, squares, splits, width = sums
    r = tl.zeros((t.shape[0],), tl.float32)
    if MATH.dynamic:
        square = load_float(squares, t, live)
        for split in range(1, splits):
            square += load_float(squares, tl.cast(split, tl.int64) * T + t, live)
        square = tl.div_rn(square, width)
        if mean_square is not None:
            store_as(mean_square, t, square, live)
        r = reciprocal_rms(square, MATH)

    n, is_stream = stream_index(MATH)
    here = live[:, None] & is_stream
    at = t[:, None] * MATH.streams + n
    logits = _logits(partials, scale, bias, z, r, 0, n, is_stream, t, live, splits, T, MATH)
    store_as(pre, at, pre_of(logits, is_stream, MATH), here)
    if MATH.post != "none":
        logits = _logits(partials, scale, bias, z, r, 1, n, is_stream, t, live, splits, T, MATH)
        value = post_of(logits, MATH)
        if MATH.round_mix:
            value = value.to(y.dtype.element_ty).to(tl.float32)
        store_as(post, at, value, here)
    if MATH.logits > 0:
        index, is_logit = residual_index(MATH)
        logits = _logits(partials, scale, bias, z, r, 2, index, is_logit, t, live, splits, T, MATH)
        if MATH.residual == "logits":
            store_as(res, t[:, None] * MATH.logits + index, logits, live[:, None] & is_logit)
        else:
            matrix = residual_map(logits, is_logit, MATH)
            if MATH.round_mix:
                matrix = matrix.to(y.dtype.element_ty).to(tl.float32)
            entry, is_entry = matrix_index(MATH)
            store_as(
                res, t[:, None, None] * (MATH.streams * MATH.streams) + entry, matrix, live[:, None, None] & is_entry
            )


@triton.jit
def _logits(partials, scale, bias, z, r, GROUP: tl.constexpr, index, exists, t, live, splits, T, MATH: tl.constexpr):
    """Logits of a group of rows; its z is stored on the way."""
    token = beside_residual(t, MATH) if GROUP == 2 else t[:, None]
    here = (beside_residual(live, MATH) if GROUP == 2 else live[:, None]) & exists
    value = tl.where(here, 0.0, 0.0)
    if MATH.dynamic:
        value = load_group(partials, GROUP, index, exists, t, live, splits, T, MATH)
        if z is not None:
            store_as(z, token * MATH.rows + GROUP * MATH.streams + index, value, here)
    r = beside_residual(r, MATH) if GROUP == 2 else r[:, None]
    return logits_of(value, r, scale, bias, GROUP, index, exists, MATH)[0]


@triton.jit
def _collapse_row(
    y, weights, norm_weight, x_in, u, t, C: tl.constexpr, norm_eps, constant, N: tl.constexpr, WEIGHTS: tl.constexpr,
    BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = ()
    for i in tl.static_range(N):
        if WEIGHTS == "constant":
            weight = constant
        elif WEIGHTS == "first":
            weight = 1.0 if i == 0 else 0.0
        else:
            weight = tl.load(weights + t * N + i).to(tl.float32)
        columns = columns + (weight,)
    if norm_weight is None:
        for start in tl.range(0, C, BLOCK_C, num_stages=STAGES):
            c = start + tl.arange(0, BLOCK_C)
            here = channels_exist(c, C, BLOCK_C)
            store_as(x_in, t * C + c, _collapse(y, columns, t, c, here, C, N), here)
    else:
        square = tl.zeros((BLOCK_C,), tl.float32)
        for start in tl.range(0, C, BLOCK_C, num_stages=STAGES):
            c = start + tl.arange(0, BLOCK_C)
            a = _collapse(y, columns, t, c, channels_exist(c, C, BLOCK_C), C, N)
            square += rounded_product(a, a)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(square, 0) / C + norm_eps))
        store_as(u, t, inverse, True)
        for start in tl.range(0, C, BLOCK_C, num_stages=STAGES):
            c = start + tl.arange(0, BLOCK_C)
            here = channels_exist(c, C, BLOCK_C)
            scaled = _collapse(y, columns, t, c, here, C, N) * inverse * load_float(norm_weight, c, here)
            store_as(x_in, t * C + c, scaled, here)


@triton.jit
def _collapse(y, weights, t, c, here, C: tl.constexpr, N: tl.constexpr):
    return collapse(weights, load_streams(y, t * (N * C) + c, here, C, N), N)


def read(
    y: Tensor | None,
    projection: Projection | None,
    scale: Tensor | None,
    bias: Tensor | None,
    math: Math,
    *,
    tokens: int,
    channels: int = 1,
    width: float | None = None,
    weights: Tensor | str = "none",
    constant: float = 0.0,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    x_in: Tensor | None = None,
    pre: Tensor | None = None,
    post: Tensor | None = None,
    res: Tensor | None = None,
    z: Tensor | None = None,
    mean_square: Tensor | None = None,
    u: Tensor | None = None,
) -> None:
    """Fill the given results. weights: a tensor [T, N], or what WEIGHTS may be; width: what divides the squares."""
    launch = read_launch(math.streams, channels, iterating=math.logits > 0)
    given = isinstance(weights, Tensor)
    splits = 1 if projection is None else projection.z.shape[0]
    read_kernel[(triton.cdiv(tokens, launch.block_t),)](
        y, *(projection or (None, None)), scale, bias, weights if given else None, norm_weight,
        x_in, pre, post, res if math.logits else None, z, mean_square, u if norm_weight is not None else None,
        tokens, channels, splits, width or float(math.streams * channels), norm_eps, constant,
        MATH=math, WEIGHTS="given" if given else weights, **launch.meta(),
    )  # fmt: skip
