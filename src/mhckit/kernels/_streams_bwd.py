"""J: the gradient of the streams from all of their uses, and through the write-back, in one pass.

    G[t,o,c] = g[t,o,c] + w[t,o] d[t,c] + sum_p dz[t,p] phi[p,oC+c] + k[t] y[t,o,c]
    d = e,  or with a norm weight n:  d = n e - b sum_i w_i y_i
    without a write-back:  dx = G
    with one:  dx[t,i,c] = sum_o H[t,o,i] G[t,o,c]     df[t,c] = sum_o post[t,o] G[t,o,c]
               dH[t,o,i] = sum_c G[t,o,c] x[t,i,c]     dpost[t,o] = sum_c G[t,o,c] (f[t,c] + b[c])
               dw[t,o] = sum_c d[t,c] y[t,o,c]         if w was given and there is no norm
               y recomputed from x and f

The sums over channels are finished here, or slices of them left for `_parameters_bwd` to add up. Every part of G is
optional. dz, k, w (times u, with a norm) and b come from `_read_bwd`, phi from `_pack`. G itself is never stored. The
recomputed y lacks the rounding of the stored one. It enters k y and b sum w y, projections of the terms they are added
to, so that the difference is at most a rounding of such a term, and dw, a sum over channels in which roundings cancel;
leaving it out saves a twentieth of the instructions.
Reads g, d, x and f, writes dx and df: 30C bytes per token for 4 streams of 2-byte activations.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mhckit.ops._register import empty

from ._device import (
    add_mixed,
    channels_exist,
    collapse,
    fold,
    fold_pair,
    folded_zeros,
    load_float,
    load_per_token,
    mixed_back,
    pieces,
    row_start,
    scaled,
    store_as,
    tokens_of_program,
    write_stream,
)
from ._gradients import CollapseGradient, ProjectionGradient, Write, WriteGradients
from ._hopper_launch import HAS_GLUON, has_hopper_forms
from ._launch import (
    BFLOAT,
    FLOAT,
    PHI_BLOCK,
    Launch,
    PhiLayout,
    cdiv,
    channels_per_thread,
    dots_stay_in_threads,
    loads_ahead,
    packed_dz_width,
    packed_rows,
    packs_densely,
    power_of_2,
    shared_memory_of,
    slice_width,
    streams_bwd_launch,
    threads_hold_neighbours,
    tokens_of,
)
from ._launcher import run
from ._packed_dot import dot_phi, load_dz, load_phi

if HAS_GLUON:
    from . import _streams_bwd_eight as _eight
    from . import _streams_bwd_hopper as _hopper
else:
    _hopper = _eight = None


@triton.jit(do_not_specialize=["T"])
def streams_bwd_kernel(
    g,
    dx_in,
    read_weights,
    norm_weight,
    norm_share,
    dz_parts,
    k_share,
    k_more,
    phi_parts,
    x,
    f,
    f_bias,
    post,
    res,
    dx,
    df,
    df_sums,
    dpost,
    dres,
    dread_weights,
    write_sums,
    T,
    C: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    DENSE: tl.constexpr,
    CHAINS: tl.constexpr,
    DZ_WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    FOLD: tl.constexpr,
    IN_THREAD: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    t, live = tokens_of_program(T, BLOCK_T)
    if dx_in is not None:
        weights = load_per_token(read_weights, t, live, N)
        if norm_weight is not None:
            share = load_float(norm_share, t, live)[:, None]
    if phi_parts is not None:
        k = load_float(k_share, t, live)[:, None]
        if k_more is not None:
            k += load_float(k_more, t, live)[:, None]
        dz_blocks = load_dz(dz_parts, T, P, PACKED, DENSE, DZ_WIDTH, BLOCK_T)
    if f is not None:
        post_columns = load_per_token(post, t, live, N)
        res_columns = () if res is None else load_per_token(res, t, live, N * N)
        MIXED: tl.constexpr = 0 if res is None else N
        PER_STREAM: tl.constexpr = 1 + MIXED
        nothing = folded_zeros(BLOCK_T, PIECE, FOLD)
        sums = ()
        for _ in tl.static_range(N):
            sums = sums + (nothing if dread_weights is None else tl.join(nothing, nothing),)
            for _ in tl.static_range(MIXED):
                sums = sums + (nothing,)
        if norm_weight is not None:
            # What x_in was collapsed with, in terms of x and f: d is known before any of y is made.
            shares = scaled(weights, share, N)
            f_weight = collapse(shares, post_columns, N)
            x_weights = mixed_back(shares, res_columns, N)
    begin = tl.program_id(1) * WIDTH if WIDTH < C else 0
    end = begin + WIDTH if C % WIDTH == 0 else tl.minimum(begin + WIDTH, C)
    # Behind the loads of the next step, n would wait for all of them; beside a bias there are no registers for it.
    NORM_AHEAD: tl.constexpr = AHEAD and norm_weight is not None and f_bias is None
    if NORM_AHEAD:
        c = begin + tl.arange(0, PIECE)
        first_n = _load_norm_weight(norm_weight, c, c < C)
    for start in tl.range(begin, end, BLOCK_C, num_stages=STAGES):
        c_tile = start + tl.arange(0, BLOCK_C)
        exists = channels_exist(c_tile, C, BLOCK_C)
        loaded = live[:, None] & exists[None, :]
        wide_at = row_start(dx, t, N, C)[:, None] + c_tile[None, :]
        x_pieces = () if x is None else _load_pieces(x, wide_at, loaded, C, N, PIECE)
        g_pieces = () if g is None else _load_pieces(g, wide_at, loaded, C, N, PIECE)
        if f is not None:
            f_tile = tl.load(f + row_start(f, t, 1, C)[:, None] + c_tile[None, :], mask=loaded, other=0.0)
            if f_bias is not None:
                f_tile = f_tile.to(tl.float32) + load_float(f_bias, c_tile, exists)[None, :]
            f_pieces = pieces(f_tile, PIECE)
        if dx_in is not None:
            d_tile = tl.load(dx_in + row_start(dx_in, t, 1, C)[:, None] + c_tile[None, :], mask=loaded, other=0.0)
            d_pieces = pieces(d_tile, PIECE)
        phi_tiles = ()
        if AHEAD:
            for piece in tl.static_range(BLOCK_C // PIECE):
                for o in tl.static_range(N):
                    phi_tiles = phi_tiles + (load_phi(phi_parts, o, start + piece * PIECE, C, PACKED, PIECE),)
        # Always true; but the compiler puts what depends on a condition behind the loads of the next step, which then
        # run beside it, and in the same buffers.
        if (start < end) if AHEAD else True:
            for piece in tl.static_range(BLOCK_C // PIECE):
                c = start + piece * PIECE + tl.arange(0, PIECE)
                here = channels_exist(c, C, BLOCK_C)
                tile = live[:, None] & here[None, :]
                at = row_start(dx, t, N, C)[:, None] + c[None, :]
                if x is not None:
                    streams = _as_float(x_pieces, piece, N)
                if f is not None:
                    f_piece = f_pieces[piece].to(tl.float32)
                if norm_weight is not None:
                    n = first_n if NORM_AHEAD and piece == 0 else _load_norm_weight(norm_weight, c, here)
                if f is not None:
                    df_tile = tl.zeros((BLOCK_T, PIECE), tl.float32)
                next_sums = ()
                dx_tiles = ()
                for o in tl.static_range(N):
                    if phi_parts is not None or dread_weights is not None:
                        y = streams[o]
                        if f is not None:
                            y = write_stream(o, streams, f_piece, post_columns, res_columns, N)
                    if phi_parts is not None:
                        if AHEAD:
                            G = dot_phi(dz_blocks, phi_tiles[piece * N + o], CHAINS, FOLD)
                        else:
                            tiles = load_phi(phi_parts, o, start + piece * PIECE, C, PACKED, PIECE)
                            G = dot_phi(dz_blocks, tiles, CHAINS, FOLD)
                        G += k * y
                    else:
                        G = tl.zeros((BLOCK_T, PIECE), tl.float32)
                    if g is not None:
                        G += g_pieces[o][piece].to(tl.float32)
                    if dx_in is not None:
                        if o == 0:  # behind the first dot, which gives a load of n time
                            d = d_pieces[piece].to(tl.float32)
                            if norm_weight is not None:
                                d *= n
                                if f is None:
                                    d -= share * collapse(weights, streams, N)
                                else:
                                    d -= collapse(x_weights, streams, N) + f_weight * f_piece
                        G += weights[o] * d
                    if f is None:
                        store_as(dx, at + o * C, G, tile)
                    else:
                        df_tile += post_columns[o] * G
                        mixed = () if res is None else streams
                        read = () if dread_weights is None else (d, y)
                        next_sums = _add_products(next_sums, sums, G, f_piece, read, mixed, FOLD, IN_THREAD)
                        dx_tiles = add_mixed(dx_tiles, G, res_columns[o * N : (o + 1) * N], o, N)
                if f is not None:
                    sums = next_sums
                    store_as(df, row_start(df, t, 1, C)[:, None] + c[None, :], df_tile, tile)
                    if df_sums is not None:
                        summed = tl.sum(tl.where(tile, df_tile, 0.0), 0)
                        store_as(df_sums, tl.program_id(0).to(tl.int64) * C + c, summed, here)
                    for i in tl.static_range(N):
                        store_as(dx, at + i * C, dx_tiles[i], tile)
            if NORM_AHEAD:
                c = start + BLOCK_C + tl.arange(0, PIECE)
                first_n = _load_norm_weight(norm_weight, c, c < C)
    if f is not None:
        PER_TOKEN: tl.constexpr = N * (PER_STREAM + (0 if dread_weights is None else 1))
        slot = (tl.program_id(1).to(tl.int64) * T + t) * PER_TOKEN
        for o in tl.static_range(N):
            for part in tl.static_range(PER_STREAM):
                total = tl.sum(sums[o * PER_STREAM + part], 1)
                if part > 0:
                    _store_sum(dres, (t * N + o) * N + part - 1, write_sums, slot + N + o * N + part - 1, total, live)
                elif dread_weights is None:
                    _store_sum(dpost, t * N + o, write_sums, slot + o, total, live)
                else:
                    of_post, of_weights = tl.split(total)
                    _store_sum(dpost, t * N + o, write_sums, slot + o, of_post, live)
                    _store_sum(dread_weights, t * N + o, write_sums, slot + N * PER_STREAM + o, of_weights, live)


@triton.jit
def _store_sum(result, at, write_sums, slot, total, live):
    """Finished, or where slices of it are to be added up, in its slot."""
    if write_sums is not None:
        store_as(write_sums, slot, total, live)
    else:
        store_as(result, at, total, live)


@triton.jit
def _load_norm_weight(norm_weight, c, exists):
    return load_float(norm_weight, c, exists)[None, :]


@triton.jit
def _load_pieces(x, offsets, mask, C: tl.constexpr, N: tl.constexpr, PIECE: tl.constexpr):
    """Tiles of N streams as they are stored, each in pieces: loads are wide, and registers hold a piece at a time."""
    streams = ()
    for i in tl.static_range(N):
        streams = streams + (pieces(tl.load(x + offsets + i * C, mask=mask, other=0.0), PIECE),)
    return streams


@triton.jit
def _as_float(streams, piece: tl.constexpr, N: tl.constexpr):
    tiles = ()
    for i in tl.static_range(N):
        tiles = tiles + (streams[i][piece].to(tl.float32),)
    return tiles


@triton.jit
def _add_products(next_sums, sums, G, f, read, mixed, FOLD: tl.constexpr, IN_THREAD: tl.constexpr):
    """next_sums, and the next of sums with the products of G with f and with each stream that is mixed.

    read: () or (d, y_o), whose product is summed as a pair with that of G and f: by itself it has nothing to do with
    the dot, and the compiler would give it another layout.
    """
    if len(read) == 0:
        next_sums = next_sums + (sums[len(next_sums)] + fold(G, f, FOLD, IN_THREAD),)
    else:
        pair = fold_pair(G, f, read[0], read[1], FOLD, IN_THREAD)
        next_sums = next_sums + (sums[len(next_sums)] + pair,)
    for i in tl.static_range(len(mixed)):
        next_sums = next_sums + (sums[len(next_sums)] + fold(G, mixed[i], FOLD, IN_THREAD),)
    return next_sums


def read_streams_bwd(x: Tensor, g: Tensor | None, collapse: CollapseGradient, projection: ProjectionGradient) -> Tensor:
    """dx = G"""
    _T, N, C = tokens_of(x)
    dx = empty(x, *x.shape)
    y = x if projection.phi_parts is not None or collapse.norm_weight is not None else None
    shared = shared_memory_of(x.device)
    launch = streams_bwd_launch(N, C, rows=projection.rows, element_size=x.element_size(), shared=shared)
    width = max(launch.block_c, min(512, power_of_2(C)))
    _launch(x, g, collapse, projection, (y, None, None, None, None), (dx, *[None] * 6), launch, width)
    return dx


def hopper_phi_layout(x: Tensor, g: Tensor | None, dx_in: Tensor | None, write: Write, rows: int) -> PhiLayout | None:
    """How J's form for Hopper wants phi, or None where it is the plain form that runs, whatever the number of tokens.

    It wants four streams of bfloat16, all of their gradient's parts, channels and rows of phi that it can take, and no
    bias; or eight streams that are mixed.
    """
    if _hopper is None or g is None or dx_in is None or write.f_bias is not None or not has_hopper_forms(x.device):
        return None
    streams, channels = x.shape[-2:]
    if not rows or not all(tensor.dtype == BFLOAT for tensor in (x, g, dx_in, write.f)):
        return None
    if streams == _eight.STREAMS:
        return _eight.phi_layout(rows) if write.res is not None and _eight.takes(channels, rows) else None
    return _hopper.phi_layout(rows, channels) if streams == 4 and _hopper.takes(channels, rows) else None


def write_streams_bwd(
    x: Tensor,
    g: Tensor | None,
    collapse: CollapseGradient,
    projection: ProjectionGradient,
    write: Write,
    need_read_weights: bool,
) -> WriteGradients:
    """need_read_weights: whether their gradient is summed here, too."""
    layout = hopper_phi_layout(x, g, collapse.dx_in, write, projection.rows)
    if layout is not None:
        form = _hopper if layout.together == 1 else _eight
        return form.write_streams_bwd(x, g, collapse, projection, write, need_read_weights)
    f, f_bias, post, res = write
    T, N, C = tokens_of(x)
    launch = streams_bwd_launch(
        N,
        C,
        rows=projection.rows,
        sums_df=f_bias is not None,
        element_size=x.element_size(),
        shared=shared_memory_of(x.device),
    )
    width = slice_width(C) if projection.rows else C
    slices, sums_per_token = cdiv(C, width), N * (1 + (N if res is not None else 0) + need_read_weights)
    gradients = WriteGradients(
        empty(x, *x.shape),
        empty(f, *f.shape),
        None if f_bias is None else empty(f, cdiv(T, launch.block_t), C, dtype=FLOAT),
        empty(post, *post.shape),
        None if res is None else empty(res, *res.shape),
        empty(collapse.read_weights, *collapse.read_weights.shape) if need_read_weights else None,
        None if slices == 1 else empty(x, slices, T, sums_per_token, dtype=FLOAT),
    )
    _launch(x, g, collapse, projection, (x, *write), gradients, launch, width)
    return gradients


def _launch(
    like: Tensor,
    g: Tensor | None,
    collapse: CollapseGradient,
    projection: ProjectionGradient,
    streams: tuple[Tensor | None, ...],
    gradients: tuple[Tensor | None, ...],
    launch: Launch,
    width: int,
) -> None:
    T, N, C = tokens_of(like)
    *tensors, rows = projection
    dots, dense = rows > 0, packs_densely(rows, C)
    chains = launch.num_warps == 4 or (dense and launch.num_stages > 1)
    in_thread = dots_stay_in_threads(like.device) if dots else threads_hold_neighbours(like, launch)
    run(
        streams_bwd_kernel, (cdiv(T, launch.block_t), cdiv(C, width)),
        g, *collapse, *tensors, *streams, *gradients, T, C, rows,
        N=N, WIDTH=width, PACKED=packed_rows(rows, C), DENSE=dense, CHAINS=chains,
        DZ_WIDTH=packed_dz_width(rows),
        PIECE=PHI_BLOCK if dots else launch.block_c, FOLD=channels_per_thread(launch) if dots else 8,
        IN_THREAD=in_thread, AHEAD=loads_ahead(launch, N, rows, shared_memory_of(like.device)), **launch.meta(),
    )  # fmt: skip
