"""B: the backward of a read, up to where the streams come in: one pass over them and the gradient of x_in.

    with e = dL/dx_in:   q_i = sum_c e y_i           or, with a norm weight n, q_i = sum_c e n y_i and s_i = sum_c a y_i
                         dw_i = q_i                  or  dw_i = u (q_i - u b s_i),    b = u/C sum_i w_i q_i
    D = dL/dlogits from dw, dpost and dH, through the sigmoids and the residual map
    dz = D scale r      k = 2/K dL/dms      sums over this program's tokens of D and of D z r

so that the gradient of y, in `_streams_bwd`, is g + w_i d + dz phi + k y with d = e; with a norm, with u w_i in place
of w_i, d = n e - b (u a). As in `_read`, some programs take post and H, whose logits need no sum over channels: the
iteration of Sinkhorn runs again on chip while the memory serves the other programs. Their share of k is k_more. dz is
stored in the parts that J and P multiply, and some more programs pack phi (`_pack`). Reads y and e: 10C bytes per token
for 4 streams of 2-byte activations.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mhckit.ops._register import empty

from ._coefficients import (
    beside_residual,
    group_backward,
    load_group,
    load_matrices,
    logits_of,
    post_backward,
    pre_backward,
    pre_of,
    reciprocal_rms,
    reciprocal_rms_backward,
    residual_index,
    residual_turn,
    stream_index,
)
from ._collapse_bwd import collapse_backward
from ._device import load_float, store_as
from ._launch import (
    FLOAT,
    NOT_PACKED,
    PhiLayout,
    cdiv,
    read_bwd_launch,
    residual_launch,
    residual_programs_every,
    rows_are_aligned,
    rows_are_loaded_in_words,
    threads_hold_neighbours,
)
from ._launcher import run
from ._math import Math, with_long_segments
from ._pack import pack_phi_block
from ._residual import residual_map_backward


@triton.jit(do_not_specialize=["T", "residual_programs", "pack_programs"])
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
    k_share,
    k_more,
    read_weights,
    norm_share,
    dweights,
    sums,
    more_sums,
    phi,
    phi_weight,
    phi_parts,
    T,
    C: tl.constexpr,
    k_factor,
    residual_programs,
    pack_programs,
    MATH: tl.constexpr,
    WEIGHTS: tl.constexpr,
    SEPARATE: tl.constexpr,
    RESIDUAL_T: tl.constexpr,
    EVERY: tl.constexpr,
    PACKED: tl.constexpr,
    DENSE: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    PACKED_CHANNELS: tl.constexpr,
    PHI_BLOCK: tl.constexpr,
    PHI_STEP: tl.constexpr,
    PHI_TOGETHER: tl.constexpr,
    WORDS: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    N: tl.constexpr = MATH.streams
    PADDED: tl.constexpr = MATH.padded_streams
    MORE: tl.constexpr = MATH.rows - N
    program = tl.program_id(0).to(tl.int64)
    packing = tl.num_programs(0) - pack_programs
    takes_maps, number = residual_turn(program, residual_programs, EVERY)
    if program >= packing:
        if phi_parts is not None:
            block = program - packing
            pack_phi_block(
                phi, phi_weight, phi_parts, block, C, MATH.rows, N, PACKED, DENSE, PADDED_ROWS, PACKED_CHANNELS,
                PHI_BLOCK, PHI_STEP, PHI_TOGETHER,
            )  # fmt: skip
    elif takes_maps:
        if SEPARATE:
            _write_half_backward_alone(
                dpost, dres, z, mean_square, scale, bias, dz, k_more, more_sums, number, T, k_factor, MATH,
                RESIDUAL_T,
            )  # fmt: skip
    else:
        t = number * BLOCK_T + tl.arange(0, BLOCK_T)
        live = t < T
        n, is_stream = stream_index(MATH)
        at, here = t[:, None] * N + n, live[:, None] & is_stream
        if MATH.rows > 0:
            ms, r = _load_r(mean_square, t, live, MATH)
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
                dw, share = collapse_backward(
                    y, dx_in, norm_weight, u, w, number, t, live, C, MATH, WORDS, FOLD, BLOCK_T, BLOCK_C, STAGES
                )
                if norm_share is not None:
                    store_as(norm_share, t, share, live)
            if read_weights is not None:
                scaled = w * load_float(u, t, live)[:, None] if norm_weight is not None else w
                store_as(read_weights, at, scaled, here)
            if dweights is not None:
                store_as(dweights, at, dw, here)

        if MATH.rows > 0:
            given_pre = tl.zeros((BLOCK_T, PADDED), tl.float32)
            if dpre is not None:
                given_pre = load_float(dpre, at, here)
            if WEIGHTS == "pre":
                given_pre += dw
            dlogits = pre_backward(given_pre, logits_pre, is_stream, MATH)
            dr = group_backward(
                dlogits, z_pre, inner_pre, r[:, None], scale, dz, sums + number * (2 * N), 0, N, 0, n, is_stream,
                t, live, MATH,
            )  # fmt: skip
            if not SEPARATE and MORE > 0:
                dr += _write_half_backward(
                    dpost, dres, z, r, scale, bias, dz, more_sums + number * (2 * MORE), t, live, T, MATH
                )
            if MATH.dynamic:
                store_as(k_share, t, reciprocal_rms_backward(dr, ms, MATH) * k_factor, live)


@triton.jit
def _write_half_backward_alone(
    dpost, dres, z, mean_square, scale, bias, dz, k_more, sums, program, T, k_factor, MATH: tl.constexpr,
    RESIDUAL_T: tl.constexpr,
):  # fmt: skip
    t = program * RESIDUAL_T + tl.arange(0, RESIDUAL_T)
    live = t < T
    ms, r = _load_r(mean_square, t, live, MATH)
    sums += program * (2 * (MATH.rows - MATH.streams))
    dr = _write_half_backward(dpost, dres, z, r, scale, bias, dz, sums, t, live, T, MATH)
    if MATH.dynamic:
        store_as(k_more, t, reciprocal_rms_backward(dr, ms, MATH) * k_factor, live)


@triton.jit
def _load_r(mean_square, t, live, MATH: tl.constexpr):
    ms = tl.zeros((t.shape[0],), tl.float32)
    if MATH.dynamic:
        ms = tl.where(live, load_float(mean_square, t, live), 1.0)  # 1 / 0 beyond the last token would spread
    return ms, reciprocal_rms(ms, MATH)


@triton.jit
def _write_half_backward(dpost, dres, z, r, scale, bias, dz, sums, t, live, T, MATH: tl.constexpr):
    """Through post and the residual map; returns their share of dL/dr."""
    dr = tl.zeros((t.shape[0],), tl.float32)
    if MATH.post != "none":
        dr += _post_backward(dpost, z, r, scale, bias, dz, sums, t, live, T, MATH)
    if MATH.logits > 0:
        dr += _residual_backward(dres, z, r, scale, bias, dz, sums, t, live, T, MATH)
    return dr


@triton.jit
def _load_rows(z, GROUP: tl.constexpr, index, exists, t, live, T, MATH: tl.constexpr):
    if MATH.dynamic:
        return load_group(z, GROUP, index, exists, t, live, MATH)
    else:
        return tl.where((beside_residual(live, MATH) if GROUP == 2 else live[:, None]) & exists, 0.0, 0.0)


@triton.jit
def _post_backward(dpost, z, r, scale, bias, dz, sums, t, live, T, MATH: tl.constexpr):
    N: tl.constexpr = MATH.streams
    n, is_stream = stream_index(MATH)
    rows = _load_rows(z, 1, n, is_stream, t, live, T, MATH)
    logits, inner = logits_of(rows, r[:, None], scale, bias, 1, n, is_stream, MATH)
    PADDED: tl.constexpr = MATH.padded_streams
    gradient = tl.zeros((t.shape[0], PADDED), tl.float32)
    if dpost is not None:
        gradient = load_float(dpost, t[:, None] * N + n, live[:, None] & is_stream)
    dlogits = post_backward(gradient, logits, MATH)
    return group_backward(
        dlogits, rows, inner, r[:, None], scale, dz, sums, N, MATH.rows - N, 1, n, is_stream, t, live, MATH
    )


@triton.jit
def _residual_backward(dres, z, r, scale, bias, dz, sums, t, live, T, MATH: tl.constexpr):
    N: tl.constexpr = MATH.streams
    index, is_logit = residual_index(MATH)
    rows = _load_rows(z, 2, index, is_logit, t, live, T, MATH)
    beside = beside_residual(r, MATH)
    logits, inner = logits_of(rows, beside, scale, bias, 2, index, is_logit, MATH)
    if dres is None:
        dlogits = rows * 0.0
    elif MATH.residual == "logits":
        dlogits = load_float(dres, t[:, None] * MATH.logits + index, live[:, None] & is_logit)
    else:
        dmatrix = load_matrices(dres, t * (N * N), live, MATH, MATH.transposed)
        dlogits = residual_map_backward(dmatrix, logits, is_logit, MATH)
    return group_backward(
        dlogits, rows, inner, beside, scale, dz, sums, N, MATH.rows - N, 2, index, is_logit, t, live, MATH
    )


class LogitSums(NamedTuple):
    """Sums of D and of D z r per program: the rows of pre [programs, 2, N], and the others [programs, 2, P - N]."""

    pre: Tensor
    more: Tensor | None


class Packing(NamedTuple):
    """phi, the weight folded into it, where its parts go, and how they are to lie."""

    phi: Tensor
    weight: Tensor | None
    parts: Tensor
    layout: PhiLayout


class CoefficientGradients(NamedTuple):
    """k is the sum of its two shares; k_more is None where one program does all."""

    k: Tensor | None
    k_more: Tensor | None
    sums: LogitSums | None


def read_bwd(
    y: Tensor | None,
    dx_in: Tensor | None,
    dmix: tuple[Tensor | None, Tensor | None, Tensor | None],
    z: Tensor | None,
    mean_square: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    math: Math,
    *,
    like: Tensor,
    tokens: int,
    channels: int = 1,
    weights: Tensor | str = "none",
    norm_weight: Tensor | None = None,
    u: Tensor | None = None,
    dz: Tensor | None = None,
    k_factor: float = 1.0,
    read_weights: Tensor | None = None,
    norm_share: Tensor | None = None,
    dweights: Tensor | None = None,
    packing: Packing | None = None,
) -> CoefficientGradients:
    """Fill the given results and return the rest, on the device of like; phi is packed on the way if asked.

    weights: a tensor [T, N], or what WEIGHTS may be; dz: where it goes, packed if it holds bfloat16.
    """
    alone = isinstance(weights, str) and weights == "none"
    math = with_long_segments(math) if alone else math
    residual = residual_launch(math.streams)
    words = y is not None and rows_are_loaded_in_words(y)
    aligned = y is None or rows_are_aligned(y)
    launch = (
        residual
        if alone
        else read_bwd_launch(
            math.streams, channels, aligned=aligned, words=words, element_size=4 if y is None else y.element_size()
        )
    )
    more = math.rows - math.streams
    separate = not alone and more > 0
    residual_programs = cdiv(tokens, residual.block_t) if separate else 0
    programs = cdiv(tokens, launch.block_t)
    k = k_more = sums = None
    if math.rows:
        k = empty(like, tokens, dtype=FLOAT) if math.dynamic else None
        k_more = empty(like, tokens, dtype=FLOAT) if math.dynamic and separate else None
        sums = LogitSums(
            empty(like, programs, 2, math.streams, dtype=FLOAT),
            empty(like, residual_programs or programs, 2, more, dtype=FLOAT) if more > 0 else None,
        )
    given = isinstance(weights, Tensor)
    phi, phi_weight, phi_parts, layout = packing or (None, None, None, NOT_PACKED)
    pack_programs = 0 if phi_parts is None else phi_parts.shape[0]
    run(
        read_bwd_kernel, (residual_programs + programs + pack_programs,),
        y, dx_in, *dmix, z, mean_square, scale, bias, weights if given else None, norm_weight, u,
        dz, k, k_more, read_weights, norm_share, dweights, *(sums or (None, None)), phi, phi_weight, phi_parts,
        tokens, channels, k_factor, residual_programs, pack_programs,
        MATH=math, WEIGHTS="given" if given else weights, SEPARATE=separate, RESIDUAL_T=residual.block_t,
        EVERY=residual_programs_every(math.streams, channels, launch, words=words),
        PACKED=layout.rows, DENSE=layout.dense, PADDED_ROWS=layout.padded(math.rows),
        PACKED_CHANNELS=layout.channels_per_thread, PHI_BLOCK=layout.block, PHI_STEP=layout.step,
        PHI_TOGETHER=layout.together, WORDS=words,
        FOLD=8 if y is not None and threads_hold_neighbours(y, launch) else 1, **launch.meta(),
    )  # fmt: skip
    return CoefficientGradients(k, k_more, sums)
