"""Rows of 2-byte channels that begin anywhere (C is no multiple of 4), loaded and stored as 8-byte words.

Loads of single channels keep few bytes on their way. Here a thread has four neighbouring channels, of the word in which
they begin and the one behind it; that is a neighbour's first, so that memory is read once. Where they begin follows
from the token modulo 4: functions know it when they are compiled, as TURN, and a kernel has all four. They return four
tiles [1, words] for each row, of which tile k has every fourth channel from k on.

The word that holds a row's last channel is loaded to its end, which may be up to six bytes behind the tensor's, as far
as any memory is allocated.
"""

import triton
import triton.language as tl


@triton.jit
def load_words(
    x, token, q, AHEAD: tl.constexpr, C: tl.constexpr, N: tl.constexpr, TURN: tl.constexpr, WHOLE: tl.constexpr
):
    """Of each of a token's N rows, the channels 4q - AHEAD to 4q - AHEAD + 3, as float32, row by row. WHOLE: all exist;
    otherwise any values take the place of those that do not.
    """
    tiles = ()
    for i in tl.static_range(N):
        start = (token * N + i) * C - AHEAD
        tiles = tiles + _load_row(x, start, q, C + AHEAD, ((TURN * N + i) * C - AHEAD) % 4, WHOLE)
    return tiles


@triton.jit
def _load_row(x, start, q, COUNT: tl.constexpr, LATE: tl.constexpr, WHOLE: tl.constexpr):
    """LATE: start % 4. COUNT: of values from start on."""
    words = x.to(tl.pointer_type(tl.uint64)) + start // 4 + q
    low = tl.load(words) if WHOLE else tl.load(words, mask=4 * q < COUNT + LATE, other=0)
    high = low
    if LATE > 0:
        high = tl.load(words + 1) if WHOLE else tl.load(words + 1, mask=4 * q + 4 < COUNT + LATE, other=0)
    tiles = ()
    for k in tl.static_range(LATE, LATE + 4):
        value = (low if k < 4 else high) >> (16 * (k % 4))
        tiles = tiles + (value.to(tl.uint16).to(x.dtype.element_ty, bitcast=True).to(tl.float32),)
    return tiles


@triton.jit
def store_words(x, token, q, tiles, AHEAD: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr):
    """The inverse for a token's one row. AHEAD: token * C % 4, so that words are whole but for the row's ends."""
    start = token * C
    word = tl.zeros(q.shape, tl.uint64)
    values = ()
    for k in tl.static_range(4):
        values = values + (tiles[k].to(x.dtype.element_ty),)
        word |= values[k].to(tl.uint16, bitcast=True).to(tl.uint64) << (16 * k)
    words = x.to(tl.pointer_type(tl.uint64)) + (start - AHEAD) // 4 + q
    if WHOLE:
        tl.store(words, word)
    else:
        first = 4 * q - AHEAD
        whole = (first >= 0) & (first + 4 <= C)
        tl.store(words, word, mask=whole)
        for k in tl.static_range(4):  # beside another row's
            c = first + k
            tl.store(x + start + c, values[k], mask=(c >= 0) & (c < C) & (whole == 0))
