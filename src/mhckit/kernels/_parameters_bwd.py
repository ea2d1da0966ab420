"""P: gradients of parameters, which are sums over tokens.

    V[p,k] = sum_t dz[t,p] y[t,k]          dphi = V w      dw[k] = sum_p phi[p,k] V[p,k]       (w folded into phi)
    dn[c]  = sum_t e[t,c] u[t] a[t,c]                                                          (n the norm of x_in)
    dbias  = sum_t D        dscale[group] = sum_t sum_{p in group} D z r        db = sum_t df

Tokens are summed in chunks into slots of their own, and the slots in order by one last small kernel: no atomics, and
the same bits in every run. One pass over y, and over e if the norm's weight is wanted: 8C to 10C bytes per
token for 4 streams of 2-byte activations.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mhckit.ops._register import empty

from ._device import channels_exist, end_dots, load_float, part_column, rounded_product, store_as, sum_parts
from ._gradients import WriteGradients
from ._launch import (
    BFLOAT,
    FLOAT,
    PRECISION,
    ROWS,
    cdiv,
    dots_are_asynchronous,
    equally_late,
    loads_are_wide,
    parameters_bwd_launch,
    power_of_2,
    row_blocks,
    steps_added_together,
    streams_collapsed_together,
    token_chunks,
    tokens_of,
)
from ._launcher import run
from ._math import Math
from ._read_bwd import LogitSums

# Programs that share the sums over logits: two for each of pre, post and the residual map.
LOGIT_PARTS = 6
# What one program of the last kernel adds up: columns of phi, or tokens whose sums over channels J left in slices.
FINISH_COLUMNS, FINISH_TOKENS = 64, 32
# Values that a program of the last kernel loads before it adds them.
SUMMED_AT_ONCE = tl.constexpr(8192)


@triton.jit(do_not_specialize=["T"])
def chunk_sums_kernel(
    y,
    dz_parts,
    dx_in,
    read_weights,
    phi_sums,
    norm_sums,
    T,
    C: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    STREAMS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
    EVERY: tl.constexpr,
    ALIGNS: tl.constexpr,
    ASYNCHRONOUS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums over a chunk of tokens for a tile of channels: V of STREAMS streams, and their share of dn.

    Chunks take tiles of tokens in turn, so that all of them begin with tokens that B has just read. A chunk has every
    EVERY-th token, and EVERY of them have the same tiles. ALIGNS: rows begin anywhere, those of a chunk's tokens
    equally far behind 16-byte boundaries, at which tiles begin. What lies between has sums that are not stored.

    Tensor cores cut off what they add to a sum, the more the longer it is: after TOGETHER steps, if any, V is added to
    a total, and begins again.
    """
    IN_PARTS: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    stream = tl.program_id(1) * STREAMS
    chunk = tl.program_id(2).to(tl.int64)
    turn = chunk % EVERY
    first, stride = chunk // EVERY * BLOCK_T, tl.num_programs(2) // EVERY * BLOCK_T
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin = turn * (N * C) + stream * C
    if ALIGNS:
        late = begin % 8
        begin = begin // 8 * 8
        c = column - late
        here = (c >= 0) & (c < C)
        loaded = column // 8 * 8 < C + late
    else:
        c = column
        here = channels_exist(c, C, BLOCK_C)
        loaded = here
    V = ()
    total = ()
    for _ in tl.static_range(STREAMS * ROW_BLOCKS):
        V = V + (tl.zeros((2 * ROWS if IN_PARTS else ROWS, BLOCK_C), tl.float32),)
        total = total + (tl.zeros((ROWS, BLOCK_C), tl.float32),)
    if norm_sums is not None:
        norm_sum = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    steps = tl.cdiv(tl.cdiv(T - turn, EVERY) - first, stride)
    for step in tl.range(0, steps, num_stages=STAGES):
        # The last tokens first: B has just read them, and the L2 cache has the latest of them still.
        row = first + (steps - 1 - step) * stride + tl.arange(0, BLOCK_T)
        t = row * EVERY + turn
        live = t < T
        tiles = ()
        for i in tl.static_range(STREAMS):
            offsets = row[:, None] * (EVERY * N * C) + begin + i * C + column[None, :]
            tiles = tiles + (tl.load(y + offsets, mask=live[:, None] & loaded[None, :], other=0.0),)
        if phi_sums is not None:
            V = _add_products(V, dz_parts, tiles, t, live, P, ROWS, ROW_BLOCKS, PRECISION)
            if TOGETHER > 0:
                if (step + 1) % TOGETHER == 0:
                    total, V = _add_to(total, V)
        if norm_sums is not None:
            collapsed = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
            for i in tl.static_range(STREAMS):
                weight = load_float(read_weights, t * N + stream + i, live)[:, None]
                collapsed += weight * tiles[i].to(tl.float32)
            e = load_float(dx_in, t[:, None] * C + c[None, :], live[:, None] & here[None, :])
            norm_sum += e * collapsed
            end_dots(ASYNCHRONOUS)
    total, V = _add_to(total, V)
    for i in tl.static_range(STREAMS):
        for block in tl.static_range(ROW_BLOCKS):
            rows = block * ROWS + tl.arange(0, ROWS)
            k = (chunk * P + rows[:, None]) * (N * C) + (stream + i) * C + c[None, :]
            store_as(phi_sums, k, total[i * ROW_BLOCKS + block], (rows < P)[:, None] & here[None, :])
    if norm_sums is not None:
        slot = chunk * (N // STREAMS) + stream // STREAMS
        store_as(norm_sums, slot * C + c, tl.sum(norm_sum, 0), here)


@triton.jit
def _add_to(total, V):
    """total + V, whose parts are added up if it has any, and nothing in place of V."""
    sums = ()
    zeros = ()
    for i in tl.static_range(len(V)):
        sums = sums + (total[i] + (sum_parts(V[i]) if V[i].shape[0] > total[i].shape[0] else V[i]),)
        zeros = zeros + (tl.zeros_like(V[i]),)
    return sums, zeros


@triton.jit
def _add_products(
    V, dz_parts, tiles, t, live, P: tl.constexpr, ROWS: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """V + dz^T y for each of the tiles of y and each block of rows, of which ROW_BLOCKS are one tile's.

    The parts of dz are added up beside anything but bfloat16.
    """
    stride = 2 * ROWS * ROW_BLOCKS
    IN_PARTS: tl.constexpr = tiles[0].dtype == tl.bfloat16
    dz = ()
    for block in tl.static_range(ROW_BLOCKS):
        if IN_PARTS:
            r = tl.arange(0, 2 * ROWS)
            p = block * ROWS + r // 16 * 8 + r % 8
            offsets = t[:, None] * stride + block * 2 * ROWS + r[None, :]
            dz = dz + (tl.load(dz_parts + offsets, mask=live[:, None] & (p < P)[None, :], other=0.0),)
        else:
            p = block * ROWS + tl.arange(0, ROWS)
            mask = live[:, None] & (p < P)[None, :]
            high = load_float(dz_parts, t[:, None] * stride + part_column(p, 0)[None, :], mask)
            low = load_float(dz_parts, t[:, None] * stride + part_column(p, 1)[None, :], mask)
            dz = dz + (high + low,)
    sums = ()
    for i in tl.static_range(len(tiles)):
        for block in tl.static_range(ROW_BLOCKS):
            total = V[i * ROW_BLOCKS + block]
            if IN_PARTS:
                total = tl.dot(tl.trans(dz[block]), tiles[i], total)
            else:
                total = tl.dot(tl.trans(dz[block]), tiles[i].to(tl.float32), total, input_precision=PRECISION)
            sums = sums + (total,)
    return sums


COUNTS = ["chunks", "df_count", "pre_count", "more_count", "norm_count", "phi_columns", "column_programs"]


@triton.jit(do_not_specialize=["T", *COUNTS])
def finish_kernel(
    phi_sums,
    phi,
    norm_weight,
    dphi,
    dnorm_weight,
    norm_sums,
    dout_norm_weight,
    df_sums,
    df_bias,
    pre_sums,
    more_sums,
    dscale,
    dbias,
    write_sums,
    dpost,
    dres,
    dread_weights,
    T,
    chunks,
    df_count,
    pre_count,
    more_count,
    norm_count,
    phi_columns,
    column_programs,
    C: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    MATH: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Add up the slots: `column_programs` programs take a block of channels each, of every sum over tokens (of V none
    where `phi_columns` is 0: it is finished); then some a block of tokens each, whose sums over channels J left in
    slices; the last LOGIT_PARTS the logits.
    """
    at = tl.program_id(0) * BLOCK_K
    if phi_sums is not None:
        if at < phi_columns:
            _finish_phi(phi_sums, phi, norm_weight, dphi, dnorm_weight, chunks, at, K, P, PADDED_ROWS, BLOCK_K)
    if norm_sums is not None:
        if at < C:
            c = at + tl.arange(0, BLOCK_K)
            total = _sum_rows(norm_sums, norm_count, c, C, c < C)
            store_as(dout_norm_weight, c, total, c < C)
    if df_sums is not None:
        if at < C:
            c = at + tl.arange(0, BLOCK_K)
            store_as(df_bias, c, _sum_rows(df_sums, df_count, c, C, c < C), c < C)
    if write_sums is not None:
        if tl.program_id(0) >= column_programs:
            first = (tl.program_id(0) - column_programs).to(tl.int64) * BLOCK_T
            _finish_write(write_sums, dpost, dres, dread_weights, first, T, MATH.streams, SLICES, BLOCK_T)
    if dbias is not None:
        part = tl.num_programs(0) - 1 - tl.program_id(0)
        _finish_logits(part, pre_sums, more_sums, dscale, dbias, pre_count, more_count, MATH)


@triton.jit
def _finish_phi(
    phi_sums, phi, norm_weight, dphi, dnorm_weight, chunks, at, K: tl.constexpr, P: tl.constexpr,
    PADDED_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dphi and dw of a block of columns from the slots of V [chunks, P, K]."""
    k, p = at + tl.arange(0, BLOCK_K), tl.arange(0, PADDED_ROWS)
    offsets = p[:, None] * K + k[None, :]
    mask = (p < P)[:, None] & (k < K)[None, :]
    V = tl.zeros((PADDED_ROWS, BLOCK_K), tl.float32)
    for chunk in tl.range(0, chunks, num_stages=4 if PADDED_ROWS <= 64 else 1):
        V += load_float(phi_sums + tl.cast(chunk, tl.int64) * P * K, offsets, mask)
    if norm_weight is None:
        store_as(dphi, offsets, V, mask)
    else:
        store_as(dphi, offsets, V * load_float(norm_weight, k, k < K)[None, :], mask)
        products = rounded_product(V, load_float(phi, offsets, mask))
        store_as(dnorm_weight, k, tl.sum(products, 0), k < K)


@triton.jit
def _finish_write(
    write_sums, dpost, dres, dread_weights, first, T, N: tl.constexpr, SLICES: tl.constexpr, BLOCK_T: tl.constexpr
):
    """dpost [T, N], dres [T, N, N] and dread_weights [T, N], those that there are, from slices of them in a row."""
    t = first + tl.arange(0, BLOCK_T)
    MIXED: tl.constexpr = 0 if dres is None else N * N
    PER_TOKEN: tl.constexpr = N + MIXED + (0 if dread_weights is None else N)
    _finish_numbers(write_sums, dpost, t, T, N, PER_TOKEN, SLICES, BLOCK_T)
    if dres is not None:
        _finish_numbers(write_sums + N, dres, t, T, MIXED, PER_TOKEN, SLICES, BLOCK_T)
    if dread_weights is not None:
        _finish_numbers(write_sums + N + MIXED, dread_weights, t, T, N, PER_TOKEN, SLICES, BLOCK_T)


@triton.jit
def _finish_numbers(
    sums, result, t, T, COUNT: tl.constexpr, PER_TOKEN: tl.constexpr, SLICES: tl.constexpr, BLOCK_T: tl.constexpr
):
    """result [T, COUNT]"""
    for block in tl.static_range(0, COUNT, BLOCK_T):
        k = block + tl.arange(0, BLOCK_T)
        mask = (t < T)[:, None] & (k < COUNT)[None, :]
        total = _sum_slices(sums, t, k, mask, T, PER_TOKEN, SLICES)
        store_as(result, t[:, None] * COUNT + k[None, :], total, mask)


@triton.jit
def _sum_slices(sums, t, k, mask, T, PER_TOKEN: tl.constexpr, SLICES: tl.constexpr):
    total = load_float(sums, t[:, None] * PER_TOKEN + k[None, :], mask)
    for part in tl.static_range(1, SLICES):
        total += load_float(sums, (tl.cast(part, tl.int64) * T + t)[:, None] * PER_TOKEN + k[None, :], mask)
    return total


@triton.jit
def _finish_logits(part, pre_sums, more_sums, dscale, dbias, pre_count, more_count, MATH: tl.constexpr):
    """dbias and dscale from the sums of D and of D z r per program of `_read_bwd`; LOGIT_PARTS programs share them."""
    N: tl.constexpr = MATH.streams
    MORE: tl.constexpr = MATH.rows - N
    _finish_group(part, 0, pre_sums, pre_count, N, dscale, dbias, N, MATH.padded_streams, MATH)
    if MORE > 0:
        _finish_group(part, 1, more_sums, more_count, MORE, dscale, dbias, N, MATH.padded_streams, MATH)
    if MATH.logits > 0:
        _finish_group(part, 2, more_sums + N, more_count, MORE, dscale, dbias, MATH.logits, MATH.padded_logits, MATH)


@triton.jit
def _finish_group(
    part, GROUP: tl.constexpr, sums, count, WIDTH: tl.constexpr, dscale, dbias, ROWS: tl.constexpr,
    PADDED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """A group's rows of sums [count, 2, WIDTH]: one program adds up those of D, one those of D z r."""
    row = tl.arange(0, PADDED)
    here = row < ROWS
    if part == 2 * GROUP:
        store_as(dbias, GROUP * MATH.streams + row, _sum_rows(sums, count, row, 2 * WIDTH, here), here)
    if MATH.dynamic:
        if part == 2 * GROUP + 1:
            store_as(dscale, GROUP, tl.sum(_sum_rows(sums + WIDTH, count, row, 2 * WIDTH, here), 0), True)


@triton.jit
def _sum_rows(sums, count, columns, width, here):
    """Sum over the rows of [count, width] for these columns, as many at a time as registers hold: few waits."""
    BLOCK_ROWS: tl.constexpr = SUMMED_AT_ONCE // columns.shape[0]
    total = tl.zeros((BLOCK_ROWS, columns.shape[0]), tl.float32)
    for start in range(0, count, BLOCK_ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_ROWS)
        total += load_float(sums, row[:, None] * width + columns[None, :], (row < count)[:, None] & here[None, :])
    return tl.sum(total, 0)


class PhiSums(NamedTuple):
    """Slots of V [chunks, P, N*C] and of dn [slots, C]; or dphi itself: one chunk, no w and nothing to round."""

    phi: Tensor | None = None
    norm: Tensor | None = None
    dphi: Tensor | None = None


def chunk_sums(
    y: Tensor,
    *,
    dz_parts: Tensor | None = None,
    phi: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm: tuple[Tensor, Tensor] | None = None,
) -> PhiSums:
    """dz_parts: where dphi is wanted. norm: dL/dx_in and the read weights times u, where dn is wanted."""
    T, N, C = tokens_of(y)
    rows = 0 if dz_parts is None else phi.shape[0]
    streams = 1 if norm is None else streams_collapsed_together(N, rows)
    every = equally_late(y) or 1
    aligns = streams == 1 and equally_late(y) is not None
    asynchronous = dots_are_asynchronous(y.device)
    launch = parameters_bwd_launch(
        rows, streams, C, wide=loads_are_wide(y), asynchronous=asynchronous and y.dtype == BFLOAT,
        sums_norm=norm is not None,
    )  # fmt: skip
    together = steps_added_together(rows, launch, sums_norm=norm is not None)
    chunks = cdiv(token_chunks(T, rows, N * C, launch, y.device, sums_are_short=together > 0), every) * every
    slots = dphi = None
    if rows and chunks == 1 and norm_weight is None and phi.dtype == FLOAT:
        dphi = empty(phi, *phi.shape)
    elif rows:
        slots = empty(y, chunks, rows, N * C, dtype=FLOAT)
    norm_slots = None if norm is None else empty(y, chunks * (N // streams), C, dtype=FLOAT)
    run(
        chunk_sums_kernel, (cdiv(C + 7 * aligns, launch.block_c), N // streams, chunks),
        y, dz_parts, *(norm or (None, None)), slots if dphi is None else dphi, norm_slots, T, C, rows,
        N=N, STREAMS=streams, ROWS=ROWS, ROW_BLOCKS=row_blocks(rows), PRECISION=PRECISION,
        EVERY=every, ALIGNS=aligns, ASYNCHRONOUS=asynchronous, TOGETHER=together, **launch.meta(),
    )  # fmt: skip
    return PhiSums(slots, norm_slots, dphi)


class Finished(NamedTuple):
    """Gradients of parameters, None where they were not asked for."""

    phi: Tensor | None
    scale: Tensor | None
    bias: Tensor | None
    norm_weight: Tensor | None
    out_norm_weight: Tensor | None
    f_bias: Tensor | None


def finish(
    sums: PhiSums,
    logit_sums: LogitSums | None,
    written: WriteGradients | None,
    *,
    streams: int,
    channels: int,
    math: Math | None = None,
    phi: Tensor | None = None,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    out_norm_weight: Tensor | None = None,
    f_bias: Tensor | None = None,
) -> Finished:
    """The gradients of the given parameters whose sums are given; and `written`, if J left slices of it, is filled."""
    K, adds_up_phi = streams * channels, sums.phi is not None
    df_sums = None if written is None else written.df_sums
    write_sums = None if written is None else written.sums
    done = Finished(
        empty(phi, *phi.shape) if adds_up_phi else sums.dphi,
        None if logit_sums is None or scale is None else empty(scale, *scale.shape),
        None if logit_sums is None else empty(bias, *bias.shape),
        empty(norm_weight, K) if adds_up_phi and norm_weight is not None else None,
        None if sums.norm is None else empty(out_norm_weight, channels),
        None if df_sums is None else empty(f_bias, channels),
    )
    rows = 0 if phi is None else phi.shape[0]
    pre, more = logit_sums or (None, None)
    slices, tokens = (0, 0) if write_sums is None else write_sums.shape[:2]
    phi_columns = K if adds_up_phi else 0
    column_programs = cdiv(phi_columns or (0 if sums.norm is None and df_sums is None else channels), FINISH_COLUMNS)
    write_programs = cdiv(tokens, FINISH_TOKENS)
    run(
        finish_kernel, (column_programs + write_programs + (LOGIT_PARTS if logit_sums else 0),),
        sums.phi if adds_up_phi else sums.dphi, phi, norm_weight, done.phi, done.norm_weight,
        sums.norm, done.out_norm_weight, df_sums, done.f_bias, pre, more, done.scale, done.bias, write_sums,
        *((None,) * 3 if write_sums is None else (written.dpost, written.dres, written.dread_weights)), tokens,
        *(0 if slots is None else slots.shape[0] for slots in (sums.phi, df_sums, pre, more, sums.norm)),
        phi_columns, column_programs,
        C=channels, K=K, P=rows, MATH=math, PADDED_ROWS=power_of_2(max(rows, 1)), SLICES=slices,
        BLOCK_K=FINISH_COLUMNS, BLOCK_T=FINISH_TOKENS, num_warps=4,
    )  # fmt: skip
    return done
