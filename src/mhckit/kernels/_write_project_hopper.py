"""F1 on Hopper. For many tokens: the same sums in the same order, and so the same bits, as `_write_project`.

What limits F1 in plain Triton is how it asks for memory: 128 bytes of a row at a time, because wider tiles do not fit
beside phi's. Here a step is 32 tokens x 128 channels, so rows are asked for 256 bytes at a time, and every kind of work
has warps of its own, which wait for each other at barriers and never for themselves:

    load        the copy engine brings the streams and f into one of STEPS_IN_FLIGHT slots
    write       eight warps turn the streams in a slot into y, f into x_in, and sum the squares
    store       the copy engine takes both out of the slot
    load_phi    the copy engine brings the pieces of phi, 64 channels each
    project     four warps split phi in bfloat16 parts, in place, and multiply them with y, also in place

Where rows begin anywhere, because C is no multiple of 8, four warps move them instead of `load` and `store`
(`_hopper_rows`), `write` takes them as late as they arrive (`_hopper_late`), and `project`, which then asks for phi,
takes that as late as it arrives (`_hopper_late_phi`). Sums are over 120 channels instead of 128, and this form serves
few tokens, too: the plain one has other sums there.

A program has 64 tokens, in two groups of 32 that share a piece of phi and take turns: step 2k is the first group's,
step 2k + 1 the second's, both with the channels that make one sum. Loops are kept short: five of them run at once on a
multiprocessor, and unrolled they wait for their own instructions (213 us instead of 169, docs/performance.md).
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._descriptors import Tiles, tiled_arguments
from ._device import (
    bfloat16_parts,
    fold,
    load_float,
    load_per_token,
    one_below_the_other,
    rounded,
    sum_parts,
    write_stream,
)
from ._hopper_copies import (
    COPY_REGISTERS,
    GROUP,
    PANEL,
    PANELS,
    SHARED,
    SHARED_FLOAT,
    STREAM_TILE,
    load_tiles,
    steps_of,
    store_tiles,
)
from ._hopper_late import clear_ends, load_late_tile, own_channels
from ._hopper_late_phi import MOST_TILES, ROWS_LAYOUT, allocate_ends, begin_late_piece, keep_ends, load_late_rows
from ._hopper_launch import MAX_PARTS
from ._hopper_rows import COPY_WARPS, ROW_REGISTERS, allocate_carried, begin_step, found_here, store_step
from ._launch import SUM_WIDTH
from ._partial_sums import CHAIN, channels_of_part, end_pairs, push

# Of a tile of phi [rows, channels]. Four of them are, with their low parts, all that a dot takes.
PHI_ROWS = 8
MAX_ROWS = MOST_TILES.value * PHI_ROWS
PHI_TILE = gl.constexpr(PHI_ROWS)
MOST_PARTS = gl.constexpr(MAX_PARTS)
STEPS_IN_FLIGHT = gl.constexpr(3)
# For each thread of `project`, where the copy engine moves the streams and where warps do; `write` has what the others
# leave of 64K.
PROJECT_REGISTERS = gl.constexpr(176)
PROJECT_REGISTERS_BESIDE_ROWS = gl.constexpr(152)


@gluon.jit
def _load_phi(
    phi, pieces, loaded, free, begin, end, C: gl.constexpr, N: gl.constexpr, TILES: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """PIECES of phi are in shared memory at once: two in use, the others on their way or being split."""
    for part in range((end - begin) // PANEL * N):  # a stream's part of a piece
        piece, i = part // N, part % N
        slot = piece % PIECES
        arrived = loaded.index(slot)
        if i == 0:
            mbarrier.wait(free.index(slot), piece // PIECES % 2 ^ 1)
            mbarrier.expect(arrived, N * TILES * PHI_TILE * PANEL * 4)
        for r in gl.static_range(TILES):
            at = [r * PHI_TILE, i * C + begin + piece * PANEL]
            tma.async_copy_global_to_shared(phi, at, arrived, pieces.index((slot * N + i) * TILES + r))


@gluon.jit
def _move(
    x, f, y, x_in, x_slots, f_slots, carried, loaded, written, free, first, T, begin, end, C: gl.constexpr,
    N: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """What `load` and `store` do where 128 divides C. The slot that a step is loaded into was stored one step ago."""
    steps = steps_of(begin, end, C, STEP)
    x_slots = found_here(x_slots)
    for step in range(-2, steps):
        later = step + 2
        if later < steps:
            slot = later % STEPS_IN_FLIGHT
            mbarrier.wait(free.index(slot), later // STEPS_IN_FLIGHT % 2 ^ 1)
            begin_step((x,), (f,), (x_slots,), (f_slots,), loaded, later, first, T, begin, C, N, STEP, STEPS_IN_FLIGHT)
        if step >= 0:
            mbarrier.wait(written.index(step % STEPS_IN_FLIGHT), step // STEPS_IN_FLIGHT % 2)
            store_step(y, x_in, x_slots, f_slots, carried, step, first, T, begin, end, C, N, STEP, STEPS_IN_FLIGHT)
            gl.thread_barrier()


@gluon.jit
def _panel_of_piece(piece, C: gl.constexpr):
    """Which of a step's panels a piece of phi is multiplied with."""
    return piece % PANELS if C % (PANELS * PANEL) == 0 else PANELS - 1 - piece % PANELS


