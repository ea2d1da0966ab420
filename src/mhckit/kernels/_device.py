"""Device functions that more than one kernel calls: streams as tuples, exact dots, sums that stay inside a thread.

A kernel holds N streams as a tuple of N tiles [tokens, channels]: any N from one source, and each tile in the layout
that its memory accesses want. Values are float32 from the load to the store.
"""

import triton
import triton.language as tl


@triton.jit
def tokens_of_program(T, BLOCK_T: tl.constexpr):
    """The tokens of this program, in 64 bits because they are multiplied by N*C, and which of them exist."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    return t, t < T


@triton.jit
def channels_exist(c, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Which channels of a tile exist: all of them, known to the compiler, where tiles divide C."""
    if C % BLOCK_C == 0:
        return tl.full(c.shape, True, tl.int1)
    else:
        return c < C


@triton.jit
def load_float(pointer, offsets, mask):
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_as(pointer, offsets, value, mask):
    """Round to what the pointer holds."""
    tl.store(pointer + offsets, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_streams(x, offsets, mask, C: tl.constexpr, N: tl.constexpr):
    """The tiles of N streams whose first is at offsets."""
    tiles = ()
    for i in tl.static_range(N):
        tiles = tiles + (load_float(x, offsets + i * C, mask),)
    return tiles


@triton.jit
def load_per_token(pointer, t, live, COUNT: tl.constexpr):
    """COUNT values per token, as columns [tokens, 1]."""
    columns = ()
    for k in tl.static_range(COUNT):
        columns = columns + (load_float(pointer, t * COUNT + k, live)[:, None],)
    return columns


@triton.jit
def collapse(weights, streams, N: tl.constexpr):
    """sum_i weights_i streams_i"""
    total = weights[0] * streams[0]
    for i in tl.static_range(1, N):
        total += weights[i] * streams[i]
    return total


@triton.jit
def write_stream(o: tl.constexpr, streams, f, post, res, N: tl.constexpr):
    """y_o = sum_i res[o,i] x_i + post_o f, unrounded; res is () for identity."""
    if len(res) == 0:
        mixed = streams[o]
    else:
        mixed = res[o * N] * streams[0]
        for i in tl.static_range(1, N):
            mixed += res[o * N + i] * streams[i]
    return mixed + post[o] * f


@triton.jit
def rounded_product(a, b):
    """a * b, rounded before anything is added to it. Sums across threads must sum these.

    Threads that hold copies of a sum each add up its terms themselves, in an order of their own that gives the same
    bits as long as every term is a number. A product fused into the first addition is not: copies would differ in
    their last bit, and which of them is used, a matter of timing.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def column(matrix, k: tl.constexpr):
    """Column k of [tokens, columns]."""
    return tl.sum(tl.where(tl.arange(0, matrix.shape[1])[None, :] == k, matrix, 0.0), 1)


@triton.jit
def columns_of(matrix, COUNT: tl.constexpr):
    """The first columns of [tokens, columns], each [tokens, 1]."""
    columns = ()
    for k in tl.static_range(COUNT):
        columns = columns + (column(matrix, k)[:, None],)
    return columns


@triton.jit
def from_columns(columns, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """[tokens, PADDED] whose first columns are these, each [tokens]."""
    index = tl.arange(0, PADDED)[None, :]
    matrix = tl.where(index == 0, columns[0][:, None], 0.0)
    for k in tl.static_range(1, COUNT):
        matrix = tl.where(index == k, columns[k][:, None], matrix)
    return matrix


@triton.jit
def bfloat16_parts(wide):
    """Three bfloat16 tensors whose sum is wide: 8 bits of mantissa each hold the 24 of float32."""
    high = wide.to(tl.bfloat16)
    wide = wide - high.to(tl.float32)
    middle = wide.to(tl.bfloat16)
    return high, middle, (wide - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def dot_activation(activation, wide, accumulator, PRECISION: tl.constexpr):
    """accumulator + activation @ wide, where wide is float32 and loses nothing beside a bfloat16 activation.

    float16 lacks the range for such parts, so it goes the way of float32: tf32x3 (or ieee where that is missing).
    """
    if activation.dtype == tl.bfloat16:
        parts = bfloat16_parts(wide)
        for k in tl.static_range(3):
            accumulator = tl.dot(activation, parts[k], accumulator)
    else:
        accumulator = tl.dot(activation.to(tl.float32), wide, accumulator, input_precision=PRECISION)
    return accumulator


@triton.jit
def folded_zeros(BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, MMA_WARPS: tl.constexpr):
    """What `fold` returns, zero."""
    if MMA_WARPS > 0:
        return tl.zeros((BLOCK_T, MMA_WARPS, 4), tl.float32)
    else:
        return tl.zeros((BLOCK_T, BLOCK_C // 8), tl.float32)


@triton.jit
def fold(a, b, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, MMA_WARPS: tl.constexpr):
    """A first sum of a * b over some channels, so that a loop can accumulate cheaply; `unfold_sum` ends it.

    Tiles that come from a dot lie in the layout of the tensor cores: pairs of channels in a thread, four threads, then
    MMA_WARPS warps side by side, repeated; summed like this, nothing crosses a thread. Other tiles (MMA_WARPS = 0) are
    summed over eight neighbours, which are in one thread where 16-byte loads are (2-byte activations, C a multiple
    of 8), and in several otherwise.
    """
    if MMA_WARPS > 0:
        tile = a * b
        return tl.sum(tl.sum(tl.reshape(tile, (BLOCK_T, BLOCK_C // 8 // MMA_WARPS, MMA_WARPS, 4, 2)), 4), 1)
    else:
        return tl.sum(tl.reshape(rounded_product(a, b), (BLOCK_T, BLOCK_C // 8, 8)), 2)


@triton.jit
def unfold_sum(folded, MMA_WARPS: tl.constexpr):
    """[tokens] from what `fold` left."""
    if MMA_WARPS > 0:
        return tl.sum(tl.sum(folded, 2), 1)
    else:
        return tl.sum(folded, 1)
