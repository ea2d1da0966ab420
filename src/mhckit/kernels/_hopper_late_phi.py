"""phi of F1 for Hopper where C is no multiple of 8: the copy engine brings it up to three channels late.

Tiles of float32 begin at multiples of four channels. A stream's part of phi begins wherever the streams before it end,
so that its tiles are as late as the stream, which is known when the kernel is compiled. A step's channels from the 64th
on come first: the other piece, whose last channels are among their first places, finds those in `ends`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ._device import one_below_the_other
from ._hopper_copies import PANEL, PANELS

# Floats that begin at a 16-byte boundary: of an end, and of a thread's row of a tile.
FLOATS = gl.constexpr(4)
MOST_TILES = gl.constexpr(4)
ENDS_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
ROWS_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
# [rows, vectors, channels]: of an end, every thread of a row has all.
VECTORS_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1, 4], [2, 16, 1], [4, 1, 1], [2, 1, 0]))


@gluon.constexpr_function
def is_late(channels, stream):
    return stream * channels % FLOATS.value > 0


@gluon.constexpr_function
def _shifting(late):
    """Four channels of a row, so many places further on: from a thread's vector and the next one's, of 16, or for the
    last one from the end, which all of them have. Given: both, and which thread it is.
    """
    own, end = ([f"${begin + k}" for k in range(4)] for begin in (4, 8))
    following = [f"n{k}" for k in range(late)]
    lines = [".reg .pred first;", f".reg .b32 next, {', '.join(following)};"]
    lines += ["setp.eq.u32 first, $12, 0;", "add.u32 next, $12, 1;"]
    for k in range(late):
        lines.append(f"selp.b32 n{k}, {end[k]}, {own[k]}, first;")
        lines.append(f"shfl.sync.idx.b32 n{k}, n{k}, next, {(32 - 16) << 8 | 31}, 0xffffffff;")
    lines += [f"mov.b32 ${k}, {(own + following)[late + k]};" for k in range(4)]
    return "{" + "\n".join(lines) + "}", ",".join(["=&r"] * 4 + ["r"] * 12)


@gluon.jit
def allocate_ends(N: gl.constexpr, ROWS: gl.constexpr):
    """Of the tiles of all streams, one piece's."""
    return gl.allocate_shared_memory(gl.float32, [N, MOST_TILES * ROWS, FLOATS], ENDS_LAYOUT)


@gluon.jit
def begin_late_piece(
    phi, pieces, loaded, piece, begin, C: gl.constexpr, N: gl.constexpr, TILES: gl.constexpr, PIECES: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    """Has the copy engine bring a piece, of all streams. A step's upper panel comes first: the lower one ends in it."""
    ROWS: gl.constexpr = pieces.shape[1]
    slot = piece % PIECES
    channel = begin + piece // PANELS * STEP + (PANELS - 1 - piece % PANELS) * PANEL
    arrived = loaded.index(slot)
    mbarrier.expect(arrived, N * TILES * ROWS * PANEL * 4)
    for i in range(N):
        for r in gl.static_range(TILES):
            at = [r * ROWS, i * C // FLOATS * FLOATS + channel]
            tma.async_copy_global_to_shared(phi, at, arrived, pieces.index((slot * N + i) * TILES + r))


@gluon.jit
def keep_ends(pieces, ends, first, C: gl.constexpr, N: gl.constexpr, TILES: gl.constexpr):
    """Keeps each row's first vector of the piece that begins with tile `first`: that of the channels before it ends
    there.
    """
    for i in gl.static_range(N):
        if is_late(C, i):
            vectors = ()
            for r in gl.static_range(MOST_TILES):
                tile = pieces.index(first + i * TILES + min(r, TILES - 1))
                vectors = vectors + (tile.slice(0, FLOATS, 1).load(gl.SliceLayout(1, VECTORS_LAYOUT)),)
            upper, lower = one_below_the_other(vectors[0], vectors[1]), one_below_the_other(vectors[2], vectors[3])
            ends.index(i).store(one_below_the_other(upper, lower))


@gluon.jit
def load_late_rows(tile, ends, r: gl.constexpr, C: gl.constexpr, STREAM: gl.constexpr):
    """Tile r of a stream from its first channel on."""
    rows = tile.load(ROWS_LAYOUT)
    if is_late(C, STREAM):
        ROWS: gl.constexpr = tile.shape[0]
        end = ends.index(STREAM).slice(r * ROWS, ROWS).load(gl.SliceLayout(1, VECTORS_LAYOUT))
        wide = gl.reshape(gl.expand_dims(end, 1).broadcast_to([ROWS, PANEL // FLOATS, FLOATS]), (ROWS, PANEL))
        thread = gl.arange(0, PANEL, gl.SliceLayout(0, ROWS_LAYOUT))[None, :] // FLOATS
        how: gl.constexpr = _shifting(STREAM * C % FLOATS)
        given = [rows, gl.convert_layout(wide, ROWS_LAYOUT, assert_trivial=True), thread.broadcast_to(rows.shape)]
        rows = gl.inline_asm_elementwise(how[0], how[1], given, dtype=gl.float32, is_pure=False, pack=FLOATS)
    return rows
