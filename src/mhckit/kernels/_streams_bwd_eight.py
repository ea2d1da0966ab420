"""J on Hopper for eight streams of bfloat16: what `_streams_bwd` computes behind a write-back, mostly on tensor cores.

With eight streams the sums over streams and over channels are 300 operations for each token and channel, and have more
coefficients than a thread has registers. As products of 8 x 8 matrices, one of each token (`_token_matrices`), they are
seven instructions of a tensor core for eight channels, and a lane holds two coefficients of each matrix:

    z      = dz phi                                                           by token, then exchanged
    G      = z + M x + g + w d + q f       M = k H - w (b w H)^T, q = k post - w (b w post), d = n e     8 x 8 channels
    dH    += G x^T     dpost += G f     with SUMS_READ  s += d x^T, and where a sum ends  dw = H s + post sum d f
    dx     = H^T G     df     = post^T G

H, M, post and G are taken in bfloat16 high and low parts, whose products are exact. As in `_streams_bwd_hopper` every
kind of work has warps of its own:

    load        the copy engine brings x, g, f and d, 64 tokens x 32 channels, into one of two slots
    load_phi    the copy engine brings the packed parts of phi, 8 channels of all streams at a time: a piece
    multiply    four warps; dz phi of a piece, put where `compute` finds it by token and stream
    compute     eight warps; dx takes the place of x in its slot, df that of f
    store       the copy engine takes both out of the slot

A slot's rows have 64 bytes, since 64 tokens have to share phi, whose parts take 20 KB for every eight channels.
Sums over channels end where a chunk of them does, as in `_streams_bwd_hopper`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mhckit.ops._register import empty

from ._descriptors import Tiles, shared_layout, tiled_arguments
from ._device import bfloat16_parts, load_float, rounded
from ._gradients import CollapseGradient, ProjectionGradient, Write, WriteGradients
from ._hopper_copies import COPY_REGISTERS
from ._hopper_dz import PART_ROWS, load_dz
from ._hopper_launch import HOPPER_TOKENS, chunk_width, chunks_span
from ._launch import FLOAT, SUM_WIDTH, PhiLayout, cdiv, packed_dz_width, tokens_of
from ._launcher import run
from ._token_matrices import MATRICES, add_products, add_products_with_sum, transposed

STREAMS = 8
# Channels of a slot; of a stream in a piece of phi; and in all of them.
SLOT_CHANNELS = 32
PIECE_CHANNELS = 8
PIECE_COLUMNS = STREAMS * PIECE_CHANNELS
# Rows that the copy engine moves at once, of streams and of parts of phi.
STREAM_ROWS = 256
PHI_ROWS = PART_ROWS.value

TOKENS = gl.constexpr(HOPPER_TOKENS)
WARPS = gl.constexpr(8)  # of `compute`
N = gl.constexpr(STREAMS)
WIDTH = gl.constexpr(SLOT_CHANNELS)
PIECE = gl.constexpr(PIECE_CHANNELS)
COLUMNS = gl.constexpr(PIECE_COLUMNS)
ROWS_AT_ONCE = gl.constexpr(STREAM_ROWS)
SLOTS = gl.constexpr(2)
PIECES = gl.constexpr(3)
STREAM_LAYOUT = gl.constexpr(shared_layout(2, SLOT_CHANNELS))
PHI_LAYOUT = gl.constexpr(shared_layout(2, PIECE_COLUMNS))
# [tokens, streams side by side]: a warp stores eight tokens at once, and loads all of one.
EXCHANGED = gl.constexpr(gl.SwizzledSharedLayout(PIECE_CHANNELS, 1, STREAMS, [1, 0]))
# As MATRICES, [tokens, N, columns].
BY_TOKEN = gl.constexpr(gl.BlockedLayout([8, 1, 2], [1, 8, 4], [8, 1, 1], [2, 1, 0]))
MULTIPLY_REGISTERS = gl.constexpr(104)


@gluon.jit
def _load(x, g, f, d, x_slots, g_slots, f_slots, d_slots, loaded, free, first, begin, end):
    for step in range((end - begin) // WIDTH):
        slot, channel = step % SLOTS, begin + step * WIDTH
        mbarrier.wait(free.index(slot), step // SLOTS % 2 ^ 1)
        arrived = loaded.index(slot)
        mbarrier.expect(arrived, 2 * (N + 1) * TOKENS * WIDTH * 2)
        for k in gl.static_range(N * TOKENS // ROWS_AT_ONCE):
            at = [first * N + k * ROWS_AT_ONCE, channel]
            tma.async_copy_global_to_shared(x, at, arrived, _rows(x_slots, slot, k))
            tma.async_copy_global_to_shared(g, at, arrived, _rows(g_slots, slot, k))
        tma.async_copy_global_to_shared(f, [first, channel], arrived, f_slots.index(slot))
        tma.async_copy_global_to_shared(d, [first, channel], arrived, d_slots.index(slot))


@gluon.jit
def _store(dx, df, x_slots, f_slots, computed, free, first, begin, end):
    for step in range((end - begin) // WIDTH):
        slot, channel = step % SLOTS, begin + step * WIDTH
        mbarrier.wait(computed.index(slot), step // SLOTS % 2)
        for k in gl.static_range(N * TOKENS // ROWS_AT_ONCE):
            tma.async_copy_shared_to_global(dx, [first * N + k * ROWS_AT_ONCE, channel], _rows(x_slots, slot, k))
        tma.async_copy_shared_to_global(df, [first, channel], f_slots.index(slot))
        tma.store_wait(0)
        mbarrier.arrive(free.index(slot), count=1)


@gluon.jit
def _rows(slots, slot, k: gl.constexpr):
    return slots.index(slot).slice(k * ROWS_AT_ONCE, ROWS_AT_ONCE)


@gluon.jit
def _load_phi(phi_parts, pieces, loaded, free, begin, end, PARTS: gl.constexpr):
    for piece in range((end - begin) // PIECE):
        slot = piece % PIECES
        arrived = loaded.index(slot)
        mbarrier.wait(free.index(slot), piece // PIECES % 2 ^ 1)
        mbarrier.expect(arrived, PARTS * PART_ROWS * COLUMNS * 2)
        for k in range(PARTS):
            at = [((begin // PIECE + piece) * PARTS + k) * PART_ROWS, 0]
            tma.async_copy_global_to_shared(phi_parts, at, arrived, pieces.index(slot * PARTS + k))


@gluon.jit
def _multiply(
    dz_parts, pieces, exchanged, phi_loaded, phi_free, ready, taken, first, T, begin, end, P: gl.constexpr,
    PARTS: gl.constexpr, DZ_WIDTH: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    t = first.to(gl.int64) + gl.arange(0, TOKENS, gl.SliceLayout(1, operand))
    high = load_dz(dz_parts, t, False, T, P, PARTS, DZ_WIDTH, operand)
    low = load_dz(dz_parts, t, True, T, P, PARTS, DZ_WIDTH, operand)
    zero = gl.zeros([TOKENS, COLUMNS], gl.float32, mma)
    for piece in range((end - begin) // PIECE):
        slot = piece % PIECES
        mbarrier.wait(phi_loaded.index(slot), piece // PIECES % 2)
        z = zero
        for part in gl.static_range(PARTS):
            tile = pieces.index(slot * PARTS + part)
            z = warpgroup_mma(high[part], tile, z, use_acc=part > 0, is_async=True)
            if part < PARTS // 2:
                z = warpgroup_mma(low[part], tile, z, is_async=True)
        z = warpgroup_mma_wait(0, deps=[z])
        mbarrier.wait(taken, piece % 2 ^ 1)
        exchanged.store(z)
        gl.thread_barrier()
        mbarrier.arrive(phi_free.index(slot), count=1)
        mbarrier.arrive(ready, count=1)


@gluon.jit
def _as_matrices(tile):
    """[tokens N, columns] from [tokens, columns], the same for each stream of a token."""
    wide = gl.expand_dims(tile, 1).broadcast_to([TOKENS, N, tile.shape[1]])
    return gl.convert_layout(gl.reshape(wide, (TOKENS * N, tile.shape[1])), MATRICES, assert_trivial=True)


@gluon.jit
def _places(first, T):
    """Of each row of MATRICES: its token, its stream, and whether there is such a token."""
    r = gl.arange(0, TOKENS * N, gl.SliceLayout(1, MATRICES))
    t = (first.to(gl.int64) + r // N)[:, None]
    return t, (r % N)[:, None], t < T


@gluon.jit
def _columns():
    return gl.arange(0, N, gl.SliceLayout(0, MATRICES))[None, :]


@gluon.jit
def _coefficients(read_weights, norm_share, k_share, k_more, post, res, first, T):
    """M, w and q."""
    t, stream, live = _places(first, T)
    i = _columns()
    k = load_float(k_share, t, live)
    if k_more is not None:
        k += load_float(k_more, t, live)
    w = load_float(read_weights, t * N + stream, live)
    M = k * load_float(res, (t * N + stream) * N + i, live)
    q = k * load_float(post, t * N + stream, live)
    if norm_share is not None:  # what x_in was collapsed with, in terms of x and f
        share = w * load_float(norm_share, t, live)
        for o in gl.static_range(N):
            of_stream = share * load_float(read_weights, t * N + o, live)
            M -= of_stream * load_float(res, (t * N + o) * N + i, live)
            q -= of_stream * load_float(post, t * N + o, live)
    return M, w, q


@gluon.jit
def _load_turned(res, first, T):
    """H^T of each token."""
    t, i, live = _places(first, T)
    o = _columns()
    return load_float(res, (t * N + o) * N + i, live)


@gluon.jit
def _compute(
    x_slots, g_slots, f_slots, d_slots, exchanged, loaded, computed, ready, taken, read_weights, norm_weight,
    norm_share, k_share, k_more, post, res, sums, first, T, begin, end, CHUNK: gl.constexpr, SUMS_READ: gl.constexpr,
):  # fmt: skip
    by_column: gl.constexpr = gl.SliceLayout(1, BY_TOKEN)
    M, w, q = _coefficients(read_weights, norm_share, k_share, k_more, post, res, first, T)
    high_M, low_M = bfloat16_parts(M, True)
    high_H, low_H = bfloat16_parts(_load_turned(res, first, T), True)
    high_post, low_post = _post_of_lanes(post, first, T)
    zero = gl.zeros([TOKENS * N, PIECE], gl.float32, MATRICES)
    dres, dpost, dx_read, df_read = zero, zero, zero, zero
    c = gl.arange(0, PIECE, gl.SliceLayout(0, MATRICES))
    if norm_weight is not None:
        n = load_float(norm_weight, begin + c, begin + c < end)[None, :]
    for step in range((end - begin) // WIDTH):
        slot = step % SLOTS
        mbarrier.wait(loaded.index(slot), step // SLOTS % 2)
        for part in gl.static_range(WIDTH // PIECE):
            x = _piece_of(x_slots, slot, part).load(MATRICES)
            g = _piece_of(g_slots, slot, part).load(MATRICES).to(gl.float32)
            f = _as_matrices(_piece_of(f_slots, slot, part).load(by_column))
            d = _as_matrices(_piece_of(d_slots, slot, part).load(by_column))
            wide_d = d.to(gl.float32)
            if norm_weight is not None:
                wide_d *= n
                following = begin + step * WIDTH + (part + 1) * PIECE + c
                n = load_float(norm_weight, following, following < end)[None, :]
            of_high, of_low = add_products(g, zero, high_M, low_M, transposed(x))
            without_z = gl.fma(w, wide_d, gl.fma(q, f.to(gl.float32), of_high + of_low))
            mbarrier.wait(ready, part % 2)
            z = _matrices_of(exchanged)
            gl.thread_barrier()
            mbarrier.arrive(taken, count=1)
            G = without_z + z
            high_G, low_G = bfloat16_parts(G, True)
            dres, dpost = add_products_with_sum(dres, dpost, x, f, high_G, low_G)
            if SUMS_READ:
                dx_read, df_read = add_products(dx_read, df_read, x, f, d)
            turned, low_turned = transposed(high_G), transposed(low_G)
            of_high, of_low = add_products_with_sum(zero, zero, high_H, low_H, turned, low_turned)
            _piece_of(x_slots, slot, part).store(rounded(of_high + of_low, gl.bfloat16, True))
            of_high, of_low = add_products_with_sum(zero, zero, high_post, low_post, turned, low_turned)
            _piece_of(f_slots, slot, part).store(rounded(_of_lanes(of_high + of_low), gl.bfloat16, True))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(computed.index(slot), count=1)
        after = begin + (step + 1) * WIDTH
        if (after % CHUNK == 0) | (after >= end):
            chunk = (after - 1) // CHUNK
            _store_sums(sums, dres, dpost, dx_read, df_read, post, res, chunk, first, T, SUMS_READ)
            dres, dpost, dx_read, df_read = zero, zero, zero, zero


@gluon.jit
def _post_of_lanes(post, first, T):
    """Both parts of post: a warp has in row r of all of its eight matrices the r-th one's."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2], [1, 1, 8, 4], [8, 1, 1, 1], [3, 2, 1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, rows)))[:, None, None]
    r = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, rows)))[None, :, None]
    o = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, rows)))[None, None, :]
    t = first.to(gl.int64) + warp * N + r
    high, low = bfloat16_parts(load_float(post, t * N + o, t < T), True)
    return _for_each_matrix(high), _for_each_matrix(low)


