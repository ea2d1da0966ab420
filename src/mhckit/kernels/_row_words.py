"""Rows of 2-byte channels that begin anywhere (C is no multiple of 4), loaded and stored as 8-byte words.

Loads of single channels keep few bytes on their way. Here a thread loads the word in which its four channels begin and
the one behind it, and shifts; the second word is a neighbour's first, so that memory is read once. Of such
words come four tiles, of which tile k has every fourth channel from k on. The word that holds a row's last channel is
loaded to its end, which may be up to six bytes behind the tensor's, as far as any memory is allocated.
"""

import triton
import triton.language as tl

# Channels in a word.
QUAD = tl.constexpr(4)


@triton.jit
def load_words(x, row, ahead, q, C: tl.constexpr, N: tl.constexpr, live):
    """Of N rows of C channels from `row` on, the words [tokens, words] of the channels 4q - ahead and three more; where
    there are none, any bits.
    """
    words = ()
    for i in tl.static_range(N):
        words = words + (_load_word(x, row + i * C - ahead, q, row + (i + 1) * C, live),)
    return words


@triton.jit
def _load_word(x, start, q, end, live):
    pointers = x.to(tl.pointer_type(tl.uint64)) + (start // QUAD + q)
    late = (start % QUAD * 16).to(tl.uint64)
    begin = start // QUAD * QUAD + q * QUAD
    low = tl.load(pointers, mask=live & (begin < end), other=0)
    high = tl.load(pointers + 1, mask=live & (begin + QUAD < end), other=0)
    return (low >> late) | (high << (63 - late) << 1)


@triton.jit
def existing(q, C: tl.constexpr):
    """Of words of the channels 4q to 4q + 3 the bits that belong to channels below C."""
    left = (tl.maximum(tl.minimum(C - q * QUAD, QUAD), 0) * 16).to(tl.uint64)
    ones = tl.full(q.shape, 0xFFFFFFFFFFFFFFFF, tl.uint64)
    return tl.where(left > 0, ones >> (64 - left), 0)


@triton.jit
def tiles_of(words, k: tl.constexpr, dtype: tl.constexpr):
    """Tile k of each, as float32."""
    tiles = ()
    for i in tl.static_range(len(words)):
        tiles = tiles + ((words[i] >> (16 * k)).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32),)
    return tiles


@triton.jit
def store_words(x, start, q, C: tl.constexpr, tiles, live, has_ends):
    """The inverse of `load_words` from the start of the word on in which a row of C channels at `start` begins.

    has_ends: whether words may be among these in which rows begin or end, whose channels are stored one by one.
    """
    first = q * QUAD - start % QUAD
    whole = (first >= 0) & (first + QUAD <= C)
    word = tl.zeros(first.shape, tl.uint64)
    values = ()
    for k in tl.static_range(QUAD):
        values = values + (tiles[k].to(x.dtype.element_ty),)
        word |= values[k].to(tl.uint16, bitcast=True).to(tl.uint64) << (16 * k)
    tl.store(x.to(tl.pointer_type(tl.uint64)) + (start // QUAD + q), word, mask=live & whole)
    if has_ends:
        for k in tl.static_range(QUAD):
            c = first + k
            tl.store(x + (start + c), values[k], mask=live & (c >= 0) & (c < C) & (whole == 0))
