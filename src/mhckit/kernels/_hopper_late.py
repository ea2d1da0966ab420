"""Rows of Hopper's kernels that are worked on as they arrive, where C is no multiple of 8: up to seven places late.

`_hopper_rows` loads rows from the last 16-byte boundary before them, so that a channel lies in another place of each
row. Who wants eight channels of a row takes the two vectors of eight places that hold them; how late the row is says
which eight of their sixteen places they are, and in which half of a word a channel lies, which costs nothing where it
becomes a float32 anyway.

    load_late           a panel of a stream, as float32, of vectors one behind the other: J loads both
    load_late_tile      the same of a tile for the tensor cores, whose rows F1's lanes hold whole: the second vector is
                        the next lane's, and the last lane's is the first of the other panel
    clear_ends          zeros behind the last channel

With four streams a row is as late as its stream says, and four places more or less where the token is odd; with one row
for each token it depends on the token. Results lie in their places, from a row's first on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._hopper_copies import GROUP, PANEL, PANELS, SHARED
from ._hopper_rows import COMPUTING_WARPS, from_place
from ._hopper_vectors import VECTOR, rows_from


@gluon.constexpr_function
def _reading(late, alternates, from_next):
    """Eight channels as float32, of the sixteen places that begin with the vector which holds the first of them: `late`
    places later, and where tokens alternate four more or less if they are odd; or as late as is given (None). Given:
    the token's parity or lateness; what a word is masked with for the channel in its upper half, and how the one in its
    lower half is moved up; and where the second vector is the first one of the next lane (from_next), a lane's number,
    of eight in a row. The last lane's second vector is then the second one of the first.
    """
    words = [f"${8 + k}" for k in range(8)]
    given, upper, lower, *lane = (f"${16 + 8 * k}" for k in range(4 if from_next else 3))
    first = 0 if late is None else late % 4 if alternates else late
    last = 7 if late is None else (first + 7) // 2 + (2 if alternates else 0)  # of the words that are needed
    lines = [".reg .pred four, two, begins;", f".reg .b32 t, one, next, {', '.join(f'w{k}, n{k}' for k in range(8))};"]
    if from_next and last > 3:
        lines += [f"setp.eq.u32 begins, {lane[0]}, 0;", f"add.u32 next, {lane[0]}, 1;"]
        for k in range(4, last + 1):
            lines.append(f"selp.b32 n{k}, {words[k]}, {words[k - 4]}, begins;")
            lines.append(f"shfl.sync.idx.b32 n{k}, n{k}, next, {(32 - 8) << 8 | 31}, 0xffffffff;")
            words[k] = f"n{k}"
    if late is None:
        lines += from_place(words, given)
        lines += [f"prmt.b32 w{k}, w{k}, w{k + 1}, one;" for k in range(4)]
        words = [f"w{k}" for k in range(4)]
    elif alternates:
        lines.append(f"setp.{'ne' if late < 4 else 'eq'}.u32 four, {given}, 0;")
        for k in range(first // 2, (first + 7) // 2 + 1):
            lines.append(f"selp.b32 w{k}, {words[k + 2]}, {words[k]}, four;")
        words = [f"w{k}" for k in range(8)]
    for k in range(8):
        word, half = divmod(first + k, 2)
        if half:
            lines.append(f"and.b32 ${k}, {words[word]}, {upper};")
        else:
            lines.append(f"prmt.b32 ${k}, {words[word]}, 0, {lower};")
    return "{" + "\n".join(lines) + "}", ",".join(["=&r"] * 8 + ["r"] * (8 * (4 + len(lane))))


@gluon.constexpr_function
def _reading_stream(channels, streams, stream, from_next):
    """A tensor with one row for each token is as late as its token says."""
    if streams == 1:
        return _reading(None, False, from_next)
    return _reading(stream * channels % 8, streams * channels % 8 > 0, from_next)


@gluon.jit
def own_channels(panel, STEP: gl.constexpr, layout: gl.constexpr):
    """What is needed to read 0 where channels belong to the next step."""
    own = panel * PANEL + gl.arange(0, PANEL, gl.SliceLayout(0, layout)) // VECTOR * VECTOR < STEP
    return gl.where(own, -0x10000, 0)[None, :], gl.where(own, 0x1044, 0x4444)[None, :]


@gluon.jit
def _lateness(t, C: gl.constexpr, N: gl.constexpr):
    """Of tokens, as the instructions want it."""
    return (t % 2 if N > 1 else t * C % 8).to(gl.int32)


@gluon.jit
def _read(
    here, following, more, t, C: gl.constexpr, N: gl.constexpr, STREAM: gl.constexpr, FROM_NEXT: gl.constexpr,
):  # fmt: skip
    how: gl.constexpr = _reading_stream(C, N, STREAM, FROM_NEXT)
    given = [here, following, _lateness(t[:, None], C, N).broadcast_to(here.shape)]
    for k in gl.static_range(len(more)):
        given = given + [more[k].broadcast_to(here.shape)]
    bits = gl.inline_asm_elementwise(how[0], how[1], given, dtype=gl.int32, is_pure=not FROM_NEXT, pack=VECTOR)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def load_late(
    slots, slot, panel, own, t, C: gl.constexpr, N: gl.constexpr, STREAM: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """A stream's channels as float32, from a panel of rows that are as late as they arrived."""
    first = panel * (PANEL // VECTOR)
    here = rows_from(slots, slot, STREAM, first, GROUP, N * GROUP).slice(0, PANEL, 1)
    following = rows_from(slots, slot, STREAM, first + 1, GROUP, N * GROUP).slice(0, PANEL, 1)
    return _read(here.load(layout), following.load(layout), own, t, C, N, STREAM, False)


@gluon.jit
def load_late_tile(
    tile, other, own, t, C: gl.constexpr, N: gl.constexpr, STREAM: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The same from a tile of a panel; other: that of the other panel, of which the first one's last lane wants the
    first vector. The second one's last lane has no channels of its own.
    """
    lane = gl.arange(0, PANEL, gl.SliceLayout(0, layout))[None, :] // VECTOR
    return _read(tile.load(layout), other.load(layout), own + (lane,), t, C, N, STREAM, True)


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
    if slots.shape[2] == VECTOR:
        _clear_behind(rows_from(slots, slot, stream, 0, GROUP, N * GROUP), stream, count, C, N)
    else:
        tiles = slots._reinterpret(gl.bfloat16, [slots.shape[0] * N, GROUP, PANEL], SHARED)
        for panel in range(PANELS):
            tile = tiles.index((slot * PANELS + panel) * N + stream)
            _clear_behind(tile, stream, count - panel * PANEL, C, N)


@gluon.jit
def _clear_behind(tile, stream, count, C: gl.constexpr, N: gl.constexpr):
    """Each row keeps so many channels, which begin as late as it is."""
    LANES: gl.constexpr = tile.shape[1] // VECTOR
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LANES, LANES], [COMPUTING_WARPS, 1], [1, 0])
    t = gl.arange(0, GROUP, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))[None, :]
    rows = tile.load(layout)
    tile.store(gl.where(c < (t * N + stream) * C % 8 + count, rows, gl.zeros_like(rows)))
