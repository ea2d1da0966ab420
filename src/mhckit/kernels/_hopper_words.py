"""Streams on their way into shared memory and out of it where rows begin anywhere: C is no multiple of 8.

The copy engine moves tiles that begin at 16-byte boundaries (`_hopper_copies`). Here four warps copy rows themselves:

    begin_step      loads rows from the last such boundary on, 16 bytes at a time, straight to shared memory. Channels
                    arrive up to seven places late, and are worked on as they are (`_hopper_late`)
    store_step      stores words, of two channels or of four where C allows it. Where C is odd, every other row begins
                    between words: its channels move one place, and a step's first and last are stored on their own

A step has 120 channels, which fit into the 128 places of a slot with the seven before them. Steps, groups and slots
are those of `_hopper_copies`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ._hopper_copies import GROUP, PANEL, PANELS, SHARED, place_of

# Warps that copy, and registers for each of their threads.
WORD_WARPS = gl.constexpr(4)
WORD_REGISTERS = gl.constexpr(104)
# Warps that compute with what was loaded.
COMPUTING_WARPS = gl.constexpr(8)
# Places of a row in a slot.
WIDTH = gl.constexpr(PANELS.value * PANEL.value)
# How rows lie in shared memory where they are worked on as late as they arrive: one below the other, in vectors of
# eight places, of which the next one begins 16 bytes later wherever it lies.
LINES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
VECTOR = gl.constexpr(8)
# Rows that a piece of instructions is written for: half of those that a thread has when it stores a group of 32.
ROWS_MOVED = 4


def _moving() -> tuple[str, str]:
    """Rows, of which a thread has a word on either panel, one channel down if they are odd. Given, for each channel, of
    which a thread's first is taken: whether they are, and the lane, of 32.
    """
    count = 2 * ROWS_MOVED
    odd, lane = f"${2 * count}", f"${4 * count}"
    lines = [
        ".reg .pred first;",
        ".reg .b32 one, next, a, b;",
        f"setp.eq.u32 first, {lane}, 0;",
        f"add.u32 next, {lane}, 1;",
        f"mad.lo.u32 one, {odd}, 0x2222, 0x3210;",
    ]
    for low in range(count, 2 * count, 2):
        lines += [
            f"selp.b32 a, ${low + 1}, ${low}, first;",
            "shfl.sync.idx.b32 a, a, next, 31, 0xffffffff;",
            f"shfl.sync.idx.b32 b, ${low + 1}, next, 31, 0xffffffff;",
            f"prmt.b32 ${low - count}, ${low}, a, one;",
            f"prmt.b32 ${low - count + 1}, ${low + 1}, b, one;",
        ]
    return "{" + "\n".join(lines) + "}", ",".join(["=&r"] * count + ["r"] * 5 * count)


MOVE, MOVE_OPERANDS = (gl.constexpr(text) for text in _moving())
MOVED_AT_ONCE = gl.constexpr(4 * ROWS_MOVED)


@gluon.jit
def vector_of_slot(slot, ROWS: gl.constexpr):
    """Which vector is its first."""
    return slot * (ROWS * WIDTH // VECTOR + 1)


@gluon.jit
def _slot(slots, slot, ROWS: gl.constexpr):
    """One of the slots, as [ROWS, channels]: of two panels, or of vectors (`_hopper_late`)."""
    if slots.shape[2] == VECTOR:
        return slots.index(vector_of_slot(slot, ROWS))._reinterpret(gl.bfloat16, [ROWS, WIDTH], LINES)
    else:
        return slots._reinterpret(gl.bfloat16, [slots.shape[0] // PANELS, ROWS, WIDTH], SHARED).index(slot)


@gluon.jit
def _origin(tensor, token, channel, C: gl.constexpr, N: gl.constexpr):
    """Where a group's first row has a step's first channel: at a 16-byte boundary, since groups have 32 tokens."""
    return tensor + (token.to(gl.int64) * (N * C) + channel) // 8 * 8


@gluon.jit
def _begin(tensor, tile, token, channel, T, C: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr):
    """The rows of a step, begun. 16 bytes that hold the tensor's last channel are loaded to their end, as far as any
    memory is allocated.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WORD_WARPS, 1], [1, 0])
    row = gl.arange(0, N * GROUP, gl.SliceLayout(1, layout))[:, None]
    t = row % GROUP
    # Every so many tokens a row begins as late as theirs: what the compiler need not work out for each of them.
    PERIOD: gl.constexpr = 8 // N
    late = (t % PERIOD * N + row // GROUP) * C
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    pointers = c + _origin(tensor, token, channel, C, N) + late // 8 * 8 + t // PERIOD * (8 * C)
    if (channel + STEP < C) & (token + GROUP <= T):
        async_copy.async_copy_global_to_shared(tile, pointers)
    else:
        here = (token + t < T) & (c // 8 * 8 < late % 8 + (C - channel))
        async_copy.async_copy_global_to_shared(tile, pointers, here)


@gluon.jit
def _store(
    tensor, tile, token, channel, T, C: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr, WORD: gl.constexpr,
    STREAM: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, WORD], [WORD // 2, PANEL // WORD], [WORD_WARPS, 1], [1, 0])
    MAY_BE_ODD: gl.constexpr = C % 2 == 1 and (N == 1 or STREAM % 2 == 1)
    t = gl.arange(0, GROUP, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    word = c // WORD * WORD
    start, odd = _starts(t, C, N, STREAM)
    origin = _origin(tensor, token, channel, C, N)
    rows = tile.load(layout)
    words = _moved(rows, odd, c) if MAY_BE_ODD else rows
    pointers = c + origin + (start + odd) // WORD * WORD
    if (channel + STEP < C) & (token + GROUP <= T):
        gl.store(pointers, words, mask=word < STEP - 2 * odd)
        if MAY_BE_ODD:
            _store_ends(origin, rows, C, N, STEP, STREAM)
    else:
        count = gl.minimum(C - channel, STEP)
        whole = (count - odd) // WORD * WORD
        gl.store(pointers, words, mask=(token + t < T) & (word < whole))
        if C % 2 == 1:  # the first of an odd row, and what may be left at its end
            alone = (c < odd) | ((c >= odd + whole) & (c < count))
            gl.store(c + origin + start, rows, mask=(token + t < T) & alone)


@gluon.jit
def _starts(t, C: gl.constexpr, N: gl.constexpr, STREAM: gl.constexpr):
    """Where rows begin behind the group's first one, and whether that is between words of two."""
    if C % 2 == 0:
        return t * (N * C) + STREAM * C, t * 0
    elif N == 1:
        return t * C, t % 2
    else:
        return t * (N * C) + STREAM * C, t * 0 + STREAM % 2


@gluon.jit
def _moved(rows, odd, c):
    return gl.inline_asm_elementwise(
        MOVE,
        MOVE_OPERANDS,
        [rows, odd.broadcast_to(rows.shape), (c % PANEL // 2).broadcast_to(rows.shape)],
        dtype=gl.bfloat16,
        is_pure=False,
        pack=MOVED_AT_ONCE,
    )


@gluon.jit
def _store_ends(origin, rows, C: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr, STREAM: gl.constexpr):
    """Of odd rows of a step the first and the last channel, which make no whole word, by two lanes at once."""
    even, uneven = gl.split(gl.reshape(rows, (GROUP, WIDTH // 2, 2)))
    layout: gl.constexpr = even.type.layout
    start, odd = _starts(gl.arange(0, GROUP, gl.SliceLayout(1, layout))[:, None], C, N, STREAM)
    pair = gl.arange(0, WIDTH // 2, gl.SliceLayout(0, layout))[None, :]
    places = gl.where(pair == 0, 0, STEP - 1) + origin + start
    is_end = (pair == 0) | (pair == STEP // 2 - 1)
    gl.store(places, gl.where(pair == 0, even, uneven), mask=(odd == 1) & is_end)


@gluon.jit
def begin_step(
    streams, rows, stream_slots, row_slots, loaded, step, first, T, begin, C: gl.constexpr, N: gl.constexpr,
    STEP: gl.constexpr, SLOTS: gl.constexpr, LAST: gl.constexpr = True,
):  # fmt: skip
    """As a step of `load_tiles`: those who wait for it hear of it when the LAST tensors of it have arrived."""
    token, channel = place_of(step, first, begin, STEP)
    for j in gl.static_range(len(streams)):
        tile = _slot(stream_slots[j], step % SLOTS, N * GROUP)
        _begin(streams[j], tile, token, channel, T, C, N, STEP)
    for j in gl.static_range(len(rows)):
        tile = _slot(row_slots[j], step % SLOTS, GROUP)
        _begin(rows[j], tile, token, channel, T, C, 1, STEP)
    if LAST:
        async_copy.mbarrier_arrive(loaded.index(step % SLOTS), increment_count=False)


@gluon.jit
def store_step(
    streams, row, stream_slots, row_slots, step, first, T, begin, C: gl.constexpr, N: gl.constexpr,
    STEP: gl.constexpr, WORD: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """As a step of `store_tiles`."""
    token, channel = place_of(step, first, begin, STEP)
    tile = _slot(stream_slots, step % SLOTS, N * GROUP)
    for i in gl.static_range(N):
        _store(streams, tile.slice(i * GROUP, GROUP), token, channel, T, C, N, STEP, WORD, i)
    if row is not None:
        _store(row, _slot(row_slots, step % SLOTS, GROUP), token, channel, T, C, 1, STEP, WORD, 0)
