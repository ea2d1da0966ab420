"""Rows of Hopper's kernels that are worked on as they arrive, where C is no multiple of 8: up to seven places late.

`_hopper_words` loads rows from the last 16-byte boundary before them, into vectors of eight places, so that a channel
lies in another place of each row. Who reads eight channels of a row reads the two vectors that hold them; how late the
row is says which eight of their sixteen places they are, and in which half of a word a channel lies, which costs
nothing where it becomes a float32 anyway. Who stores a row does the same in the other direction, since results lie
where they belong: the two vectors that hold what goes to 16 bytes of memory, and the ends of a step, which make no
whole vector, channel by channel.

    load_late       a panel of a stream, as float32
    store_late      a step's results, in vectors
    clear_ends      zeros behind the last channel

With four streams a row is as late as its stream says, and four places more or less where the token is odd; with one row
for each token it depends on the token. A slot's vectors follow one that nobody fills, which is read before the first
and behind the last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._hopper_copies import GROUP, PANEL, place_of
from ._hopper_words import LINES, TURNING_WARPS, VECTOR, WIDTH, WORD_WARPS, origin_of, start_of, vector_of_slot


@gluon.constexpr_function
def _instructions(lines, words, given):
    """With their operands: the words that come out, those of two vectors, and what is given, eight times each, of which
    the first is taken.
    """
    return "{" + "\n".join(lines) + "}", ",".join(["=&r"] * words + ["r"] * (8 + 8 * given))


@gluon.constexpr_function
def _reading(late, alternates):
    """Eight channels as float32, of the sixteen places that begin with the vector which holds the first of them: `late`
    places later, and where tokens alternate four more or less if they are odd; or as late as is given (None). Given:
    what a word is masked with for the channel in its upper half, how the one in its lower half is moved up, and the
    token's parity or lateness.
    """
    words = [f"${8 + k}" for k in range(8)]
    upper, lower, given = (f"${16 + 8 * k}" for k in range(3))
    lines = [".reg .pred four, two;", f".reg .b32 t, one, {', '.join(f'w{k}' for k in range(8))};"]
    if late is None:
        lines += [
            f"and.b32 t, {given}, 4;",
            "setp.ne.u32 four, t, 0;",
            f"and.b32 t, {given}, 2;",
            "setp.ne.u32 two, t, 0;",
            f"and.b32 one, {given}, 1;",
            "mad.lo.u32 one, one, 0x2222, 0x3210;",
        ]
        lines += [f"selp.b32 w{k}, {words[k + 2]}, {words[k]}, four;" for k in range(6)]
        lines += [f"selp.b32 w{k}, w{k + 1}, w{k}, two;" for k in range(5)]
        lines += [f"prmt.b32 w{k}, w{k}, w{k + 1}, one;" for k in range(4)]
        first, words = 0, [f"w{k}" for k in range(4)]
    elif alternates:
        first = late % 4
        lines.append(f"setp.{'ne' if late < 4 else 'eq'}.u32 four, {given}, 0;")
        for k in range(first // 2, (first + 7) // 2 + 1):
            lines.append(f"selp.b32 w{k}, {words[k + 2]}, {words[k]}, four;")
        words = [f"w{k}" for k in range(8)]
    else:
        first = late
    for k in range(8):
        word, half = divmod(first + k, 2)
        if half:
            lines.append(f"and.b32 ${k}, {words[word]}, {upper};")
        else:
            lines.append(f"prmt.b32 ${k}, {words[word]}, 0, {lower};")
    return _instructions(lines, 8, 3)


@gluon.constexpr_function
def _storing(late, alternates):
    """The other way round: the vector of memory that ends `late` places before the second one given does. Given: the
    token's parity or lateness.
    """
    words, given = [f"${4 + k}" for k in range(8)], "$12"
    lines = [".reg .pred four, two;", f".reg .b32 t, one, {', '.join(f'w{k}' for k in range(8))};"]
    if late is None:
        lines += [
            f"and.b32 t, {given}, 4;",
            "setp.ne.u32 four, t, 0;",
            f"and.b32 t, {given}, 2;",
            "setp.ne.u32 two, t, 0;",
            f"and.b32 one, {given}, 1;",
            "setp.ne.u32 one_more, one, 0;",
            "selp.b32 one, 0x5432, 0x7654, one_more;",
        ]
        lines[0] = ".reg .pred four, two, one_more;"
        lines += [f"selp.b32 w{k}, {words[k]}, {words[k + 2]}, four;" for k in range(6)]
        lines += [f"selp.b32 w{k}, w{k}, w{k + 1}, two;" for k in range(5)]
        lines += [f"prmt.b32 ${k}, w{k}, w{k + 1}, one;" for k in range(4)]
        return _instructions(lines, 4, 1)
    first = 8 - (late % 4 if alternates else late)  # of the sixteen places; of alternate tokens four fewer
    word, half = divmod(first, 2)
    if alternates:
        lines.append(f"setp.{'ne' if late < 4 else 'eq'}.u32 four, {given}, 0;")
        for k in range(word, word + 4 + half):
            lines.append(f"selp.b32 w{k}, {words[k - 2]}, {words[k]}, four;")
        words = [f"w{k}" for k in range(8)]
    for k in range(4):
        if half:
            lines.append(f"prmt.b32 ${k}, {words[word + k]}, {words[word + k + 1]}, 0x5432;")
        else:
            lines.append(f"mov.b32 ${k}, {words[word + k]};")
    return _instructions(lines, 4, 1)


@gluon.constexpr_function
def _of_stream(how, channels, streams, stream):
    """None for a tensor with one row per token, which is as late as its token says."""
    if streams == 1:
        return how(None, False)
    return how(stream * channels % 8, streams * channels % 8 > 0)


@gluon.constexpr_function
def _reading_stream(channels, streams, stream):
    return _of_stream(_reading, channels, streams, stream)


@gluon.constexpr_function
def _storing_stream(channels, streams, stream):
    return _of_stream(_storing, channels, streams, stream)


@gluon.jit
def allocate_vectors(SLOTS: gl.constexpr, ROWS: gl.constexpr):
    return gl.allocate_shared_memory(gl.bfloat16, [1 + SLOTS * (ROWS * WIDTH // VECTOR + 1), 1, VECTOR], LINES)


@gluon.jit
def panel_of(slots, slot, panel, row, ROWS: gl.constexpr, COUNT: gl.constexpr):
    """COUNT of a slot's ROWS, from one on, in a panel of vectors."""
    return _panel_at(slots, vector_of_slot(slot, ROWS) + (row * WIDTH + panel * PANEL) // VECTOR, COUNT)


@gluon.jit
def _panel_at(slots, at, COUNT: gl.constexpr):
    return slots.index(at)._reinterpret(gl.bfloat16, [COUNT, WIDTH], LINES).slice(0, PANEL, 1)


@gluon.jit
def own_channels(panel, STEP: gl.constexpr, layout: gl.constexpr):
    """What `load_late` needs to leave 0 where channels belong to the next step."""
    own = panel * PANEL + gl.arange(0, PANEL, gl.SliceLayout(0, layout)) // VECTOR * VECTOR < STEP
    return gl.where(own, -0x10000, 0)[None, :], gl.where(own, 0x1044, 0x4444)[None, :]


@gluon.jit
def _lateness(t, C: gl.constexpr, N: gl.constexpr):
    """Of tokens, as the instructions want it."""
    return (t % 2 if N > 1 else t * C % 8).to(gl.int32)


@gluon.jit
def load_late(
    slots, slot, panel, own, t, C: gl.constexpr, N: gl.constexpr, STREAM: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """A stream's channels as float32, from a panel of rows that are as late as they arrived."""
    at = vector_of_slot(slot, N * GROUP) + (STREAM * (GROUP * WIDTH) + panel * PANEL) // VECTOR
    here, following = _panel_at(slots, at, GROUP).load(layout), _panel_at(slots, at + 1, GROUP).load(layout)
    how: gl.constexpr = _reading_stream(C, N, STREAM)
    given = [here, following, own[0].broadcast_to(here.shape), own[1].broadcast_to(here.shape)]
    given = given + [_lateness(t[:, None], C, N).broadcast_to(here.shape)]
    bits = gl.inline_asm_elementwise(how[0], how[1], given, dtype=gl.int32, is_pure=True, pack=VECTOR)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def clear_ends(
    stream_slots, row_slots, step, begin, C: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    """Zeros behind the last channel of every row, in the step that holds it."""
    channel = begin + step // 2 * STEP
    if channel + STEP > C:
        for j in gl.static_range(len(stream_slots)):
            for i in range(N):
                _clear_end(stream_slots[j], step % SLOTS, i, C - channel, C, N)
            _clear_end(row_slots[j], step % SLOTS, 0, C - channel, C, 1)
        gl.thread_barrier()


@gluon.jit
def _clear_end(slots, slot, stream, count, C: gl.constexpr, N: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [TURNING_WARPS, 1], [1, 0])
    t = gl.arange(0, GROUP, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    at = vector_of_slot(slot, N * GROUP) + stream * (GROUP * WIDTH // VECTOR)
    tile = slots.index(at)._reinterpret(gl.bfloat16, [GROUP, WIDTH], LINES)
    rows = tile.load(layout)
    tile.store(gl.where(c < start_of(t, stream, C, N)[1] + count, rows, gl.zeros_like(rows)))


@gluon.jit
def _store(
    tensor, slots, slot, token, channel, T, C: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr, STREAM: gl.constexpr
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WORD_WARPS, 1], [1, 0])
    t = gl.arange(0, GROUP, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    at = vector_of_slot(slot, N * GROUP) + STREAM * (GROUP * WIDTH // VECTOR)
    here = slots.index(at)._reinterpret(gl.bfloat16, [GROUP, WIDTH], LINES)
    before = slots.index(at - 1)._reinterpret(gl.bfloat16, [GROUP, WIDTH], LINES).load(layout)
    how: gl.constexpr = _storing_stream(C, N, STREAM)
    vectors = gl.inline_asm_elementwise(
        how[0],
        how[1],
        [before, here.load(layout), _lateness(t, C, N).broadcast_to(before.shape)],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=VECTOR,
    )
    origin, count, tokens = origin_of(tensor, token, channel, C, N), gl.minimum(C - channel, STEP), T - token
    start, late = start_of(t, STREAM, C, N)
    vector = c // VECTOR * VECTOR
    whole = (vector >= late) & (vector + VECTOR <= late + count)
    gl.store(origin + (start + c), vectors, mask=whole & (t < tokens))
    # In whole steps only the first and the last eight channels can be in no whole vector.
    for k in range(0, STEP // VECTOR, STEP // VECTOR - 1 if count == STEP else 1):
        _store_alone(origin, _panel_at(slots, at + k, GROUP), k * VECTOR, count, tokens, C, N, STREAM)


@gluon.jit
def _store_alone(
    origin, tile, first, count, tokens, C: gl.constexpr, N: gl.constexpr, STREAM: gl.constexpr
):  # fmt: skip
    """Of eight places of a step those that are in no whole vector of memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WORD_WARPS, 1], [1, 0])
    t = gl.arange(0, GROUP, gl.SliceLayout(1, layout))[:, None]
    c = first + gl.arange(0, VECTOR, gl.SliceLayout(0, layout))[None, :]
    start, late = start_of(t, STREAM, C, N)
    vector = (late + c) // VECTOR * VECTOR
    alone = (vector < late) | (vector + VECTOR > late + count)
    rows = tile.slice(0, VECTOR, 1).load(layout)
    gl.store(origin + (start + late + c), rows, mask=alone & (c < count) & (t < tokens))


@gluon.jit
def store_late(
    streams, row, stream_slots, row_slots, step, first, T, begin, C: gl.constexpr, N: gl.constexpr,
    STEP: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """As a step of `store_tiles`."""
    token, channel = place_of(step, first, begin, STEP)
    for i in gl.static_range(N):
        _store(streams, stream_slots, step % SLOTS, token, channel, T, C, N, STEP, i)
    _store(row, row_slots, step % SLOTS, token, channel, T, C, 1, STEP, 0)
