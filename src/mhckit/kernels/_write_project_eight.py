"""F1 on Hopper for eight streams of bfloat16: what `_write_project` computes, for any number of tokens.

As in `_write_project_hopper` every kind of work has warps of its own:

    load        the copy engine brings the streams and f, 64 tokens x 32 channels, into one of four slots
    write       eight warps turn the streams in a slot into y, f into x_in, and sum the squares
    store       the copy engine takes both out of the slot
    load_phi    the copy engine brings the pieces of phi, 32 channels of a stream each
    project     four warps load phi, split it in bfloat16 parts and multiply them with y, where that lies

A program has 64 tokens, which share phi: for 32 of them it would be twice the bytes that they read and write. Sums over
channels end where a chunk of them does, as in `_streams_bwd_hopper`: how many programs share the channels may follow
the number of tokens. Coefficients, 72 for each token, are loaded anew for every step, from L1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mhckit.ops._register import empty

from ._descriptors import Tiles, shared_layout, tiled_arguments
from ._device import bfloat16_parts, collapse, fold, join_last, load_float, rounded, sum_parts
from ._hopper_columns import load_columns
from ._hopper_copies import COPY_REGISTERS
from ._hopper_launch import HOPPER_TOKENS, chunk_width, chunks_span
from ._launch import FLOAT, SUM_WIDTH, cdiv, tokens_of
from ._launcher import run

STREAMS = 8
# Channels of a slot, and of a piece of phi.
SLOT_CHANNELS = 32
# Of phi: rows, and those of a tile.
ALL_ROWS = STREAMS * (STREAMS + 2)
PHI_ROWS = 16

TOKENS = gl.constexpr(HOPPER_TOKENS)
N = gl.constexpr(STREAMS)
WIDTH = gl.constexpr(SLOT_CHANNELS)
ROWS = gl.constexpr(PHI_ROWS)
TILES = gl.constexpr(ALL_ROWS // PHI_ROWS)
SLOTS = gl.constexpr(4)
PIECES = gl.constexpr(8)  # with four of them, and five slots, F1 takes 7% longer
SHARED = gl.constexpr(shared_layout(2, SLOT_CHANNELS))
PHI_LAYOUT = gl.constexpr(shared_layout(4, SLOT_CHANNELS))
PROJECT_WARPS = gl.constexpr(4)
PROJECT_REGISTERS = gl.constexpr(176)

# Rows of phi whose parts a dot takes as its left operand: 16 of each warp, eight rows' high parts and then their low
# ones. A thread loads pairs of channels as it multiplies them, and splits them itself. Half a warp loads every other of
# eight rows, which lie in different banks (`_part_row`).
DOT_ROWS = gl.constexpr(32)
DOTS = gl.constexpr(-(-ALL_ROWS // DOT_ROWS.value))
MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HOPPER_TOKENS, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2))
PHI_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16]],
        lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [1, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[2 * PHI_ROWS, SLOT_CHANNELS],
    )
)
# The same of half as many rows, which two warps have each: [twice, rows, channels].
PHI_PAIRS_TWICE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 8], [0, 0, 16]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 2, 0], [0, 4, 0], [0, 1, 0]],
        warp_bases=[[0, 8, 0], [1, 0, 0]],
        block_bases=[],
        shape=[2, PHI_ROWS, SLOT_CHANNELS],
    )
)


@gluon.jit
def _load(x, f, x_slots, f_slots, loaded, free, first, begin, end, C: gl.constexpr):
    for step in range((end - begin) // WIDTH):
        slot, channel = step % SLOTS, begin + step * WIDTH
        mbarrier.wait(free.index(slot), step // SLOTS % 2 ^ 1)
        arrived = loaded.index(slot)
        mbarrier.expect(arrived, (N + 1) * TOKENS * WIDTH * 2)
        for i in gl.static_range(N):
            at = [first, i * C + channel]
            tma.async_copy_global_to_shared(x, at, arrived, _stream(x_slots, slot, i))
        tma.async_copy_global_to_shared(f, [first, channel], arrived, f_slots.index(slot))


@gluon.jit
def _store(y, x_in, x_slots, f_slots, written, free, first, begin, end, C: gl.constexpr):
    for step in range((end - begin) // WIDTH):
        slot, channel = step % SLOTS, begin + step * WIDTH
        mbarrier.wait(written.index(slot), step // SLOTS % 2)
        for i in gl.static_range(N):
            tma.async_copy_shared_to_global(y, [first, i * C + channel], _stream(x_slots, slot, i))
        if x_in is not None:
            tma.async_copy_shared_to_global(x_in, [first, channel], f_slots.index(slot))
        tma.store_wait(0)
        mbarrier.arrive(free.index(slot), count=1)


@gluon.jit
def _stream(slots, slot, i: gl.constexpr):
    return slots.index(slot).slice(i * TOKENS, TOKENS)


@gluon.jit
def _load_phi(phi, pieces, loaded, free, begin, end, C: gl.constexpr):
    for piece in range((end - begin) // WIDTH * N):
        slot = piece % PIECES
        arrived = loaded.index(slot)
        mbarrier.wait(free.index(slot), piece // PIECES % 2 ^ 1)
        mbarrier.expect(arrived, TILES * ROWS * WIDTH * 4)
        for r in gl.static_range(TILES):
            at = [r * ROWS, piece % N * C + begin + piece // N * WIDTH]
            tma.async_copy_global_to_shared(phi, at, arrived, pieces.index(slot * TILES + r))


@gluon.jit
def _write(
    x_slots, f_slots, loaded, written, f_bias, post, res, read_weights, squares, first, T, begin, end,
    COLLAPSES: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0])
    # Of the program's own tokens, so that a thread's offsets have 32 bits.
    t, count, before = gl.arange(0, TOKENS, gl.SliceLayout(1, layout)), T - first, first.to(gl.int64)
    mine = gl.minimum(t, count - 1)  # no result beyond the last token is stored
    post += before * N
    res += before * (N * N)
    if COLLAPSES:
        read_weights += before * N
    zero = gl.zeros([TOKENS, WIDTH], gl.float32, layout)
    step = 0
    for chunk in range(begin // CHUNK, gl.cdiv(end, CHUNK)):
        square = fold(zero, zero, 8, True)
        for channel in range(chunk * CHUNK, gl.minimum(chunk * CHUNK + CHUNK, end), WIDTH):
            slot = step % SLOTS
            mbarrier.wait(loaded.index(slot), step // SLOTS % 2)
            f = f_slots.index(slot).load(layout).to(gl.float32)
            if f_bias is not None:
                c = channel + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
                f += load_float(f_bias, c, c < end)[None, :]
            streams = ()
            for i in gl.static_range(N):
                streams = streams + (_stream(x_slots, slot, i).load(layout).to(gl.float32),)
            ys = ()
            collapsed = zero
            for o in gl.static_range(N):
                mixed = collapse(load_columns(res, mine * N + o, None, N), streams, N)
                y = gl.fma(gl.load(post + mine * N + o).to(gl.float32)[:, None], f, mixed)  # as `write_stream`
                y = rounded(y, gl.bfloat16, True)
                ys = ys + (y,)
                wide = y.to(gl.float32)
                square += fold(wide, wide, 8, True)
                if COLLAPSES:
                    weight = gl.load(read_weights + mine * N + o).to(gl.float32)[:, None]
                    collapsed = weight * wide if o == 0 else gl.fma(weight, wide, collapsed)  # as `collapse`
            x_slots.index(slot).store(gl.reshape(_one_below_the_other(ys), (N * TOKENS, WIDTH)))
            if COLLAPSES:
                f_slots.index(slot).store(rounded(collapsed, gl.bfloat16, True))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(written.index(slot), count=1)
            step += 1
        at = squares + chunk.to(gl.int64) * T + before + t
        gl.store(at, gl.convert_layout(gl.sum(square, 1), gl.SliceLayout(1, layout)), mask=t < count)


@gluon.jit
def _chunk_before(channel, CHUNK: gl.constexpr):
    return ((channel - 1) // CHUNK).to(gl.int64)


@gluon.jit
def _one_below_the_other(tiles):
    """[tiles, rows, columns]. A thread holds the values that it held of each."""
    joined = gl.reshape(join_last(tiles), (tiles[0].shape[0], tiles[0].shape[1], len(tiles)))
    return gl.permute(joined, (2, 0, 1))


@gluon.jit
def _load_rows(pieces, norm_weight, piece, begin, k: gl.constexpr, C: gl.constexpr):
    """Of a piece of phi, those of dot k: the last dot has its rows twice."""
    first = piece % PIECES * TILES + 2 * k
    if k + 1 < DOTS:
        rows = pieces.index(first)._reinterpret(gl.float32, [DOT_ROWS, WIDTH], PHI_LAYOUT).load(PHI_PAIRS)
    else:
        last = pieces.index(first).load(gl.SliceLayout(0, PHI_PAIRS_TWICE))
        rows = gl.reshape(gl.expand_dims(last, 0).broadcast_to([2, ROWS, WIDTH]), (DOT_ROWS, WIDTH))
        rows = gl.convert_layout(rows, PHI_PAIRS, assert_trivial=True)
    if norm_weight is not None:
        c = begin + piece // N * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, PHI_PAIRS))
        rows *= load_float(norm_weight, piece % N * C + c, c < C)[None, :]
    return rows


@gluon.jit
def _parts(rows):
    """A dot's left operand: high and low parts of its rows, [2 DOT_ROWS, channels]."""
    high, low = bfloat16_parts(rows, True)
    split = gl.reshape(gl.join(high, low), (DOT_ROWS // 8, 4, 2, WIDTH, 2))
    split = gl.reshape(gl.permute(split, (0, 4, 2, 1, 3)), (2 * DOT_ROWS, WIDTH))
    return gl.convert_layout(split, OPERAND, assert_trivial=True)


@gluon.jit
def _keep(parts):
    """Nothing else has these registers before. The tensor cores may read them until here, which the compiler does not
    know; what it makes of this is nothing at all.
    """
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [parts], dtype=gl.bfloat16, is_pure=False, pack=2)


@gluon.jit
def _part_row(row):
    """Which row of phi a row of sums is of, when both parts are added up."""
    return row // 8 * 8 + row % 4 * 2 + row // 4 % 2


@gluon.jit
def _project(
    x_slots, pieces, written, free, phi_loaded, phi_free, norm_weight, partials, first, T, begin, end,
    C: gl.constexpr, P: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Splits the rows of one dot while the tensor cores are busy with another, and loads those that come next in their
    place.
    """
    nothing = gl.zeros([2 * DOT_ROWS, TOKENS], gl.float32, MMA)
    sums = ()
    for _ in gl.static_range(DOTS):
        sums = sums + (nothing,)
    count = (end - begin) // WIDTH * N
    streams = x_slots._reinterpret(gl.bfloat16, [SLOTS * N, TOKENS, WIDTH], SHARED)
    mbarrier.wait(phi_loaded.index(0), 0)
    rows = ()
    for k in gl.static_range(DOTS):
        rows = rows + (_load_rows(pieces, norm_weight, 0, begin, k, C),)
    for step in range((end - begin) // WIDTH):
        slot = step % SLOTS
        mbarrier.wait(written.index(slot), step // SLOTS % 2)
        for stream in range(N):
            piece = step * N + stream
            following = gl.minimum(piece + 1, count - 1)  # behind the last piece that one again
            mbarrier.wait(phi_loaded.index(following % PIECES), following // PIECES % 2)
            y = streams.index(slot * N + stream).permute((1, 0))
            split = ()
            begun = ()
            next_rows = ()
            for k in gl.static_range(DOTS):
                split = split + (_parts(rows[k]),)
                begun = begun + (warpgroup_mma(split[k], y, sums[k], is_async=True),)
                # Each thread says for itself that it has all of the piece, and they need not meet. That orders nothing:
                # the thread has split the rows, so that they were loaded before.
                if k + 1 == DOTS:
                    async_copy.mbarrier_arrive(phi_free.index(piece % PIECES), increment_count=False)
                next_rows = next_rows + (_load_rows(pieces, norm_weight, following, begin, k, C),)
            rows = next_rows
            sums = warpgroup_mma_wait(0, deps=begun)
            for k in gl.static_range(DOTS):
                _keep(split[k])
        gl.thread_barrier()
        mbarrier.arrive(free.index(slot), count=1)
        after = begin + (step + 1) * WIDTH
        if (after % CHUNK == 0) | (after >= end):
            zeros = ()
            for k in gl.static_range(DOTS):
                _store_sums(partials, _chunk_before(after, CHUNK), sums[k], k * DOT_ROWS, first, T, P)
                zeros = zeros + (nothing,)
            sums = zeros


@gluon.jit
def _store_sums(partials, chunk, z, row: gl.constexpr, first, T, P: gl.constexpr):
    """Of [rows of parts, tokens], from one of phi's rows on. Offsets from the program's first token have 32 bits."""
    total = sum_parts(z)
    p = row + _part_row(gl.arange(0, DOT_ROWS, gl.SliceLayout(1, total.type.layout)))[:, None]
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, total.type.layout))[None, :]
    partials += (chunk * T + first) * P
    gl.store(partials + (t * P + p), total, mask=(t < T - first) & (p < P))


@gluon.jit(do_not_specialize=["T", "span"])
def write_project_eight_kernel(
    x,
    f,
    f_bias,
    post,
    res,
    phi,
    norm_weight,
    read_weights,
    y,
    x_in,
    partials,
    squares,
    T,
    span,
    C: gl.constexpr,
    P: gl.constexpr,
    CHUNK: gl.constexpr,
):
    first = gl.program_id(0) * TOKENS
    begin = gl.program_id(1) * (span // CHUNK) * CHUNK  # = program * span, and the compiler sees that it is aligned
    end = gl.minimum(begin + span, C)
    x_slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, N * TOKENS, WIDTH], SHARED)
    f_slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TOKENS, WIDTH], SHARED)
    pieces = gl.allocate_shared_memory(gl.float32, [PIECES * TILES, ROWS, WIDTH], PHI_LAYOUT)
    loaded = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    written = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    phi_loaded = gl.allocate_shared_memory(gl.int64, [PIECES, 1], mbarrier.MBarrierLayout())
    phi_free = gl.allocate_shared_memory(gl.int64, [PIECES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(loaded.index(slot), count=1)
        mbarrier.init(written.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)  # of `project`, and of `store`
    for slot in gl.static_range(PIECES):
        mbarrier.init(phi_loaded.index(slot), count=1)
        mbarrier.init(phi_free.index(slot), count=32 * PROJECT_WARPS)
    fence_async_shared()
    gl.thread_barrier()
    COLLAPSES: gl.constexpr = x_in is not None
    gl.warp_specialize(
        [
            (_write, (x_slots, f_slots, loaded, written, f_bias, post, res, read_weights, squares, first, T, begin,
                      end, COLLAPSES, CHUNK)),
            (_project, (x_slots, pieces, written, free, phi_loaded, phi_free, norm_weight, partials, first, T, begin,
                        end, C, P, CHUNK)),
            (_load, (x, f, x_slots, f_slots, loaded, free, first, begin, end, C)),
            (_load_phi, (phi, pieces, phi_loaded, phi_free, begin, end, C)),
            (_store, (y, x_in, x_slots, f_slots, written, free, first, begin, end, C)),
        ],
        [PROJECT_WARPS, 1, 1, 1],
        [PROJECT_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


def project_partials(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Of the arguments before them: partial sums of z [chunks, T, P], and of the squares [chunks, T]."""
    x, phi = args[0], args[5]
    T, _, C = tokens_of(x)
    programs, chunk = cdiv(T, HOPPER_TOKENS), chunk_width(C)
    span = chunks_span(C, programs, x.device)
    z, squares = empty(phi, cdiv(C, chunk), T, phi.shape[0], dtype=FLOAT), empty(phi, cdiv(C, chunk), T, dtype=FLOAT)
    run(
        write_project_eight_kernel, (programs, cdiv(C, span)),
        *args, z, squares, T, span, C, phi.shape[0], CHUNK=chunk, num_warps=8,
    )  # fmt: skip
    return z, squares


def takes(channels: int, rows: int) -> bool:
    """Whether so many channels are whole slots, and so many rows of phi are those of all coefficients."""
    return channels % SUM_WIDTH == 0 and rows == ALL_ROWS


def _tiles(args: tuple[Any, ...], constants: dict[str, Any]) -> dict[int, Tiles]:
    T, C, P = args[12], args[14], args[15]
    streams = Tiles((T, STREAMS * C), (HOPPER_TOKENS, SLOT_CHANNELS))
    rows = Tiles((T, C), (HOPPER_TOKENS, SLOT_CHANNELS))
    phi = Tiles((P, STREAMS * C), (PHI_ROWS, SLOT_CHANNELS))
    tiles = {0: streams, 1: rows, 5: phi, 8: streams}
    return tiles if args[9] is None else tiles | {9: rows}


tiled_arguments[write_project_eight_kernel.__name__] = _tiles
