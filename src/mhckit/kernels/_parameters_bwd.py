"""P: gradients of parameters, which are sums over tokens.

    V[p,k] = sum_t dz[t,p] y[t,k]          dphi = V w      dw[k] = sum_p phi[p,k] V[p,k]       (w folded into phi)
    dn[c]  = sum_t e[t,c] u[t] a[t,c]                                                          (n the norm of x_in)
    dbias  = sum_t D        dscale[group] = sum_t sum_{p in group} D z r        db = sum_t df

Tokens are summed in chunks of fixed length into slots of their own, and the slots in order: no atomics, and the same
bits in every run. One pass over y, and over e if the norm's weight is wanted: 8C to 10C bytes per token for 4 streams
of 2-byte activations.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mhckit.ops._register import empty

from ._device import channels_exist, collapse, dot_activation, load_float, load_per_token, store_as
from ._launch import FLOAT, PRECISION, TOKEN_CHUNK, parameters_bwd_launch, rows_per_block, tokens_of
from ._math import Math


@triton.jit(do_not_specialize=["T"])
def chunk_sums_kernel(
    y,
    dz,
    dx_in,
    read_weights,
    phi_sums,
    norm_sums,
    T,
    C: tl.constexpr,
    P,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    here = channels_exist(c, C, BLOCK_C)
    chunk = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if phi_sums is not None:
        V = ()
        for _ in tl.static_range(N):
            V = V + (tl.zeros((BLOCK_C, ROWS), tl.float32),)
    if norm_sums is not None:
        norm_sum = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for start in tl.range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, T), BLOCK_T, num_stages=STAGES):
        t = start + tl.arange(0, BLOCK_T)
        live = t < T
        tile = live[:, None] & here[None, :]
        at = t[:, None] * (N * C) + c[None, :]
        if phi_sums is not None:
            dz_tile = load_float(dz, t[:, None] * P + rows[None, :], live[:, None] & (rows < P)[None, :])
        next_V = ()
        streams = ()
        for i in tl.static_range(N):
            stream = tl.load(y + at + i * C, mask=tile, other=0.0)
            if phi_sums is not None:
                next_V = next_V + (dot_activation(tl.trans(stream), dz_tile, V[i], PRECISION),)
            if norm_sums is not None:
                streams = streams + (stream.to(tl.float32),)
        if phi_sums is not None:
            V = next_V
        if norm_sums is not None:
            normed = collapse(load_per_token(read_weights, t, live, N), streams, N)
            e = load_float(dx_in, t[:, None] * C + c[None, :], tile)
            norm_sum += e * normed
    if phi_sums is not None:
        inside = here[:, None] & (rows < P)[None, :]
        for i in tl.static_range(N):
            k = (chunk * P + rows[None, :]) * (N * C) + i * C + c[:, None]
            store_as(phi_sums, k, V[i], inside)
    if norm_sums is not None:
        store_as(norm_sums, chunk * C + c, tl.sum(norm_sum, 0), here & (tl.program_id(2) == 0))


@triton.jit(do_not_specialize=["count"])
def phi_kernel(sums, phi, norm_weight, dphi, dnorm_weight, count, K, P, BLOCK_K: tl.constexpr):
    """dphi and dw of a block of columns from the slots of V [count, P, K]."""
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    here = k < K
    if norm_weight is not None:
        weight = load_float(norm_weight, k, here)
        dweight = tl.zeros((BLOCK_K,), tl.float32)
    for p in range(P):
        V = tl.zeros((BLOCK_K,), tl.float32)
        for slot in range(count):
            V += load_float(sums, (tl.cast(slot, tl.int64) * P + p) * K + k, here)
        if norm_weight is None:
            store_as(dphi, tl.cast(p, tl.int64) * K + k, V, here)
        else:
            store_as(dphi, tl.cast(p, tl.int64) * K + k, V * weight, here)
            dweight += V * load_float(phi, tl.cast(p, tl.int64) * K + k, here)
    if norm_weight is not None:
        store_as(dnorm_weight, k, dweight, here)


@triton.jit
def _sum_rows(sums, count, columns, width, here, BLOCK: tl.constexpr):
    """Sum over the rows of [count, width] for these columns, BLOCK rows at a time."""
    total = tl.zeros((BLOCK, columns.shape[0]), tl.float32)
    for start in range(0, count, BLOCK):
        row = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        total += load_float(sums, row[:, None] * width + columns[None, :], (row < count)[:, None] & here[None, :])
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["count"])
def sum_rows_kernel(sums, result, count, width, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    here = columns < width
    store_as(result, columns, _sum_rows(sums, count, columns, width, here, BLOCK_ROWS), here)


@triton.jit(do_not_specialize=["count"])
def scale_and_bias_kernel(
    sums, dscale, dbias, count, MATH: tl.constexpr, PADDED_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """From sums of D and of D z r per program of `_read_bwd` [count, 2, P]."""
    P: tl.constexpr = MATH.rows
    p = tl.arange(0, PADDED_ROWS)
    store_as(dbias, p, _sum_rows(sums, count, p, 2 * P, p < P, BLOCK_ROWS), p < P)
    if dscale is not None:
        inner = _sum_rows(sums + P, count, p, 2 * P, p < P, BLOCK_ROWS)
        N: tl.constexpr = MATH.streams
        store_as(dscale, 0, tl.sum(tl.where(p < N, inner, 0.0), 0), True)
        if MATH.post != "none":
            store_as(dscale, 1, tl.sum(tl.where((p >= N) & (p < 2 * N), inner, 0.0), 0), True)
        if MATH.logits > 0:
            store_as(dscale, 2, tl.sum(tl.where(p >= 2 * N, inner, 0.0), 0), True)


def phi_gradients(
    y: Tensor,
    dz: Tensor | None,
    phi: Tensor | None,
    norm_weight: Tensor | None,
    *,
    out_norm: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dphi and dnorm_weight (if dz is given), and the gradient of the norm of x_in.

    out_norm: the weight of that norm, dL/dx_in and the read weights times u, where its gradient is wanted.
    """
    T, N, C = tokens_of(y)
    chunks, P = triton.cdiv(T, TOKEN_CHUNK), 0 if dz is None else phi.shape[0]
    rows = min(rows_per_block(P), 64)
    phi_sums = None if dz is None else empty(y, chunks, P, N * C, dtype=FLOAT)
    norm_sums = None if out_norm is None else empty(y, chunks, C, dtype=FLOAT)
    launch = parameters_bwd_launch(N, C, rows)
    grid = (triton.cdiv(C, launch.block_c), chunks, max(triton.cdiv(P, rows), 1))
    chunk_sums_kernel[grid](
        y, dz, *((None, None) if out_norm is None else out_norm[1:]), phi_sums, norm_sums, T, C, P,
        N=N, CHUNK=TOKEN_CHUNK, ROWS=rows, PRECISION=PRECISION, **launch.meta(),
    )  # fmt: skip
    dout_norm_weight = None if out_norm is None else sum_rows(norm_sums, like=out_norm[0])
    if dz is None:
        return None, None, dout_norm_weight
    dphi = empty(phi, *phi.shape)
    dnorm_weight = None if norm_weight is None else empty(norm_weight, N * C)
    phi_kernel[(triton.cdiv(N * C, 256),)](
        phi_sums, phi, norm_weight, dphi, dnorm_weight, chunks, N * C, P, BLOCK_K=256
    )
    return dphi, dnorm_weight, dout_norm_weight


def sum_rows(sums: Tensor, like: Tensor) -> Tensor:
    """The sum over the rows of [count, W], as a gradient of `like` [W]."""
    count, width = sums.shape
    result = empty(like, width)
    sum_rows_kernel[(triton.cdiv(width, 64),)](sums, result, count, width, BLOCK_ROWS=64, BLOCK_COLUMNS=64)
    return result


def scale_and_bias(sums: Tensor, scale: Tensor | None, bias: Tensor, math: Math) -> tuple[Tensor | None, Tensor]:
    """dscale and dbias from what `_read_bwd` summed."""
    dscale, dbias = None if scale is None else empty(scale, *scale.shape), empty(bias, *bias.shape)
    padded = triton.next_power_of_2(math.rows)
    scale_and_bias_kernel[(1,)](
        sums, dscale, dbias, sums.shape[0], MATH=math, PADDED_ROWS=padded, BLOCK_ROWS=max(1, 4096 // padded)
    )
    return dscale, dbias
