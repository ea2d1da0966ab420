"""F1: write a sublayer's output into the streams and project the result, in one pass over it.

    y[t,o,c] = sum_i H[t,o,i] x[t,i,c] + post[t,o] (f[t,c] + b[c])           rounded once
    partial[s,t,p] = sum_{k in slice s} y[t,k] phi[p,k] w[k]                 square[s,t] = sum_{k in slice s} y[t,k]^2

Either half can be left out: without f nothing is written and x itself is projected; without phi it is `post`. Slices
are SLICE_WIDTH channels or more of all streams; `_read` adds them up, in order. Reads x and f, writes y: 18C bytes
per token for 4 streams of 2-byte activations.
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
    fold,
    load_float,
    load_per_token,
    load_streams,
    row_start,
    store_as,
    sum_parts,
    tokens_of_program,
    write_stream,
)
from ._launch import (
    FLOAT,
    PRECISION,
    ROWS,
    cdiv,
    loads_are_wide,
    row_blocks,
    shared_memory_of,
    slice_width,
    threads_hold_neighbours,
    tokens_of,
    write_launch,
    write_project_launch,
)
from ._launcher import run


@triton.jit(do_not_specialize=["T"])
def write_project_kernel(
    x,
    f,
    f_bias,
    post,
    res,
    phi,
    norm_weight,
    y,
    partials,
    squares,
    T,
    C: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    IN_THREAD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    t, live = tokens_of_program(T, BLOCK_T)
    split = tl.program_id(1)
    if f is not None:
        post_columns = load_per_token(post, t, live, N)
        res_columns = () if res is None else load_per_token(res, t, live, N * N)
    if phi is not None:
        IN_PARTS: tl.constexpr = x.dtype.element_ty == tl.bfloat16
        square = tl.zeros((BLOCK_T, BLOCK_C // 8), tl.float32)
        z = ()
        for _ in tl.static_range(ROW_BLOCKS):
            z = z + (tl.zeros((2 * ROWS if IN_PARTS else ROWS, BLOCK_T), tl.float32),)
    end = tl.minimum((split + 1) * WIDTH, C)  # WIDTH is a multiple of BLOCK_C
    for start in tl.range(split * WIDTH, end, BLOCK_C, num_stages=STAGES):
        c = start + tl.arange(0, BLOCK_C)
        here = channels_exist(c, C, BLOCK_C)
        tile = live[:, None] & here[None, :]
        at = row_start(x, t, N, C)[:, None] + c[None, :]
        if f is not None:
            f_tile = load_float(f, row_start(f, t, 1, C)[:, None] + c[None, :], tile)
            if f_bias is not None:
                f_tile += load_float(f_bias, c, here)[None, :]
            streams = load_streams(x, at, tile, C, N)
        tiles = ()
        for o in tl.static_range(N):
            if f is not None:
                y_tile = write_stream(o, streams, f_tile, post_columns, res_columns, N).to(y.dtype.element_ty)
                tl.store(y + at + o * C, y_tile, mask=tile)
            else:
                y_tile = tl.load(x + at + o * C, mask=tile, other=0.0)
            if phi is not None:
                wide = y_tile.to(tl.float32)
                square += fold(wide, wide, 8, IN_THREAD)
                tiles = tiles + (y_tile,)
        if phi is not None:
            # Tiles that were computed go to the tensor cores through shared memory: two at a time wait half as often.
            TOGETHER: tl.constexpr = 1 if f is None else 2
            for o in tl.static_range(0, N, TOGETHER):
                if o + TOGETHER <= N and TOGETHER == 2:
                    column = tl.arange(0, 2 * BLOCK_C)
                    c_pair = start + column % BLOCK_C
                    k = (o + column // BLOCK_C) * C + c_pair
                    exists = channels_exist(c_pair, C, BLOCK_C)
                    pair = _side_by_side(tiles[o], tiles[o + 1])
                    z = _add_projection(z, pair, phi, norm_weight, k, exists, N * C, P, ROWS, PRECISION)
                else:
                    z = _add_projection(z, tiles[o], phi, norm_weight, o * C + c, here, N * C, P, ROWS, PRECISION)
    if phi is not None:
        slot = tl.cast(split, tl.int64) * T + t
        for block in tl.static_range(ROW_BLOCKS):
            rows = block * ROWS + tl.arange(0, ROWS)
            columns = sum_parts(z[block]) if IN_PARTS else z[block]
            store_as(partials, slot[None, :] * P + rows[:, None], columns, live[None, :] & (rows < P)[:, None])
        store_as(squares, slot, tl.sum(square, 1), live)


@triton.jit
def _add_projection(
    z, y_tile, phi, norm_weight, k, here, K, P: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr
):
    """z + phi[:, k] y^T for each block of rows; phi in parts beside bfloat16, whose products are exact.

    float16 lacks the range for such parts, so it goes the way of float32: tf32x3 (or ieee where that is missing).
    """
    sums = ()
    for block in tl.static_range(len(z)):
        p = block * ROWS + tl.arange(0, ROWS)
        rows = load_float(phi, p[:, None].to(tl.int64) * K + k[None, :], (p < P)[:, None] & here[None, :])
        if norm_weight is not None:
            rows *= load_float(norm_weight, k, here)[None, :]
        if y_tile.dtype == tl.bfloat16:
            sums = sums + (tl.dot(_stacked_parts(rows), tl.trans(y_tile), z[block]),)
        else:
            sums = sums + (tl.dot(rows, tl.trans(y_tile.to(tl.float32)), z[block], input_precision=PRECISION),)
    return sums


@triton.jit
def _side_by_side(left, right):
    """[tokens, 2 channels]"""
    TOKENS: tl.constexpr = left.shape[0]
    WIDTH: tl.constexpr = left.shape[1]
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (TOKENS, 2 * WIDTH))


@triton.jit
def _stacked_parts(rows):
    """[2 ROWS, channels]: high and low parts, in the order of `part_column`."""
    ROWS: tl.constexpr = rows.shape[0]
    COLUMNS: tl.constexpr = rows.shape[1]
    high, low = bfloat16_parts(rows)
    stacked = tl.permute(tl.reshape(tl.join(high, low), (ROWS // 8, 8, COLUMNS, 2)), (0, 3, 1, 2))
    return tl.reshape(stacked, (2 * ROWS, COLUMNS))


class Projection(NamedTuple):
    """Partial sums of z [splits, T, P] and of the squares [splits, T]."""

    z: Tensor
    squares: Tensor


def write(x: Tensor, f: Tensor, f_bias: Tensor | None, post: Tensor, res: Tensor | None) -> Tensor:
    """y alone."""
    T, N, C = tokens_of(x)
    y = empty(x, *x.shape)
    launch = write_launch(C)
    grid = (cdiv(T, launch.block_t), cdiv(C, launch.block_c))
    run(
        write_project_kernel, grid,
        x, f, f_bias, post, res, None, None, y, None, None, T, C, 0,
        N=N, WIDTH=launch.block_c, ROWS=ROWS, ROW_BLOCKS=0, IN_THREAD=False, PRECISION=PRECISION, **launch.meta(),
    )  # fmt: skip
    return y


def project_partials(x: Tensor, phi: Tensor, norm_weight: Tensor | None) -> Projection:
    return _project(x, None, None, None, None, phi, norm_weight, None)


def write_project(
    x: Tensor,
    f: Tensor,
    f_bias: Tensor | None,
    post: Tensor,
    res: Tensor | None,
    phi: Tensor,
    norm_weight: Tensor | None,
) -> tuple[Tensor, Projection]:
    y = empty(x, *x.shape)
    return y, _project(x, f, f_bias, post, res, phi, norm_weight, y)


def _project(
    x: Tensor,
    f: Tensor | None,
    f_bias: Tensor | None,
    post: Tensor | None,
    res: Tensor | None,
    phi: Tensor,
    norm_weight: Tensor | None,
    y: Tensor | None,
) -> Projection:
    T, N, C = tokens_of(x)
    P, width, wide = phi.shape[0], slice_width(C), loads_are_wide(x)
    launch = write_project_launch(
        N, P, writes=f is not None, element_size=x.element_size(), wide=wide, shared=shared_memory_of(x.device)
    )
    splits = cdiv(C, width)
    partials = Projection(empty(phi, splits, T, P, dtype=FLOAT), empty(phi, splits, T, dtype=FLOAT))
    run(
        write_project_kernel, (cdiv(T, launch.block_t), splits),
        x, f, f_bias, post, res, phi, norm_weight, y, *partials, T, C, P,
        N=N, WIDTH=width, ROWS=ROWS, ROW_BLOCKS=row_blocks(P), IN_THREAD=threads_hold_neighbours(x, launch),
        PRECISION=PRECISION, **launch.meta(),
    )  # fmt: skip
    return partials
