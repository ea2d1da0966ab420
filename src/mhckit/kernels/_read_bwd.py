"""B: the backward of a read, up to where the streams come in: one pass over them and the gradient of x_in.

    with e = dL/dx_in:   q_i = sum_c e y_i           or, with a norm weight n, q_i = sum_c e n y_i and s_i = sum_c a y_i
                         dw_i = q_i                  or  dw_i = u (q_i - u b s_i),    b = u/C sum_i w_i q_i
    D = dL/dlogits from dw, dpost and dH, through the sigmoids and the residual map
    dz = D scale r      k = 2/K dL/dms      sums over this program's tokens of D and of D z r

so that the gradient of y, in `_streams_bwd`, is  g + w_i d + dz phi + k y  with d = e; with a norm, with u w_i in place
of w_i, d = n e - b (u a). The iteration of Sinkhorn runs again on chip. Reads y and e: 10C bytes per token for 4
streams of 2-byte activations.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._coefficients import (
    beside_residual,
    group_backward,
    load_group,
    logits_of,
    matrix_index,
    post_backward,
    pre_backward,
    pre_of,
    reciprocal_rms,
    reciprocal_rms_backward,
    residual_index,
    stream_index,
)
from ._device import (
    channels_exist,
    collapse,
    columns_of,
    from_columns,
    load_float,
    load_streams,
    rounded_product,
    store_as,
    tokens_of_program,
)
from ._launch import read_bwd_launch
from ._math import Math
from ._residual import residual_map_backward


@triton.jit(do_not_specialize=["T"])
def read_bwd_kernel(
    y,
    dx_in,
    dpre,
    dpost,
    dres,
    z,
    mean_square,
    scale,
    bias,
    weights,
    norm_weight,
    u,
    dz,
    dmean_square,
    read_weights,
    norm_share,
    dweights,
    sums,
    T,
    C: tl.constexpr,
    k_factor,
    MATH: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    N: tl.constexpr = MATH.streams
    PADDED: tl.constexpr = MATH.padded_streams
    t, live = tokens_of_program(T, BLOCK_T)
    n, is_stream = stream_index(MATH)
    at, here = t[:, None] * N + n, live[:, None] & is_stream
    if MATH.rows > 0:
        ms = tl.zeros((BLOCK_T,), tl.float32)
        if MATH.dynamic:
            ms = tl.where(live, load_float(mean_square, t, live), 1.0)  # 1 / 0 beyond the last token would spread
        r = reciprocal_rms(ms, MATH)
        z_pre = _load_rows(z, 0, n, is_stream, t, live, T, MATH)
        logits_pre, inner_pre = logits_of(z_pre, r[:, None], scale, bias, 0, n, is_stream, MATH)

    if WEIGHTS == "pre":
        w = pre_of(logits_pre, is_stream, MATH)
    elif WEIGHTS == "first":
        w = tl.where(n == 0, 1.0, 0.0) + tl.zeros((BLOCK_T, 1), tl.float32)
    elif WEIGHTS == "given":
        w = load_float(weights, at, here)
    if WEIGHTS != "none":
        dw = tl.zeros((BLOCK_T, PADDED), tl.float32)
        if dx_in is not None:
            dw, share = _collapse_backward(y, dx_in, norm_weight, u, w, t, live, C, MATH, BLOCK_T, BLOCK_C, STAGES)
            if norm_share is not None:
                store_as(norm_share, t, share, live)
        if read_weights is not None:
            scaled = w * load_float(u, t, live)[:, None] if norm_weight is not None else w
            store_as(read_weights, at, scaled, here)
        if dweights is not None:
            store_as(dweights, at, dw, here)

    if MATH.rows > 0:
        dr = tl.zeros((BLOCK_T,), tl.float32)
        given_pre = tl.zeros((BLOCK_T, PADDED), tl.float32)
        if dpre is not None:
            given_pre = load_float(dpre, at, here)
        if WEIGHTS == "pre":
            given_pre += dw
        dlogits = pre_backward(given_pre, logits_pre, is_stream, MATH)
        dr += group_backward(
            dlogits, z_pre, inner_pre, r[:, None], scale, dz, sums, 0, n, is_stream, t, live, MATH.rows, MATH
        )
        if MATH.post != "none":
            dr += _post_backward(dpost, z, r, scale, bias, dz, sums, t, live, T, MATH, BLOCK_T)
        if MATH.logits > 0:
            dr += _residual_backward(dres, z, r, scale, bias, dz, sums, t, live, T, MATH, BLOCK_T)
        if MATH.dynamic:
            store_as(dmean_square, t, reciprocal_rms_backward(dr, ms, MATH) * k_factor, live)


@triton.jit
def _load_rows(z, GROUP: tl.constexpr, index, exists, t, live, T, MATH: tl.constexpr):
    if MATH.dynamic:
        return load_group(z, GROUP, index, exists, t, live, 1, T, MATH)
    else:
        return tl.where((beside_residual(live, MATH) if GROUP == 2 else live[:, None]) & exists, 0.0, 0.0)


@triton.jit
def _post_backward(dpost, z, r, scale, bias, dz, sums, t, live, T, MATH: tl.constexpr, BLOCK_T: tl.constexpr):
    PADDED: tl.constexpr = MATH.padded_streams
    n, is_stream = stream_index(MATH)
    rows = _load_rows(z, 1, n, is_stream, t, live, T, MATH)
    logits, inner = logits_of(rows, r[:, None], scale, bias, 1, n, is_stream, MATH)
    gradient = tl.zeros((BLOCK_T, PADDED), tl.float32)
    if dpost is not None:
        gradient = load_float(dpost, t[:, None] * MATH.streams + n, live[:, None] & is_stream)
    dlogits = post_backward(gradient, logits, MATH)
    return group_backward(dlogits, rows, inner, r[:, None], scale, dz, sums, 1, n, is_stream, t, live, MATH.rows, MATH)


@triton.jit
def _residual_backward(dres, z, r, scale, bias, dz, sums, t, live, T, MATH: tl.constexpr, BLOCK_T: tl.constexpr):
    index, is_logit = residual_index(MATH)
    rows = _load_rows(z, 2, index, is_logit, t, live, T, MATH)
    beside = beside_residual(r, MATH)
    logits, inner = logits_of(rows, beside, scale, bias, 2, index, is_logit, MATH)
    if dres is None:
        dlogits = rows * 0.0
    elif MATH.residual == "logits":
        dlogits = load_float(dres, t[:, None] * MATH.logits + index, live[:, None] & is_logit)
    else:
        entry, is_entry = matrix_index(MATH)
        offsets = t[:, None, None] * (MATH.streams * MATH.streams) + entry
        dmatrix = load_float(dres, offsets, live[:, None, None] & is_entry)
        dlogits = residual_map_backward(dmatrix, logits, is_logit, MATH)
    return group_backward(dlogits, rows, inner, beside, scale, dz, sums, 2, index, is_logit, t, live, MATH.rows, MATH)


@triton.jit
def _collapse_backward(
    y,
    dx_in,
    norm_weight,
    u,
    w,
    t,
    live,
    C: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dL/dw [tokens, padded N], and b, the share of u a in the gradient d of the collapsed vector."""
    N: tl.constexpr = MATH.streams
    PADDED: tl.constexpr = MATH.padded_streams
    NORM: tl.constexpr = norm_weight is not None
    share = tl.zeros((BLOCK_T,), tl.float32)
    weights = columns_of(w, N)
    with_e = ()
    with_a = ()
    for _ in tl.static_range(N):
        with_e = with_e + (tl.zeros((BLOCK_T, BLOCK_C), tl.float32),)
        with_a = with_a + (tl.zeros((BLOCK_T, BLOCK_C if NORM else 1), tl.float32),)
    for start in tl.range(0, C, BLOCK_C, num_stages=STAGES):
        c = start + tl.arange(0, BLOCK_C)
        here = channels_exist(c, C, BLOCK_C)
        tile = live[:, None] & here[None, :]
        e = load_float(dx_in, t[:, None] * C + c[None, :], tile)
        streams = load_streams(y, t[:, None] * (N * C) + c[None, :], tile, C, N)
        if NORM:
            e *= load_float(norm_weight, c, here)[None, :]
            a = collapse(weights, streams, N)
        next_e = ()
        next_a = ()
        for i in tl.static_range(N):
            next_e = next_e + (with_e[i] + e * streams[i],)
            if NORM:
                next_a = next_a + (with_a[i] + a * streams[i],)
        with_e = next_e
        with_a = next_a if NORM else with_a
    q = ()
    s = ()
    for i in tl.static_range(N):
        q = q + (tl.sum(with_e[i], 1),)
        s = s + (tl.sum(with_a[i], 1),)
    dw = from_columns(q, N, PADDED)
    if NORM:
        inverse = load_float(u, t, live)
        share += tl.sum(rounded_product(w, dw), 1) * inverse / C
        dw = inverse[:, None] * (dw - (inverse * share)[:, None] * from_columns(s, N, PADDED))
    return dw, share


def read_bwd(
    y: Tensor | None,
    dx_in: Tensor | None,
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    z: Tensor | None,
    mean_square: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    math: Math,
    *,
    tokens: int,
    channels: int = 1,
    weights: Tensor | str = "none",
    norm_weight: Tensor | None = None,
    u: Tensor | None = None,
    dz: Tensor | None = None,
    dmean_square: Tensor | None = None,
    k_factor: float = 1.0,
    read_weights: Tensor | None = None,
    norm_share: Tensor | None = None,
    dweights: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    """Fill the given results. weights: a tensor [T, N], or what WEIGHTS may be."""
    launch = read_bwd_launch(math.streams, channels)
    given = isinstance(weights, Tensor)
    read_bwd_kernel[(triton.cdiv(tokens, launch.block_t),)](
        y, dx_in, dpre, dpost, dres, z, mean_square, scale, bias, weights if given else None, norm_weight, u,
        dz, dmean_square, read_weights, norm_share, dweights, sums, tokens, channels, k_factor,
        MATH=math, WEIGHTS="given" if given else weights, **launch.meta(),
    )  # fmt: skip
