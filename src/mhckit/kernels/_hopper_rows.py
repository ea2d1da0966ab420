"""Streams on their way into shared memory and out of it where rows begin anywhere: C is no multiple of 8.

The copy engine moves tiles that begin at 16-byte boundaries (`_hopper_copies`). Here four warps move rows themselves,
in vectors of eight channels that do begin there:

    begin_step      loads rows from the last such boundary on, straight to shared memory. Channels arrive up to seven
                    places late, and are worked on as they are (`_hopper_late`)
    store_step      stores as many vectors of each row, from the same boundary on. Results lie in their places, so that
                    a vector is put together of two neighbours', as late as the row; before a step's first vector comes
                    the last one of the step before, which is carried along. Where a program's channels begin and end,
                    what makes no whole vector goes out channel by channel.

A step has 120 channels, which fit into the 128 places of a slot with the seven before them. Steps, groups and slots
are those of `_hopper_copies`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ._hopper_copies import GROUP, PANELS, SHARED, place_of
from ._hopper_vectors import LINES, VECTOR, WIDTH, half_from, rows_from

# Warps that copy, and registers for each of their threads.
COPY_WARPS = gl.constexpr(4)
ROW_REGISTERS = gl.constexpr(104)
# Warps that compute with what was loaded.
COMPUTING_WARPS = gl.constexpr(8)
# A thread has a vector of two tokens that follow one another, and of two more, of a row of each: [tokens, places].
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [16, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [0, 64], [2, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[GROUP.value, WIDTH.value],
    )
)
# The same, of vectors: [tokens, vectors, places].
STORED_VECTORS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0], [16, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [2, 0, 0]],
        warp_bases=[[4, 0, 0], [8, 0, 0]],
        block_bases=[],
        shape=[GROUP.value, WIDTH.value // VECTOR.value, VECTOR.value],
    )
)


@gluon.constexpr_function
def from_place(words, place):
    """Instructions that leave in w0 to w4 what is from a place on, 0 to 7, of the eight words given; where the place is
    odd `one` then has prmt take halves of two neighbours. They want the names above, t, one, and predicates four, two.
    """
    lines = [f"and.b32 t, {place}, 4;", "setp.ne.u32 four, t, 0;", f"and.b32 t, {place}, 2;", "setp.ne.u32 two, t, 0;"]
    lines += [f"and.b32 one, {place}, 1;", "mad.lo.u32 one, one, 0x2222, 0x3210;"]
    lines += [f"selp.b32 w{k}, {words[k + 2]}, {words[k]}, four;" for k in range(6)]
    return lines + [f"selp.b32 w{k}, w{k + 1}, w{k}, two;" for k in range(5)]


@gluon.constexpr_function
def _placing(late, alternates):
    """Vectors as they are stored, of two tokens: `late` places of one, and where tokens alternate four more or less of
    the other, come from the vector before; or as many as are given (None). That is the lane's before, or for the first
    one what was carried. Given: both vectors of either token, for each channel which lane of 16 it is, and how late.
    """
    lines = [
        ".reg .pred first, eight, four, two;",
        f".reg .b32 before, place, t, one, {', '.join(f'w{k}' for k in range(8))};",
    ]
    lines += ["setp.eq.u32 first, $24, 0;", "add.u32 before, $24, 31;"]
    for token in range(2):
        own, carried = ([f"${begin + 4 * token + k}" for k in range(4)] for begin in (8, 16))
        start = None if late is None else 8 - (late + 4 * alternates * token) % 8
        for k in range(0 if start is None else start // 2, 4):
            lines.append(f"shfl.sync.idx.b32 w{k}, {own[k]}, before, {(32 - 16) << 8 | 31}, 0xffffffff;")
            lines.append(f"selp.b32 w{k}, {carried[k]}, w{k}, first;")
        words, selector = [*(f"w{k}" for k in range(4)), *own], "0x5432"
        if start is None:
            given = f"${40 + 8 * token}"
            lines += [f"mov.b32 w{k}, {own[k - 4]};" for k in range(4, 8)]
            lines += [f"setp.eq.u32 eight, {given}, 0;", f"sub.u32 place, 8, {given};"]
            lines += [f"selp.b32 w{k}, w{k + 4}, w{k}, eight;" for k in range(4)]
            lines += from_place([f"w{k}" for k in range(8)], "place")
            words, selector = words[:4] + ["w4"], "one"
        for k in range(4):
            word, half = divmod((start or 1) + 2 * k, 2)
            if start is None:
                lines.append(f"prmt.b32 ${4 * token + k}, {words[k]}, {words[k + 1]}, {selector};")
            elif half:
                lines.append(f"prmt.b32 ${4 * token + k}, {words[word]}, {words[word + 1]}, {selector};")
            else:
                lines.append(f"mov.b32 ${4 * token + k}, {words[word]};")
    return "{" + "\n".join(lines) + "}", ",".join(["=&r"] * 8 + ["r"] * (16 + 16 * (2 if late is None else 1)))


@gluon.constexpr_function
def _placing_stream(channels, streams, stream):
    """A tensor with one row for each token is as late as its token says."""
    if streams == 1:
        return _placing(None, False)
    return _placing(stream * channels % 8, streams * channels % 8 > 0)


PLACED_AT_ONCE = gl.constexpr(2 * VECTOR.value)


@gluon.jit
def _slot(slots, slot, ROWS: gl.constexpr):
    """One of the slots, as [ROWS, channels]: of two panels, or of vectors."""
    if slots.shape[2] == VECTOR:
        return rows_from(slots, slot, 0, 0, ROWS, ROWS)
    else:
        return slots._reinterpret(gl.bfloat16, [slots.shape[0] // PANELS, ROWS, WIDTH], SHARED).index(slot)


@gluon.jit
def found_here(slots):
    """The same slots, from an address on that the compiler only learns here.

    What it can work out for a thread once and for all it does before warps are told what to do, when they have few
    registers. It is spilled, and loaded again in every step, behind the rows: a fifth of the time of the warps that
    moved them in F1.
    """
    zero = gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return slots.index(zero)._reinterpret(gl.bfloat16, slots.shape, SHARED)


@gluon.jit
def _boundaries(tensor, t, stream, token, channel, C: gl.constexpr, N: gl.constexpr):
    """Where the vectors of a group's rows begin that have a step's first channel, and behind how many places it comes.

    A group's first row has it at a boundary, since groups have 32 tokens; and every so many tokens a row begins as late
    as theirs: what the compiler need not work out for each of them.
    """
    PERIOD: gl.constexpr = 8 // N
    late = (t % PERIOD * N + stream) * C
    origin = tensor + (token.to(gl.int64) * (N * C) + channel) // 8 * 8
    return origin + late // 8 * 8 + t // PERIOD * (8 * C), late % 8


@gluon.jit
def _begin(tensor, slots, slot, token, channel, T, C: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr):
    """The rows of a step, begun."""
    ROWS: gl.constexpr = N * GROUP
    if slots.shape[2] == VECTOR:  # a copy of all of them does not compile
        for odd in gl.static_range(2):
            half = half_from(slots, slot, odd, ROWS)._reinterpret(gl.bfloat16, [ROWS // 2, WIDTH], LINES)
            _begin_rows(tensor, half, 2, odd, token, channel, T, C, N, STEP)
    else:
        _begin_rows(tensor, _slot(slots, slot, ROWS), 1, 0, token, channel, T, C, N, STEP)


@gluon.jit
def _begin_rows(
    tensor, tile, EVERY: gl.constexpr, FIRST: gl.constexpr, token, channel, T, C: gl.constexpr, N: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    """Of a group's every so many tokens, from its FIRST on. The vector that holds the tensor's last channel is loaded
    to its end, as far as any memory is allocated.
    """
    TOKENS: gl.constexpr = GROUP // EVERY
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [COPY_WARPS, 1], [1, 0])
    row = gl.arange(0, N * TOKENS, gl.SliceLayout(1, layout))[:, None]
    t = row % TOKENS * EVERY + FIRST
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    rows, late = _boundaries(tensor, t, row // TOKENS, token, channel, C, N)
    if (channel + STEP < C) & (token + GROUP <= T):
        async_copy.async_copy_global_to_shared(tile, c + rows)
    else:
        here = (token + t < T) & (c // 8 * 8 < late + (C - channel))
        async_copy.async_copy_global_to_shared(tile, c + rows, here)


@gluon.jit
def _load_vectors(tile, carried):
    """Of a group's rows, and for each the one that was carried."""
    before = gl.expand_dims(carried.load(gl.SliceLayout(1, STORED_VECTORS)), 1)
    before = gl.reshape(before.broadcast_to([GROUP, WIDTH // VECTOR, VECTOR]), (GROUP, WIDTH))
    return tile.load(STORED), gl.convert_layout(before, STORED, assert_trivial=True)


@gluon.jit
def _place(vectors, late, C: gl.constexpr, N: gl.constexpr, STREAM: gl.constexpr):
    """Vectors of rows as they are stored."""
    how: gl.constexpr = _placing_stream(C, N, STREAM)
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, STORED))[None, :]
    given = [vectors[0], vectors[1], (c // VECTOR).broadcast_to([GROUP, WIDTH])]
    if N == 1:
        given = given + [late.broadcast_to([GROUP, WIDTH])]
    return gl.inline_asm_elementwise(how[0], how[1], given, dtype=gl.bfloat16, is_pure=False, pack=PLACED_AT_ONCE)


@gluon.jit
def _store_whole(tensor, tiles, carried, token, channel, C: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr,
                 STREAM: gl.constexpr):  # fmt: skip
    """A step between a program's first one and its last, of tokens that all exist: its vectors are whole. tiles: of
    some streams, from one on, with what was carried for each. All are loaded before any is placed.
    """
    t = gl.arange(0, GROUP, gl.SliceLayout(1, STORED))[:, None]
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, STORED))[None, :]
    vectors = ()
    for k in gl.static_range(len(tiles)):
        vectors = vectors + (_load_vectors(tiles[k], carried[k]),)
    for k in gl.static_range(len(tiles)):
        rows, late = _boundaries(tensor, t, STREAM + k, token, channel, C, N)
        gl.store(c + rows, _place(vectors[k], late, C, N, STREAM + k), mask=c < STEP)


@gluon.jit
def _store_parts(
    tensor, tile, carried, token, channel, T, begin, end, C: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr,
    STREAM: gl.constexpr,
):  # fmt: skip
    """A step of which vectors, or tokens, may be missing."""
    t = gl.arange(0, GROUP, gl.SliceLayout(1, STORED))[:, None]
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, STORED))[None, :]
    rows, late = _boundaries(tensor, t, STREAM, token, channel, C, N)
    vectors = _place(_load_vectors(tile, carried), late, C, N, STREAM)
    first = c // VECTOR * VECTOR - late  # channel of a vector
    whole = (first + VECTOR <= gl.minimum(end - channel, STEP)) & ((first >= 0) | (channel > begin))
    gl.store(c + rows, vectors, mask=whole & (token + t < T))
    _store_ends(tensor, tile, carried, token, channel, T, begin, end, C, N, STEP, STREAM)