@gluon.jit
def _for_each_matrix(rows):
    wide = gl.expand_dims(rows, 1).broadcast_to([WARPS, TOKENS // WARPS, N, N])
    return gl.convert_layout(gl.reshape(wide, (TOKENS * N, N)), MATRICES, assert_trivial=True)


@gluon.jit
def _of_lanes(df):
    """[tokens, channels], from matrices that have it in the row whose lanes have their token's post."""
    r = gl.arange(0, TOKENS * N, gl.SliceLayout(1, MATRICES))
    mine = (r // N % N == r % N)[:, None]
    kept = gl.reshape(gl.where(mine, df, 0.0), (WARPS, TOKENS // WARPS, N, PIECE))
    return gl.reshape(gl.sum(kept, 1), (TOKENS, PIECE))


@gluon.jit
def _piece_of(slots, slot, part: gl.constexpr):
    return slots.index(slot).slice(part * PIECE, PIECE, 1)


@gluon.jit
def _matrices_of(exchanged):
    """z of a piece, [tokens, N side by side], as matrices."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0], [4, 0]],
        [[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]],
        [[8, 0], [16, 0], [32, 0]],
        [],
        [TOKENS, COLUMNS],
    )
    z = gl.reshape(exchanged.load(layout), (TOKENS * N, PIECE))
    return gl.convert_layout(z, MATRICES, assert_trivial=True)


@gluon.jit
def _store_sums(
    sums, dres, dpost, dx_read, df_read, post, res, chunk, first, T, SUMS_READ: gl.constexpr
):  # fmt: skip
    """[chunks, T, numbers]: of a token dpost, then dres, then the gradient of its read weights. All but the first are
    transposed, and those of a stream alone are in each row.
    """
    NUMBERS: gl.constexpr = N * (1 + N + (1 if SUMS_READ else 0))
    t, i, live = _places(first, T)
    o = _columns()
    at = sums + (chunk.to(gl.int64) * T + t) * NUMBERS
    gl.store(at + o, dpost, mask=live & (i == 0))
    gl.store(at + N + o * N + i, dres, mask=live)
    if SUMS_READ:  # of x and f with d, in each column; those of y with d follow
        mixed = dx_read * _load_turned(res, first, T)
        mixed += gl.where(i == 0, df_read * load_float(post, t * N + o, live), 0.0)
        total = gl.sum(gl.reshape(mixed, (TOKENS, N, N)), 1)
        t = gl.arange(0, TOKENS, gl.SliceLayout(1, total.type.layout))[:, None]
        o = gl.arange(0, N, gl.SliceLayout(0, total.type.layout))[None, :]
        at = sums + (chunk.to(gl.int64) * T + first + t) * NUMBERS + N + N * N
        gl.store(at + o, total, mask=t < T - first)


@gluon.jit(do_not_specialize=["T", "span"])
def streams_bwd_eight_kernel(
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
    post,
    res,
    dx,
    df,
    sums,
    T,
    span,
    C: gl.constexpr,
    P: gl.constexpr,
    CHUNK: gl.constexpr,
    SUMS_READ: gl.constexpr,
    DZ_WIDTH: gl.constexpr,
):
    PARTS: gl.constexpr = 2 * P // PART_ROWS
    first = gl.program_id(0) * TOKENS
    begin = gl.program_id(1) * (span // CHUNK) * CHUNK  # = program * span, and the compiler sees that it is aligned
    end = gl.minimum(begin + span, C)
    x_slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, N * TOKENS, WIDTH], STREAM_LAYOUT)
    g_slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, N * TOKENS, WIDTH], STREAM_LAYOUT)
    f_slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TOKENS, WIDTH], STREAM_LAYOUT)
    d_slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TOKENS, WIDTH], STREAM_LAYOUT)
    pieces = gl.allocate_shared_memory(gl.bfloat16, [PIECES * PARTS, PART_ROWS, COLUMNS], PHI_LAYOUT)
    exchanged = gl.allocate_shared_memory(gl.float32, [TOKENS, COLUMNS], EXCHANGED)
    loaded = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    computed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    phi_loaded = gl.allocate_shared_memory(gl.int64, [PIECES, 1], mbarrier.MBarrierLayout())
    phi_free = gl.allocate_shared_memory(gl.int64, [PIECES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(loaded.index(slot), count=1)
        mbarrier.init(computed.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    for slot in gl.static_range(PIECES):
        mbarrier.init(phi_loaded.index(slot), count=1)
        mbarrier.init(phi_free.index(slot), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_compute, (x_slots, g_slots, f_slots, d_slots, exchanged, loaded, computed, ready, taken, read_weights,
                        norm_weight, norm_share, k_share, k_more, post, res, sums, first, T, begin, end, CHUNK,
                        SUMS_READ)),
            (_multiply, (dz_parts, pieces, exchanged, phi_loaded, phi_free, ready, taken, first, T, begin, end, P,
                         PARTS, DZ_WIDTH)),
            (_load, (x, g, f, dx_in, x_slots, g_slots, f_slots, d_slots, loaded, free, first, begin, end)),
            (_load_phi, (phi_parts, pieces, phi_loaded, phi_free, begin, end, PARTS)),
            (_store, (dx, df, x_slots, f_slots, computed, free, first, begin, end)),
        ],
        [4, 1, 1, 1],
        [MULTIPLY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


def takes(channels: int, rows: int) -> bool:
    """Whether so many channels are whole slots, and so many rows of phi are those of all coefficients."""
    return channels % SUM_WIDTH == 0 and rows == STREAMS * (STREAMS + 2)


def phi_layout(rows: int) -> PhiLayout:
    """How the parts of so many rows of phi lie: eight channels of all streams side by side."""
    return PhiLayout(2 * rows, True, PIECE_COLUMNS, 2, PIECE_COLUMNS, STREAMS)


def write_streams_bwd(
    x: Tensor,
    g: Tensor,
    collapse: CollapseGradient,
    projection: ProjectionGradient,
    write: Write,
    need_read_weights: bool,
) -> WriteGradients:
    """As of `_streams_bwd`; phi has the layout above."""
    f, _, post, res = write
    assert res is not None
    T, _, C = tokens_of(x)
    programs, chunk = cdiv(T, HOPPER_TOKENS), chunk_width(C)
    span = chunks_span(C, programs, x.device)
    numbers = STREAMS * (1 + STREAMS + need_read_weights)
    gradients = WriteGradients(
        empty(x, *x.shape),
        empty(f, *f.shape),
        None,
        empty(post, *post.shape),
        empty(res, *res.shape),
        empty(collapse.read_weights, *collapse.read_weights.shape) if need_read_weights else None,
        empty(x, cdiv(C, chunk), T, numbers, dtype=FLOAT),
    )
    *packed, rows = projection
    run(
        streams_bwd_eight_kernel, (programs, cdiv(C, span)),
        g, *collapse, *packed, x, f, post, res, gradients.dx, gradients.df, gradients.sums, T, span, C, rows,
        CHUNK=chunk, SUMS_READ=need_read_weights, DZ_WIDTH=packed_dz_width(rows), num_warps=8,
    )  # fmt: skip
    return gradients


def _tiles(args: tuple[Any, ...], constants: dict[str, Any]) -> dict[int, Tiles]:
    T, C, P = args[16], args[18], args[19]
    streams, rows = Tiles((T * STREAMS, C), (STREAM_ROWS, SLOT_CHANNELS)), Tiles((T, C), (HOPPER_TOKENS, SLOT_CHANNELS))
    layout = phi_layout(P)
    phi = Tiles((STREAMS * layout.blocks(C) * layout.rows, PIECE_COLUMNS), (PHI_ROWS, PIECE_COLUMNS))
    return {0: streams, 1: rows, 8: phi, 9: streams, 10: rows, 13: streams, 14: rows}


tiled_arguments[streams_bwd_eight_kernel.__name__] = _tiles
