"""J: the gradient of the streams from all of their uses, and through the write-back, in one pass.

    G[t,o,c] = g[t,o,c] + w[t,o] d[t,c] + sum_p dz[t,p] phi[p,oC+c] + k[t] y[t,o,c]
    d = e,  or with a norm weight n:  d = n e - b sum_i w_i y_i
    without a write-back:  dx = G
    with one:  dx[t,i,c] = sum_o H[t,o,i] G[t,o,c]     df[t,c] = sum_o post[t,o] G[t,o,c]
               dH[t,o,i] = sum_c G[t,o,c] x[t,i,c]     dpost[t,o] = sum_c G[t,o,c] (f[t,c] + b[c])
               y recomputed from x and f, rounded as in forward

Every part of G is optional. dz, k, w (times u, with a norm) and b come from `_read_bwd`. G itself is never stored.
Reads g, d, x and f, writes dx and df: 30C bytes per token for 4 streams of 2-byte activations.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mhckit.ops._register import empty

from ._device import (
    bfloat16_parts,
    channels_exist,
    collapse,
    fold,
    folded_zeros,
    load_float,
    load_per_token,
    load_streams,
    store_as,
    tokens_of_program,
    unfold_sum,
    write_stream,
)
from ._launch import FLOAT, PRECISION, Launch, rows_per_block, streams_bwd_launch, tokens_of


@triton.jit(do_not_specialize=["T"])
def streams_bwd_kernel(
    g,
    dx_in,
    read_weights,
    norm_weight,
    norm_share,
    dz,
    k_share,
    phi,
    phi_weight,
    x,
    f,
    f_bias,
    post,
    res,
    dx,
    df,
    df_bias,
    dpost,
    dres,
    T,
    C: tl.constexpr,
    P,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    MMA_WARPS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    t, live = tokens_of_program(T, BLOCK_T)
    if dx_in is not None:
        weights = load_per_token(read_weights, t, live, N)
        if norm_weight is not None:
            share = load_float(norm_share, t, live)[:, None]
    if phi is not None:
        k = load_float(k_share, t, live)[:, None]
        dz_blocks = _load_dz(dz, t, live, P, ROW_BLOCKS, ROWS, dx.dtype.element_ty == tl.bfloat16)
    if f is not None:
        post_columns = load_per_token(post, t, live, N)
        res_columns = () if res is None else load_per_token(res, t, live, N * N)
        sums = ()
        for _ in tl.static_range(N if res is None else N * (N + 1)):
            sums = sums + (folded_zeros(BLOCK_T, BLOCK_C, MMA_WARPS),)
    if WIDTH == 0:
        begin, end = 0, C
    else:
        begin = tl.program_id(1) * WIDTH
        end = tl.minimum(begin + WIDTH, C)
    for start in tl.range(begin, end, BLOCK_C, num_stages=STAGES):
        c = start + tl.arange(0, BLOCK_C)
        here = channels_exist(c, C, BLOCK_C)
        tile = live[:, None] & here[None, :]
        at = t[:, None] * (N * C) + c[None, :]
        if x is not None:
            streams = load_streams(x, at, tile, C, N)
        if f is not None:
            f_tile = load_float(f, t[:, None] * C + c[None, :], tile)
            if f_bias is not None:
                f_tile += load_float(f_bias, c, here)[None, :]
        if phi is not None or norm_weight is not None:
            y = streams if f is None else _rounded_writes(streams, f_tile, post_columns, res_columns, x, N)
        if dx_in is not None:
            d = load_float(dx_in, t[:, None] * C + c[None, :], tile)
            if norm_weight is not None:
                d = load_float(norm_weight, c, here)[None, :] * d - share * collapse(weights, y, N)
        next_sums = ()
        dx_tiles = ()
        if f is not None:
            df_tile = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for o in tl.static_range(N):
            G = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
            if phi is not None:
                G = _dot_phi(dz_blocks, phi, phi_weight, o * C + c, here, N * C, P, ROW_BLOCKS, ROWS, G, PRECISION)
                G += k * y[o]
            if g is not None:
                G += load_float(g, at + o * C, tile)
            if dx_in is not None:
                G += weights[o] * d
            if f is None:
                store_as(dx, at + o * C, G, tile)
            else:
                df_tile += post_columns[o] * G
                next_sums = next_sums + (sums[len(next_sums)] + fold(G, f_tile, BLOCK_T, BLOCK_C, MMA_WARPS),)
                if res is None:
                    store_as(dx, at + o * C, G, tile)
                else:
                    for i in tl.static_range(N):
                        next_sums = next_sums + (
                            sums[len(next_sums)] + fold(G, streams[i], BLOCK_T, BLOCK_C, MMA_WARPS),
                        )
                    dx_tiles = _add_mixed(dx_tiles, G, res_columns, o, N)
        if f is not None:
            sums = next_sums
            store_as(df, t[:, None] * C + c[None, :], df_tile, tile)
            if df_bias is not None:
                store_as(df_bias, tl.program_id(0).to(tl.int64) * C + c, tl.sum(tl.where(tile, df_tile, 0.0), 0), here)
            if res is not None:
                for i in tl.static_range(N):
                    store_as(dx, at + i * C, dx_tiles[i], tile)
    if f is not None:
        STEP: tl.constexpr = 1 if res is None else N + 1
        for o in tl.static_range(N):
            store_as(dpost, t * N + o, unfold_sum(sums[o * STEP], MMA_WARPS), live)
            if res is not None:
                for i in tl.static_range(N):
                    store_as(dres, (t * N + o) * N + i, unfold_sum(sums[o * STEP + 1 + i], MMA_WARPS), live)


@triton.jit
def _load_dz(dz, t, live, P, ROW_BLOCKS: tl.constexpr, ROWS: tl.constexpr, IN_PARTS: tl.constexpr):
    """dz in blocks of rows, each in parts beside bfloat16 activations: products of parts take fewer registers."""
    blocks = ()
    for block in tl.static_range(ROW_BLOCKS):
        p = block * ROWS + tl.arange(0, ROWS)
        rows = load_float(dz, t[:, None] * P + p[None, :], live[:, None] & (p < P)[None, :])
        blocks = blocks + ((bfloat16_parts(rows) if IN_PARTS else (rows,)),)
    return blocks


@triton.jit
def _dot_phi(
    dz_blocks, phi, phi_weight, k, here, K, P, ROW_BLOCKS: tl.constexpr, ROWS: tl.constexpr, G, PRECISION: tl.constexpr
):
    """G + dz phi for the columns k of phi."""
    for block in tl.static_range(ROW_BLOCKS):
        p = block * ROWS + tl.arange(0, ROWS)
        rows = load_float(phi, p[:, None].to(tl.int64) * K + k[None, :], (p < P)[:, None] & here[None, :])
        if phi_weight is not None:
            rows *= load_float(phi_weight, k, here)[None, :]
        if len(dz_blocks[block]) == 1:
            G = tl.dot(dz_blocks[block][0], rows, G, input_precision=PRECISION)
        else:
            parts = bfloat16_parts(rows)
            for i in tl.static_range(3):
                for j in tl.static_range(3 - i):
                    G = tl.dot(dz_blocks[block][i], parts[j], G)
    return G


@triton.jit
def _rounded_writes(streams, f, post, res, x, N: tl.constexpr):
    """y as forward stored it, up to how the compiler fuses products and sums."""
    tiles = ()
    for o in tl.static_range(N):
        tiles = tiles + (write_stream(o, streams, f, post, res, N).to(x.dtype.element_ty).to(tl.float32),)
    return tiles


@triton.jit
def _add_mixed(tiles, G, res, o: tl.constexpr, N: tl.constexpr):
    """tiles_i + H[o,i] G"""
    added = ()
    for i in tl.static_range(N):
        added = added + (res[o * N + i] * G if o == 0 else tiles[i] + res[o * N + i] * G,)
    return added


class CollapseGradient(NamedTuple):
    """The part of G that comes through x_in: e, the read weights, and with a norm its weight and b."""

    dx_in: Tensor | None = None
    read_weights: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_share: Tensor | None = None


class ProjectionGradient(NamedTuple):
    """The part of G that comes through the coefficients: dz, k, phi and the weight over its columns."""

    dz: Tensor | None = None
    k: Tensor | None = None
    phi: Tensor | None = None
    norm_weight: Tensor | None = None


class Write(NamedTuple):
    """A write-back to differentiate."""

    f: Tensor
    f_bias: Tensor | None
    post: Tensor
    res: Tensor | None


def read_streams_bwd(x: Tensor, g: Tensor | None, collapse: CollapseGradient, projection: ProjectionGradient) -> Tensor:
    """dx = G"""
    dx = empty(x, *x.shape)
    y = x if projection.phi is not None or collapse.norm_weight is not None else None
    launch = streams_bwd_launch(x.shape[-2], x.shape[-1], dots=projection.phi is not None)
    _launch(x, g, collapse, projection, (y, None, None, None, None), (dx, None, None, None, None), launch)
    return dx


def write_streams_bwd(
    x: Tensor, g: Tensor | None, collapse: CollapseGradient, projection: ProjectionGradient, write: Write
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """dx, df, partial sums of df over tokens if there is a bias, dpost, dres."""
    f, f_bias, post, res = write
    T, N, C = tokens_of(x)
    launch = streams_bwd_launch(N, C, dots=projection.phi is not None, sums_df=f_bias is not None)
    gradients = (
        empty(x, *x.shape),
        empty(f, *f.shape),
        None if f_bias is None else empty(f, triton.cdiv(T, launch.block_t), C, dtype=FLOAT),
        empty(post, *post.shape),
        None if res is None else empty(res, *res.shape),
    )
    _launch(x, g, collapse, projection, (x, *write), gradients, launch)
    return gradients


def _launch(
    like: Tensor,
    g: Tensor | None,
    collapse: CollapseGradient,
    projection: ProjectionGradient,
    streams: tuple[Tensor | None, ...],
    gradients: tuple[Tensor | None, ...],
    launch: Launch,
) -> None:
    T, N, C = tokens_of(like)
    P = 0 if projection.phi is None else projection.phi.shape[0]
    rows = min(rows_per_block(P), 64)
    # A write-back sums over all channels of a token; a read alone can share them out.
    writes = streams[1] is not None
    width = 0 if writes else max(launch.block_c, min(512, triton.next_power_of_2(C)))
    streams_bwd_kernel[(triton.cdiv(T, launch.block_t), triton.cdiv(C, width) if width else 1)](
        g, *collapse, *projection, *streams, *gradients, T, C, P,
        N=N, WIDTH=width, ROW_BLOCKS=triton.cdiv(P, rows), ROWS=rows,
        MMA_WARPS=min(launch.num_warps, launch.block_c // 8) if P else 0, PRECISION=PRECISION, **launch.meta(),
    )  # fmt: skip