@gluon.jit
def _store_ends(
    tensor, tile, carried, token, channel, T, begin, end, C: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr,
    STREAM: gl.constexpr,
):  # fmt: skip
    """What makes no whole vector: before the first one, in the first of a program's steps, and behind the last one in
    the last.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [COPY_WARPS, 1], [1, 0])
    REST: gl.constexpr = (C - 1) % STEP + 1  # channels of a row's last step
    t = gl.arange(0, GROUP, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, VECTOR, gl.SliceLayout(0, layout))[None, :]
    rows, late = _boundaries(tensor, t, STREAM, token, channel, C, N)
    rows += late
    live = token + t < T
    if channel == begin:
        _store_channels(rows, tile, 0, c, live & (c < (VECTOR - late) % VECTOR) & (c < end - channel))
    if channel + STEP >= end:
        count = gl.minimum(end - channel, STEP)
        behind = (count + late) // VECTOR * VECTOR - late
        if count == STEP:
            _store_channels(rows, tile, STEP - VECTOR, c, live & (c + (STEP - VECTOR) >= behind))
        else:
            LAST: gl.constexpr = (REST - 1) // VECTOR * VECTOR
            _store_channels(rows, tile, LAST, c, live & (c + LAST >= behind) & (c + LAST < REST))
            if LAST > 0:
                _store_channels(rows, tile, LAST - VECTOR, c, live & (c + (LAST - VECTOR) >= behind))
            elif channel > begin:
                gl.store(rows + c - VECTOR, carried.load(layout), mask=live & (c - VECTOR >= behind))


@gluon.jit
def _store_channels(rows, tile, first: gl.constexpr, c, here):
    gl.store(rows + first + c, tile.slice(first, VECTOR, 1).load(c.type.layout), mask=here)


@gluon.jit
def begin_step(
    streams, rows, stream_slots, row_slots, loaded, step, first, T, begin, C: gl.constexpr, N: gl.constexpr,
    STEP: gl.constexpr, SLOTS: gl.constexpr, LAST: gl.constexpr = True,
):  # fmt: skip
    """As a step of `load_tiles`: those who wait for it hear of it when the LAST tensors of it have arrived."""
    token, channel = place_of(step, first, begin, STEP)
    for j in gl.static_range(len(streams)):
        _begin(streams[j], stream_slots[j], step % SLOTS, token, channel, T, C, N, STEP)
    for j in gl.static_range(len(rows)):
        _begin(rows[j], row_slots[j], step % SLOTS, token, channel, T, C, 1, STEP)
    if LAST:
        async_copy.mbarrier_arrive(loaded.index(step % SLOTS), increment_count=False)


@gluon.jit
def allocate_carried(N: gl.constexpr):
    """A vector of each row of both groups."""
    return gl.allocate_shared_memory(gl.bfloat16, [2 * (N + 1), GROUP, VECTOR], LINES)


@gluon.jit
def store_step(
    streams, row, stream_slots, row_slots, carried, step, first, T, begin, end, C: gl.constexpr, N: gl.constexpr,
    STEP: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """As a step of `store_tiles`. carried: of `allocate_carried`."""
    token, channel = place_of(step, first, begin, STEP)
    tile = _slot(stream_slots, step % SLOTS, N * GROUP)
    before = step % 2 * (N + 1)
    if (channel > begin) & (channel + STEP < end) & (token + GROUP <= T):
        for i in gl.static_range(0, N, 2):  # more have no room in registers
            pair = (tile.slice(i * GROUP, GROUP), tile.slice((i + 1) * GROUP, GROUP))
            ends = (carried.index(before + i), carried.index(before + i + 1))
            _store_whole(streams, pair, ends, token, channel, C, N, STEP, i)
        if row is not None:
            rows = _slot(row_slots, step % SLOTS, GROUP)
            _store_whole(row, (rows,), (carried.index(before + N),), token, channel, C, 1, STEP, 0)
    else:
        for i in gl.static_range(N):
            rows = tile.slice(i * GROUP, GROUP)
            _store_parts(streams, rows, carried.index(before + i), token, channel, T, begin, end, C, N, STEP, i)
        if row is not None:
            rows = _slot(row_slots, step % SLOTS, GROUP)
            _store_parts(row, rows, carried.index(before + N), token, channel, T, begin, end, C, 1, STEP, 0)
    _carry(tile, carried.index(before), N * GROUP, STEP)
    if row is not None:
        _carry(_slot(row_slots, step % SLOTS, GROUP), carried.index(before + N), GROUP, STEP)


@gluon.jit
def _carry(tile, carried, ROWS: gl.constexpr, STEP: gl.constexpr):
    """The last vector of each row."""
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32, 1], [COPY_WARPS, 1], [1, 0])
    last = tile.slice(STEP - VECTOR, VECTOR, 1).load(layout)
    carried._reinterpret(gl.bfloat16, [ROWS, VECTOR], LINES).store(last)
