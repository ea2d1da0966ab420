"""J on Hopper: what `_streams_bwd` computes behind a write-back, for four streams of bfloat16.

As in `_write_project_hopper` every kind of work has warps of its own, and rows are asked for 256 bytes at a time:

    load        the copy engine brings x, g, f and d, 32 tokens x 128 channels, into one of two slots (`_hopper_copies`)
    load_phi    the copy engine brings the packed parts of phi, 64 channels of all streams at a time
    compute     eight warps; dx takes the place of x in its slot, df that of f
    store       the copy engine takes both out of the slot

Where rows begin anywhere, because C is no multiple of 8, four warps move them instead of `load` and `store`, steps have
120 channels (`_hopper_rows`), and `compute` takes them as late as they arrive (`_hopper_late`).

A program has 64 tokens, in two groups of 32 that share phi and take turns: step 2k is the first group's, step 2k + 1
the second's, both with the same channels. A thread holds eight neighbouring channels of one token, the token's
coefficients, which it loads anew for every step, and its share of the sums over channels of both groups. Where rows
begin anywhere coefficients are in shared memory (`_hopper_staged`), and are loaded stream by stream.

Sums over channels end where a chunk of them does, at the same channels whatever a program's share of them is, and
`_parameters_bwd` adds the chunks up: how many programs share the channels may follow the number of tokens.
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

from ._descriptors import Tiles, tiled_arguments
from ._device import (
    add_mixed,
    collapse,
    fold,
    load_float,
    mixed_back,
    one_below_the_other,
    rounded,
    scaled,
    unpack_columns,
    write_row,
)
from ._gradients import CollapseGradient, ProjectionGradient, Write, WriteGradients
from ._hopper_columns import load_columns
from ._hopper_copies import COPY_REGISTERS, GROUP, PANEL, PANELS, SHARED, STREAM_TILE, load_tiles, steps_of, store_tiles
from ._hopper_dz import PART_ROWS, load_dz_of_group, stage_dz, staged_dz_of_group
from ._hopper_late import clear_ends, own_channels
from ._hopper_launch import (
    HOPPER_TOKENS,
    chunk_width,
    chunks_span,
    has_hopper_channels,
    hopper_step,
)
from ._hopper_rows import COPY_WARPS, allocate_carried, begin_step, store_step
from ._hopper_slots import allocate_slots, halves_of, load_stream, panel_of
from ._hopper_staged import BLOCK, load_collapsed, load_dz_operands, load_of_stream, stage_tokens
from ._hopper_totals import add_products, store_totals
from ._launch import (
    FLOAT,
    SUM_WIDTH,
    PhiLayout,
    cdiv,
    packed_dz_width,
    tokens_of,
)
from ._launcher import run

# A tile of phi is [rows of parts, channels].
PHI_TILE = (PART_ROWS.value, STREAM_TILE[1])
# Of phi's parts: tiles for each stream, at most; and where warps move rows, and shared memory has what they carry and
# what is staged (`_hopper_rows`, `_hopper_staged`). With a fourth one it would have to be 18 KB larger.
MAX_TILES = 4
MAX_TILES_BESIDE_ROWS = 3
SLOTS = gl.constexpr(2)
# Streams one below the other, as `_by_token` has each: eight channels of a row are a vector to the compiler.
STACKED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [32, 0], [64, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0], [0, 32]],
        block_bases=[],
        shape=[4 * GROUP.value, PANEL.value],
    )
)
# For each thread of the warps that move rows which begin anywhere. With fewer they spill, and with more `compute` does,
# which has what they leave: two registers, and J takes 305 us instead of 271.
MOVE_REGISTERS = gl.constexpr(96)


@gluon.jit
def _load_phi(
    phi_parts, pieces, barriers, begin, end, C: gl.constexpr, N: gl.constexpr, PARTS: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = (C + STEP - 1) // STEP * PANELS  # of a stream
    for piece in range(steps_of(begin, end, C, STEP)):
        slot = piece % PANELS
        arrived = barriers.index(slot)
        mbarrier.wait(barriers.index(PANELS + slot), piece // PANELS % 2 ^ 1)
        mbarrier.expect(arrived, N * PARTS * PART_ROWS * PANEL * 2)
        for k in range(N * PARTS):
            block = k // PARTS * BLOCKS + begin // STEP * PANELS + piece
            at = [(block * PARTS + k % PARTS) * PART_ROWS, 0]
            tma.async_copy_global_to_shared(phi_parts, at, arrived, pieces.index(slot * (N * PARTS) + k))


@gluon.jit
def _move(
    x, g, f, d, dx, df, x_slots, g_slots, f_slots, d_slots, carried, loaded, computed, first, T, begin, end,
    C: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """What `load` and `store` do where 128 divides C. g and d of a slot are loaded again once they are read, x and f
    once the results that took their place are stored.
    """
    steps = steps_of(begin, end, C, STEP)
    for step in range(-SLOTS, steps):
        later = step + SLOTS
        if step >= 0:
            mbarrier.wait(computed.index(step % SLOTS), step // SLOTS % 2)
        if later < steps:
            begin_step((g,), (d,), (g_slots,), (d_slots,), loaded, later, first, T, begin, C, N, STEP, SLOTS, False)
        if step >= 0:
            store_step(dx, df, x_slots, f_slots, carried, step, first, T, begin, end, C, N, STEP, SLOTS)
            gl.thread_barrier()
        if later < steps:
            begin_step((x,), (f,), (x_slots,), (f_slots,), loaded, later, first, T, begin, C, N, STEP, SLOTS)


@gluon.jit
def _by_token(z, C: gl.constexpr):
    """[tokens, channels] from the dot's [2 tokens, packed channels]; moves no data, as `sum_parts` does not.

    Of a tensor core's 16 rows eight are high parts and eight are the low ones of the same tokens, in the order that
    `token_of_row` or `token_of_dz_row` has: a thread holds neighbours in both.
    """
    TOKENS: gl.constexpr = z.shape[0] // 2
    CHANNELS: gl.constexpr = z.shape[1]
    if C % 8 == 0:
        total = gl.sum(gl.reshape(z, (TOKENS // 8, 2, 4, 2, CHANNELS)), 1)
        total = gl.permute(total, (0, 2, 1, 3))
    else:
        total = gl.sum(gl.reshape(z, (TOKENS // 8, 2, 8, CHANNELS)), 1)
    return unpack_columns(gl.reshape(total, (TOKENS, CHANNELS)), 8)


@gluon.jit
def _coefficients(read_weights, norm_share, k_share, k_more, post, res, t, T, N: gl.constexpr):
    """Of each token: w, k, post, H, and with a norm what x_in was collapsed with, in terms of x and f."""
    live = t < T
    weights, posts = load_columns(read_weights, t, live, N), load_columns(post, t, live, N)
    mixes = () if res is None else load_columns(res, t, live, N * N)
    k = load_float(k_share, t, live)
    if k_more is not None:
        k += load_float(k_more, t, live)
    collapsed = ()
    if norm_share is not None:
        shares = scaled(weights, load_float(norm_share, t, live)[:, None], N)
        collapsed = mixed_back(shares, mixes, N) + (collapse(shares, posts, N),)
    return weights, k[:, None], posts, mixes, collapsed


@gluon.jit
def _of_stream(held, staged, group, o: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """w_o, k, post_o and H[o], or () for identity, of coefficients that are held or staged."""
    if len(staged) > 0:
        return load_of_stream(staged, group, o, N, layout)
    else:
        weights, k, posts, mixes, _collapsed = held
        return weights[o], k, posts[o], mixes[o * N : (o + 1) * N]


@gluon.jit
def _multiply(dz, pieces, zero, slot, stream: gl.constexpr, N: gl.constexpr, PARTS: gl.constexpr):
    """dz phi of one stream and a panel of channels, begun."""
    z = zero
    for part in gl.static_range(PARTS):
        phi = pieces.index((slot * N + stream) * PARTS + part)
        z = warpgroup_mma(dz[part], phi, z, use_acc=part > 0, is_async=True)
    return z


@gluon.jit
def _compute(
    x_slots, g_slots, f_slots, d_slots, dz_parts, staged_dz, pieces, loaded, computed, phi_barriers,
    read_weights, norm_weight, norm_share, k_share, k_more, post, res, sums, first, T, begin, end, C: gl.constexpr,
    N: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr, CHUNK: gl.constexpr, SUMS_READ: gl.constexpr,
    DZ_WIDTH: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
    zero = gl.zeros([2 * GROUP, PANEL], gl.float32, mma)
    tile_of_zeros = _by_token(zero, C)
    layout: gl.constexpr = tile_of_zeros.type.layout
    NUMBERS: gl.constexpr = N * (1 + (0 if res is None else N) + (1 if SUMS_READ else 0))
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    dz = ()  # where it is not staged, and of the other group; as totals
    other_dz = ()
    staged = ()
    if C % 8 != 0:
        staged = stage_tokens(
            dz_parts, read_weights, norm_share, k_share, k_more, post, res, first, T, N, P, DZ_WIDTH
        )  # fmt: skip
        gl.thread_barrier()
    elif len(staged_dz) == 0:
        dz = load_dz_of_group(dz_parts, first, T, P, PARTS, DZ_WIDTH, operand)
        other_dz = load_dz_of_group(dz_parts, first + GROUP, T, P, PARTS, DZ_WIDTH, operand)
    nothing = fold(tile_of_zeros, tile_of_zeros, 8, True)
    totals = ()  # of the group whose turn it is, and of the other: they swap after every step
    other_totals = ()
    for _ in gl.static_range(NUMBERS):
        totals = totals + (nothing,)
        other_totals = other_totals + (nothing * 0.0,)  # objects of its own: what a loop swaps with itself is unchanged
    c = gl.arange(0, PANEL, gl.SliceLayout(0, layout))
    n = tile_of_zeros
    if norm_weight is not None:
        n = load_float(norm_weight, begin + c, begin + c < C)[None, :]
    for step in range(steps_of(begin, end, C, STEP)):
        slot, group = step % SLOTS, step % 2
        t = first.to(gl.int64) + group * GROUP + gl.arange(0, GROUP, gl.SliceLayout(1, layout))
        held = ()
        collapsed = ()
        left = dz
        if len(staged) > 0:
            left = load_dz_operands(staged, group, P, operand)
            if norm_share is not None:
                collapsed = load_collapsed(staged, group, N, layout)
        else:
            held = _coefficients(read_weights, norm_share, k_share, k_more, post, res, t, T, N)
            collapsed = held[4]
            if len(staged_dz) > 0:
                left = staged_dz_of_group(staged_dz[0], group, PARTS)
        mbarrier.wait(loaded.index(slot), step // SLOTS % 2)
        if C % 8 != 0:
            clear_ends((x_slots, g_slots), (f_slots, d_slots), step, begin, C, N, STEP, SLOTS)
        for panel in range(PANELS):
            mbarrier.wait(phi_barriers.index(panel), step // 2 % 2)
            own = own_channels(panel, STEP, layout)
            z = _multiply(left, pieces, zero, panel, 0, N, PARTS)
            streams = ()
            for i in gl.static_range(N):
                streams = streams + (load_stream(x_slots, slot, panel, own, t, C, N, i, layout),)
            f = load_stream(f_slots, slot, panel, own, t, C, 1, 0, layout)
            d = load_stream(d_slots, slot, panel, own, t, C, 1, 0, layout)
            if norm_weight is not None:
                d = d * n - (collapse(collapsed[:N], streams, N) + collapsed[N] * f)
                following = begin + (step + panel) // 2 * STEP + (1 - panel) * PANEL + c
                n = load_float(norm_weight, following, (following < C) & ((1 - panel) * PANEL + c < STEP))[None, :]
            df = gl.zeros_like(tile_of_zeros)
            dx = ()
            new_totals = ()
            for o in gl.static_range(N):
                z = warpgroup_mma_wait(0, deps=[z])
                G = _by_token(z, C)
                if o + 1 < N:
                    z = _multiply(left, pieces, zero, panel, o + 1, N, PARTS)
                G = gl.convert_layout(G, layout)
                w, k, post_o, mixes = _of_stream(held, staged, group, o, N, layout)
                y = write_row(o, streams, f, post_o, mixes, N)
                G += k * y
                G += load_stream(g_slots, slot, panel, own, t, C, N, o, layout)
                G += w * d
                df += post_o * G
                new_totals = add_products(new_totals, totals, G, f, () if res is None else streams)
                if SUMS_READ:
                    new_totals = new_totals + (totals[len(new_totals)] + fold(d, y, 8, True),)
                dx = add_mixed(dx, G, mixes, o, N)
            totals = new_totals
            narrow = one_below_the_other(_narrow_pair(dx[0], dx[1]), _narrow_pair(dx[2], dx[3]))
            if C % 8 != 0:
                narrow = gl.convert_layout(narrow, STACKED, assert_trivial=True)
            panel_of(x_slots, slot, panel, N * GROUP).store(narrow)
            panel_of(f_slots, slot, panel, GROUP).store(rounded(df, gl.bfloat16, True))
            if group == 1:
                gl.thread_barrier()
                mbarrier.arrive(phi_barriers.index(PANELS + panel), count=1)
        after = begin + (step // 2 + 1) * STEP
        if (after % CHUNK == 0) | (after >= end):
            store_totals(
                sums,
                totals,
                halves_of(d_slots, slot),
                (after - 1) // CHUNK,
                first + group * GROUP,
                T,
                N,
                NUMBERS,
                SUMS_READ,
            )
            zeros = ()
            for _ in gl.static_range(NUMBERS):
                zeros = zeros + (nothing,)
            totals = zeros
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(computed.index(slot), count=1)
        totals, other_totals, dz, other_dz = other_totals, totals, other_dz, dz


@gluon.jit
def _narrow_pair(top, bottom):
    return one_below_the_other(rounded(top, gl.bfloat16, True), rounded(bottom, gl.bfloat16, True))


@gluon.jit(do_not_specialize=["T", "span"])
def streams_bwd_hopper_kernel(
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
    N: gl.constexpr,
    CHUNK: gl.constexpr,
    SUMS_READ: gl.constexpr,
    DZ_WIDTH: gl.constexpr,
    STEP: gl.constexpr,
):
    PARTS: gl.constexpr = (2 * P + PART_ROWS - 1) // PART_ROWS
    TILED: gl.constexpr = C % (PANELS * PANEL) == 0
    first = gl.program_id(0) * (2 * GROUP)
    begin = gl.program_id(1) * (span // CHUNK) * CHUNK  # = program * span, and the compiler sees that it is aligned
    end = gl.minimum(begin + span, C)
    x_slots = allocate_slots(SLOTS, N * GROUP, TILED)
    g_slots = allocate_slots(SLOTS, N * GROUP, TILED)
    f_slots = allocate_slots(SLOTS, GROUP, TILED)
    d_slots = allocate_slots(SLOTS, GROUP, TILED)
    pieces = gl.allocate_shared_memory(gl.bfloat16, [PANELS * N * PARTS, PART_ROWS, PANEL], SHARED)
    loaded = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    computed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    if TILED:  # elsewhere nobody waits for it, and the compiler lets the next tensor lie where what nobody uses does
        free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    # Whether a panel of phi is loaded, then whether it is free: what is handed to warps takes shared memory, too.
    phi_barriers = gl.allocate_shared_memory(gl.int64, [2 * PANELS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(loaded.index(slot), count=1 if TILED else 32 * COPY_WARPS)
        mbarrier.init(computed.index(slot), count=1)
        if TILED:
            mbarrier.init(free.index(slot), count=1)
    for k in gl.static_range(2 * PANELS):
        mbarrier.init(phi_barriers.index(k), count=1)
    staged_dz = ()
    if TILED and PARTS < 4:  # with four there is no room beside phi
        DZ_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
        staged_dz = (gl.allocate_shared_memory(gl.bfloat16, [2 * PARTS, 2 * GROUP, PART_ROWS], DZ_LAYOUT),)
        stage_dz(dz_parts, staged_dz[0], first, T, P, PARTS, DZ_WIDTH)
    fence_async_shared()
    gl.thread_barrier()
    # Written out twice: a tuple with a name keeps no constants.
    if TILED:
        gl.warp_specialize(
            [
                (_compute, (x_slots, g_slots, f_slots, d_slots, dz_parts, staged_dz, pieces, loaded,
                            computed, phi_barriers, read_weights, norm_weight, norm_share, k_share, k_more, post, res,
                            sums, first, T, begin, end, C, N, P, PARTS, CHUNK, SUMS_READ, DZ_WIDTH, STEP)),
                (load_tiles, ((x, g), (f, dx_in), (x_slots, g_slots), (f_slots, d_slots), loaded, free, first, begin,
                              end, C, N, SLOTS)),
                (_load_phi, (phi_parts, pieces, phi_barriers, begin, end, C, N, PARTS, STEP)),
                (store_tiles, (dx, df, x_slots, f_slots, computed, free, first, begin, end, C, N, SLOTS)),
            ],
            [1, 1, 1],
            [COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (x_slots, g_slots, f_slots, d_slots, dz_parts, staged_dz, pieces, loaded,
                            computed, phi_barriers, read_weights, norm_weight, norm_share, k_share, k_more, post, res,
                            sums, first, T, begin, end, C, N, P, PARTS, CHUNK, SUMS_READ, DZ_WIDTH, STEP)),
                (_move, (x, g, f, dx_in, dx, df, x_slots, g_slots, f_slots, d_slots, allocate_carried(N), loaded,
                         computed, first, T, begin, end, C, N, STEP)),
                (_load_phi, (phi_parts, pieces, phi_barriers, begin, end, C, N, PARTS, STEP)),
            ],
            [COPY_WARPS, 1],
            [MOVE_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip


def takes(channels: int, rows: int) -> bool:
    """Whether there is a form for so many channels, and for so many rows of phi."""
    tiles = cdiv(2 * rows, PHI_TILE[0])
    if channels % SUM_WIDTH == 0:
        return tiles <= MAX_TILES
    return has_hopper_channels(channels) and tiles <= MAX_TILES_BESIDE_ROWS and rows % BLOCK == 0


def phi_layout(rows: int, channels: int) -> PhiLayout:
    """How the parts of so many rows of phi lie: as tiles for the copy engine."""
    padded = cdiv(2 * rows, PHI_TILE[0]) * PHI_TILE[0]
    return PhiLayout(padded, dense=True, block=PHI_TILE[1], channels_per_thread=8, step=hopper_step(channels))


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
    T, N, C = tokens_of(x)
    programs, chunk = cdiv(T, HOPPER_TOKENS), chunk_width(C)
    span = chunks_span(C, programs, x.device)
    numbers = N * (1 + (N if res is not None else 0) + need_read_weights)
    gradients = WriteGradients(
        empty(x, *x.shape),
        empty(f, *f.shape),
        None,
        empty(post, *post.shape),
        None if res is None else empty(res, *res.shape),
        empty(collapse.read_weights, *collapse.read_weights.shape) if need_read_weights else None,
        empty(x, cdiv(C, chunk), T, numbers, dtype=FLOAT),
    )
    *packed, rows = projection
    run(
        streams_bwd_hopper_kernel, (programs, cdiv(C, span)),
        g, *collapse, *packed, x, f, post, res, gradients.dx, gradients.df, gradients.sums, T, span, C, rows,
        N=N, CHUNK=chunk, SUMS_READ=need_read_weights, DZ_WIDTH=packed_dz_width(rows),
        STEP=hopper_step(C), num_warps=8,
    )  # fmt: skip
    return gradients


def _tiles(args: tuple[Any, ...], constants: dict[str, Any]) -> dict[int, Tiles]:
    T, C, P, N = args[16], args[18], args[19], constants["N"]
    streams, rows = Tiles((T, N * C), STREAM_TILE), Tiles((T, C), STREAM_TILE)
    layout = phi_layout(P, C)
    phi = Tiles((N * layout.blocks(C) * layout.rows, PHI_TILE[1]), PHI_TILE)
    if C % SUM_WIDTH:
        return {8: phi}
    return {0: streams, 1: rows, 8: phi, 9: streams, 10: rows, 13: streams, 14: rows}


tiled_arguments[streams_bwd_hopper_kernel.__name__] = _tiles