@gluon.jit
def _channels_of(piece, panel, begin, C: gl.constexpr, STEP: gl.constexpr, layout: gl.constexpr):
    """The channels of a piece, two to a step, of which it is one panel; and which of them are its own."""
    if C % (PANELS * PANEL) == 0:
        return begin + piece * PANEL + gl.arange(0, PANEL, layout), gl.full([PANEL], True, gl.int1, layout)
    else:
        within = panel * PANEL + gl.arange(0, PANEL, layout)
        c = begin + piece // PANELS * STEP + within
        return c, (within < STEP) & (c < C)


@gluon.jit
def _write(
    x_slots, f_slots, loaded, written, f_bias, post, res, read_weights, squares, first, T, begin, end,
    split, COLLAPSES: gl.constexpr, C: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    t = first.to(gl.int64) + gl.arange(0, GROUP, gl.SliceLayout(1, layout))
    # What belongs to the group whose turn it is, and to the other: they swap after every step. Objects of their own,
    # since what a loop swaps with itself counts as unchanged.
    posts, other_posts = load_per_token(post, t, t < T, N), load_per_token(post, t + GROUP, t + GROUP < T, N)
    mixes, other_mixes = _residual_map(res, t, T, N), _residual_map(res, t + GROUP, T, N)
    reads, other_reads = posts, other_posts
    if COLLAPSES:
        reads = load_per_token(read_weights, t, t < T, N)
        other_reads = load_per_token(read_weights, t + GROUP, t + GROUP < T, N)
    zero = gl.zeros([GROUP, PANEL], gl.float32, layout)
    square = fold(zero, zero, 8, True)
    nothing = gl.sum(square, 1)
    chain, other_chain = nothing, nothing * 0.0
    pairs, other_pairs = (nothing, nothing, nothing), (other_chain, other_chain, other_chain)
    for step in range(steps_of(begin, end, C, STEP)):
        slot = step % STEPS_IN_FLIGHT
        mbarrier.wait(loaded.index(slot), step // STEPS_IN_FLIGHT % 2)
        if C % 8 != 0:
            clear_ends((x_slots,), (f_slots,), step, begin, C, N, STEP, STEPS_IN_FLIGHT)
        for p in range(PANELS):
            own = own_channels(p, STEP, layout)
            tiles, others = x_slots.index(slot * PANELS + p), x_slots.index(slot * PANELS + 1 - p)
            streams = ()
            for i in gl.static_range(N):
                tile, other = tiles.slice(i * GROUP, GROUP), others.slice(i * GROUP, GROUP)
                streams = streams + (_load(tile, other, own, t, C, N, i, layout),)
            # Behind the streams: before them it makes every panel spill a register, where rows begin anywhere.
            f = _load(f_slots.index(slot * PANELS + p), f_slots.index(slot * PANELS + 1 - p), own, t, C, 1, 0, layout)
            if f_bias is not None:
                c, here = _channels_of(step // 2 * PANELS + p, p, begin, C, STEP, gl.SliceLayout(0, layout))
                f += load_float(f_bias, c, here)[None, :]
            ys = ()
            collapsed = zero
            for o in gl.static_range(N):
                y = rounded(write_stream(o, streams, f, posts, mixes, N), gl.bfloat16, True)
                ys = ys + (y,)
                wide = y.to(gl.float32)
                square += fold(wide, wide, 8, True)
                if COLLAPSES:
                    collapsed = reads[o] * wide if o == 0 else gl.fma(reads[o], wide, collapsed)  # as `collapse`
            tiles.store(one_below_the_other(one_below_the_other(ys[0], ys[1]), one_below_the_other(ys[2], ys[3])))
            if COLLAPSES:
                f_slots.index(slot * PANELS + p).store(rounded(collapsed, gl.bfloat16, True))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(written.index(slot), count=1)
        chain += gl.sum(square, 1)
        square = fold(zero, zero, 8, True)
        if _ends_a_chain(step, begin, end, STEP):
            pairs = push(pairs, chain, step // (2 * CHAIN))
            chain = nothing
        posts, other_posts, mixes, other_mixes, reads, other_reads = (
            other_posts, posts, other_mixes, mixes, other_reads, reads,
        )  # fmt: skip
        chain, other_chain, pairs, other_pairs = other_chain, chain, other_pairs, pairs
    chains = gl.cdiv(end - begin, CHAIN * STEP)
    at = split.to(gl.int64) * T + t
    _store_squares(squares, at, end_pairs(pairs, chains), t < T, layout)
    _store_squares(squares, at + GROUP, end_pairs(other_pairs, chains), t + GROUP < T, layout)


@gluon.jit
def _load(tile, other, own, t, C: gl.constexpr, N: gl.constexpr, STREAM: gl.constexpr, layout: gl.constexpr):
    """A stream's channels as float32."""
    if C % 8 != 0:
        return load_late_tile(tile, other, own, t, C, N, STREAM, layout)
    else:
        return tile.load(layout).to(gl.float32)


@gluon.jit
def _store_squares(squares, at, total, live, layout: gl.constexpr):
    gl.store(squares + at, gl.convert_layout(total, gl.SliceLayout(1, layout)), mask=live)


@gluon.jit
def _residual_map(res, t, T, N: gl.constexpr):
    return () if res is None else load_per_token(res, t, t < T, N * N)


@gluon.jit
def _ends_a_chain(step, begin, end, STEP: gl.constexpr):
    """Whether a sum of this step is the last of a chain, or of the slice."""
    done = (step // 2 + 1) * STEP
    return (done % (CHAIN * STEP) == 0) | (done >= end - begin)


@gluon.jit
def _split_phi(
    pieces, ends, norm_weight, loaded, piece, begin, C: gl.constexpr, N: gl.constexpr, TILES: gl.constexpr,
    PIECES: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """A piece of phi becomes its parts, in place: of each tile eight rows of high parts, then eight of low ones."""
    slot, panel = piece % PIECES, _panel_of_piece(piece, C)
    mbarrier.wait(loaded.index(slot), piece // PIECES % 2)
    if len(ends) > 0:
        if panel == 1:
            keep_ends(pieces, ends[0], slot * N * TILES, C, N, TILES)
    parts = ()
    for k in gl.static_range(N * TILES):
        tile = pieces.index(slot * N * TILES + k)
        rows = tile.load(ROWS_LAYOUT) if len(ends) == 0 else load_late_rows(tile, ends[0], k % TILES, C, k // TILES)
        if norm_weight is not None:
            c, here = _channels_of(piece, panel, begin, C, STEP, gl.SliceLayout(0, ROWS_LAYOUT))
            rows *= load_float(norm_weight, k // TILES * C + c, here)[None, :]
        high, low = bfloat16_parts(rows, True)
        parts = parts + (one_below_the_other(high, low),)
    gl.thread_barrier()
    for k in gl.static_range(0, N * TILES, 4):  # four tiles at a time: between two stores the compiler puts a barrier
        four = one_below_the_other(
            one_below_the_other(parts[k], parts[k + 1]), one_below_the_other(parts[k + 2], parts[k + 3])
        )
        pieces.index(slot * N * TILES + k)._reinterpret(gl.bfloat16, [8 * PHI_TILE, PANEL], SHARED).store(four)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _project(
    x_slots, own_phi, ends, pieces, written, free, phi_loaded, phi_free, norm_weight, partials, first, T, begin, end,
    split, C: gl.constexpr, P: gl.constexpr, N: gl.constexpr, TILES: gl.constexpr, PIECES: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    """own_phi: phi where it arrives late, which is asked for here, or nothing; ends: as `keep_ends` has them."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    zero = gl.zeros([8 * PHI_TILE, GROUP], gl.float32, mma)
    nothing = sum_parts(zero)
    chain, other_chain = nothing, nothing * 0.0  # as in `_write`
    pairs, other_pairs = (nothing, nothing, nothing), (other_chain, other_chain, other_chain)
    steps = steps_of(begin, end, C, STEP)
    if len(own_phi) > 0:
        for piece in range(gl.minimum(PIECES, steps)):
            begin_late_piece(own_phi[0], pieces, phi_loaded, piece, begin, C, N, TILES, PIECES, STEP)
    for piece in range(2):
        _split_phi(pieces, ends, norm_weight, phi_loaded, piece, begin, C, N, TILES, PIECES, STEP)
    for step in range(steps):
        slot = step % STEPS_IN_FLIGHT
        mbarrier.wait(written.index(slot), step // STEPS_IN_FLIGHT % 2)
        z = zero
        for k in gl.static_range(PANELS):
            for o in gl.static_range(N):
                # Rows of the next tiles follow those of a stream's parts; their sums are not stored.
                tile = pieces.index(((step // 2 * 2 + k) % PIECES * N + o) * TILES)
                rows = tile._reinterpret(gl.bfloat16, [8 * PHI_TILE, PANEL], SHARED)
                columns = x_slots.index(slot * PANELS + _panel_of_piece(k, C)).slice(o * GROUP, GROUP).permute((1, 0))
                z = warpgroup_mma(rows, columns, z, use_acc=(k + o) > 0, is_async=True)
        # Each step splits a piece of the next sum, while it multiplies; a fourth piece has room, or the third waits.
        if (PIECES > 3 or step % 2 == 0) and step + 2 < steps:
            _split_phi(pieces, ends, norm_weight, phi_loaded, step + 2, begin, C, N, TILES, PIECES, STEP)
        z = warpgroup_mma_wait(0, deps=[z])
        gl.thread_barrier()
        mbarrier.arrive(free.index(slot), count=1)
        if step % 2 == 1:
            mbarrier.arrive(phi_free.index((step - 1) % PIECES), count=1)
            mbarrier.arrive(phi_free.index(step % PIECES), count=1)
            if len(own_phi) > 0:
                for piece in range(step - 1 + PIECES, gl.minimum(step + 1 + PIECES, steps)):
                    begin_late_piece(own_phi[0], pieces, phi_loaded, piece, begin, C, N, TILES, PIECES, STEP)
            if PIECES == 3 and step + 2 < steps:
                _split_phi(pieces, ends, norm_weight, phi_loaded, step + 2, begin, C, N, TILES, PIECES, STEP)
        chain += sum_parts(z)
        if _ends_a_chain(step, begin, end, STEP):
            pairs = push(pairs, chain, step // (2 * CHAIN))
            chain = nothing
        chain, other_chain, pairs, other_pairs = other_chain, chain, other_pairs, pairs
    chains = gl.cdiv(end - begin, CHAIN * STEP)
    slot = split.to(gl.int64) * T + first
    _store_sums(partials, slot, end_pairs(pairs, chains), T - first, P)
    _store_sums(partials, slot + GROUP, end_pairs(other_pairs, chains), T - first - GROUP, P)


@gluon.jit
def _store_sums(partials, slot, total, count, P: gl.constexpr):
    """[rows, tokens], of tokens that may be more than `count`."""
    p = gl.arange(0, total.shape[0], gl.SliceLayout(1, total.type.layout))[:, None]
    t = gl.arange(0, GROUP, gl.SliceLayout(0, total.type.layout))[None, :]
    gl.store(partials + (slot + t) * P + p, total, mask=(t < count) & (p < P))


@gluon.jit(do_not_specialize=["T"])
def write_project_hopper_kernel(
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
    N: gl.constexpr,
    WIDTH: gl.constexpr,
    STEP: gl.constexpr,
):
    TILES: gl.constexpr = (P + PHI_TILE - 1) // PHI_TILE
    PIECES: gl.constexpr = 4 if TILES < 4 else 3  # as many as fit
    TILED: gl.constexpr = C % (PANELS * PANEL) == 0
    first, split = gl.program_id(0) * (2 * GROUP), gl.program_id(1)
    begin, end = channels_of_part(split, span, WIDTH, C, MOST_PARTS)
    x_slots = gl.allocate_shared_memory(gl.bfloat16, [STEPS_IN_FLIGHT * PANELS, N * GROUP, PANEL], SHARED)
    f_slots = gl.allocate_shared_memory(gl.bfloat16, [STEPS_IN_FLIGHT * PANELS, GROUP, PANEL], SHARED)
    # A dot reads eight tiles' rows of parts from where a stream's begin, beyond the last ones too.
    pieces = gl.allocate_shared_memory(gl.float32, [PIECES * N * TILES + 4 - TILES, PHI_TILE, PANEL], SHARED_FLOAT)
    loaded = gl.allocate_shared_memory(gl.int64, [STEPS_IN_FLIGHT, 1], mbarrier.MBarrierLayout())
    written = gl.allocate_shared_memory(gl.int64, [STEPS_IN_FLIGHT, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STEPS_IN_FLIGHT, 1], mbarrier.MBarrierLayout())
    phi_loaded = gl.allocate_shared_memory(gl.int64, [PIECES, 1], mbarrier.MBarrierLayout())
    phi_free = gl.allocate_shared_memory(gl.int64, [PIECES, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(STEPS_IN_FLIGHT):
        mbarrier.init(loaded.index(k), count=1 if TILED else 32 * COPY_WARPS)
        mbarrier.init(written.index(k), count=1)
        mbarrier.init(free.index(k), count=2 if TILED else 1)  # of `project`, and of `store`
    for k in gl.static_range(PIECES):
        mbarrier.init(phi_loaded.index(k), count=1)
        mbarrier.init(phi_free.index(k), count=1)
    ends = ()
    if C % 4 != 0:
        ends = (allocate_ends(N, PHI_TILE),)
    fence_async_shared()
    COLLAPSES: gl.constexpr = x_in is not None
    # Written out twice: a tuple with a name keeps no constants. Where rows begin anywhere nobody waits at phi_free.
    if TILED:
        gl.warp_specialize(
            [
                (_write, (x_slots, f_slots, loaded, written, f_bias, post, res, read_weights, squares, first, T,
                          begin, end, split, COLLAPSES, C, N, STEP)),
                (_project, (x_slots, (), (), pieces, written, free, phi_loaded, phi_free, norm_weight, partials, first,
                            T, begin, end, split, C, P, N, TILES, PIECES, STEP)),
                (load_tiles, ((x,), (f,), (x_slots,), (f_slots,), loaded, free, first, begin, end, C, N,
                              STEPS_IN_FLIGHT)),
                (_load_phi, (phi, pieces, phi_loaded, phi_free, begin, end, C, N, TILES, PIECES)),
                (store_tiles, (y, x_in, x_slots, f_slots, written, free, first, begin, end, C, N, STEPS_IN_FLIGHT)),
            ],
            [4, 1, 1, 1],
            [PROJECT_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_write, (x_slots, f_slots, loaded, written, f_bias, post, res, read_weights, squares, first, T,
                          begin, end, split, COLLAPSES, C, N, STEP)),
                (_project, (x_slots, (phi,), ends, pieces, written, free, phi_loaded, phi_free, norm_weight, partials,
                            first, T, begin, end, split, C, P, N, TILES, PIECES, STEP)),
                (_move, (x, f, y, x_in, x_slots, f_slots, allocate_carried(N), loaded, written, free, first, T, begin,
                         end, C, N, STEP)),
            ],
            [4, COPY_WARPS],
            [PROJECT_REGISTERS_BESIDE_ROWS, ROW_REGISTERS],
        )  # fmt: skip


def _tiles(args: tuple[Any, ...], constants: dict[str, Any]) -> dict[int, Tiles]:
    T, C, P = args[12], args[14], args[15]
    streams, rows = Tiles((T, constants["N"] * C), STREAM_TILE), Tiles((T, C), STREAM_TILE)
    phi = Tiles((P, constants["N"] * C), (PHI_ROWS, STREAM_TILE[1]))
    if C % SUM_WIDTH:
        return {5: phi}
    tiles = {0: streams, 1: rows, 5: phi, 8: streams}
    return tiles if args[9] is None else tiles | {9: rows}


tiled_arguments[write_project_hopper_kernel.__name__] = _tiles
