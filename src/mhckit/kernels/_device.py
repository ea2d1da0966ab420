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
def row_start(x, t, ROWS: tl.constexpr, C: tl.constexpr):
    """Where the first of a token's ROWS rows of C channels of x begins.

    Rows that are not aligned are loaded and stored element by element. Some of them start at wider boundaries than
    others; the compiler would give each the layout that its own alignment allows, and exchange tiles between threads to
    mix them. A term it knows nothing about makes them all alike: 0, since kernels that call this have two-axis grids.
    """
    if C * x.dtype.element_ty.primitive_bitwidth % 128 == 0:
        return t * (ROWS * C)
    else:
        return t * (ROWS * C) + tl.program_id(2)


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
def join_last(tensors):
    """[..., 2, ..., 2] from 2^n tensors [...], in order. A thread holds the values that it held of each."""
    joined = tensors
    for _ in tl.static_range(len(tensors).bit_length() - 1):
        joined = _join_halves(joined)
    return joined[0]


@triton.jit
def _join_halves(tensors):
    HALF: tl.constexpr = len(tensors) // 2
    pairs = ()
    for k in tl.static_range(HALF):
        pairs = pairs + (tl.join(tensors[k], tensors[k + HALF]),)
    return pairs


@triton.jit
def split_last(tensor, COUNT: tl.constexpr):
    """The inverse of `join_last` on [rows, COUNT]: COUNT tensors [rows], in order."""
    ROWS: tl.constexpr = tensor.shape[0]
    LEVELS: tl.constexpr = COUNT.bit_length() - 1
    parts = (tl.reshape(tensor, (ROWS,) + (2,) * LEVELS),)
    for _ in tl.static_range(LEVELS):
        parts = _split_all(parts)
    return parts


@triton.jit
def _split_all(tensors):
    low = ()
    high = ()
    for k in tl.static_range(len(tensors)):
        even, odd = tl.split(tensors[k])
        low = low + (even,)
        high = high + (odd,)
    return low + high


@triton.jit
def one_below_the_other(top, bottom):
    """[2 rows, columns]. A thread holds the values that it held of each."""
    ROWS: tl.constexpr = top.shape[0]
    COLUMNS: tl.constexpr = top.shape[1]
    return tl.reshape(tl.permute(tl.join(top, bottom), (2, 0, 1)), (2 * ROWS, COLUMNS))


@triton.jit
def collapse(weights, streams, N: tl.constexpr):
    """sum_i weights_i streams_i, to the same bits in every kernel: left to itself, the compiler fuses either product of
    a first sum into it.
    """
    total = weights[0] * streams[0]
    for i in tl.static_range(1, N):
        total = tl.fma(weights[i], streams[i], total)
    return total


@triton.jit
def write_stream(o: tl.constexpr, streams, f, post, res, N: tl.constexpr):
    """y_o = sum_i res[o,i] x_i + post_o f, unrounded, to the same bits in every kernel; res is () for identity."""
    return write_row(o, streams, f, post[o], res[o * N : (o + 1) * N], N)


@triton.jit
def write_row(o: tl.constexpr, streams, f, post, row, N: tl.constexpr):
    """The same of post_o and of res[o], or ()."""
    mixed = streams[o] if len(row) == 0 else collapse(row, streams, N)
    return tl.fma(post, f, mixed)


@triton.jit
def add_mixed(tiles, G, row, o: tl.constexpr, N: tl.constexpr):
    """tiles_i + H[o,i] G, from the first o on; row is H[o], or () for identity."""
    if len(row) == 0:
        return tiles + (G,)
    else:
        added = ()
        for i in tl.static_range(N):
            added = added + (row[i] * G if o == 0 else tiles[i] + row[i] * G,)
        return added


@triton.jit
def scaled(columns, factor, N: tl.constexpr):
    scaled = ()
    for i in tl.static_range(N):
        scaled = scaled + (columns[i] * factor,)
    return scaled


@triton.jit
def mixed_back(weights, res, N: tl.constexpr):
    """sum_o H[o,i] weights_o for each i; res is () for identity."""
    if len(res) == 0:
        return weights
    else:
        mixed = ()
        for i in tl.static_range(N):
            total = res[i] * weights[0]
            for o in tl.static_range(1, N):
                total += res[o * N + i] * weights[o]
            mixed = mixed + (total,)
        return mixed


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
def bfloat16_parts(wide, PTX: tl.constexpr = False):
    """Two bfloat16 tensors whose sum is wide to within 2^-16 of it.

    The compiler rounds values one by one, on a slow unit. With PTX two are rounded at a time, which counts where a
    program has a multiprocessor to itself; the bits are the same.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            cvt.rn.bf16x2.f32 $0, $3, $2;
            shl.b32 a, $0, 16;
            and.b32 b, $0, 0xffff0000;
            sub.rn.f32 a, $2, a;
            sub.rn.f32 b, $3, b;
            cvt.rn.bf16x2.f32 $1, b, a;
            }""",
            "=&r,=r,r,r",
            [wide],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        high = wide.to(tl.bfloat16)
        return high, (wide - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def rounded(wide, dtype: tl.constexpr, PTX: tl.constexpr):
    """wide.to(dtype); PTX as in `bfloat16_parts`."""
    if PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [wide], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return wide.to(dtype)


@triton.jit
def end_dots(ASYNCHRONOUS: tl.constexpr):
    """No dot is under way any more, where they run beside the warps that ask for them.

    Wanted at the end of a loop's step whose dots read tiles that others read as well. Left to itself Triton 3.6 has
    copies of a later step overwrite such tiles while dots may still read them: only for tiles that nobody else reads
    does it keep one more in shared memory. It may also move sums that are under way, and then the assembler waits
    behind every single product.
    """
    if ASYNCHRONOUS:
        tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def part_column(p, PART: tl.constexpr):
    """Where part PART (0 high, 1 low) of row p of a projection lies: eight high parts, then their eight low parts.

    A tensor core's tile has 16 rows, of which a thread holds row i and row i + 8: both parts of a value, so that
    adding them up takes nothing but an addition.
    """
    return p // 8 * 16 + p % 8 + 8 * PART


@triton.jit
def stacked_parts(rows, PTX: tl.constexpr):
    """[2 ROWS, channels]: high and low parts, in the order of `part_column`."""
    ROWS: tl.constexpr = rows.shape[0]
    COLUMNS: tl.constexpr = rows.shape[1]
    high, low = bfloat16_parts(rows, PTX)
    stacked = tl.permute(tl.reshape(tl.join(high, low), (ROWS // 8, 8, COLUMNS, 2)), (0, 3, 1, 2))
    return tl.reshape(stacked, (2 * ROWS, COLUMNS))


@triton.jit
def sum_parts(rows):
    """[n, columns] from [2n, columns] whose rows are ordered by `part_column`."""
    HALF: tl.constexpr = rows.shape[0] // 2
    COLUMNS: tl.constexpr = rows.shape[1]
    return tl.reshape(tl.sum(tl.reshape(rows, (HALF // 8, 2, 8, COLUMNS)), 1), (HALF, COLUMNS))


@triton.jit
def pack_columns(tile, CHANNELS: tl.constexpr):
    """Channels reordered so that a thread of a dot with this tile gets CHANNELS neighbours of the result.

    Of every eight columns of a dot's result a thread holds two. In this order the pairs it holds are neighbouring
    channels: what it loads, mixes and stores with one access of CHANNELS values.
    """
    ROWS: tl.constexpr = tile.shape[0]
    WIDTH: tl.constexpr = tile.shape[1]
    pairs = tl.reshape(tile, (ROWS, WIDTH // (4 * CHANNELS), 4, CHANNELS // 2, 2))
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2, 4)), (ROWS, WIDTH))


@triton.jit
def unpack_columns(tile, CHANNELS: tl.constexpr):
    """The inverse of `pack_columns` on the result of a dot; moves no data."""
    ROWS: tl.constexpr = tile.shape[0]
    WIDTH: tl.constexpr = tile.shape[1]
    pairs = tl.reshape(tile, (ROWS, WIDTH // (4 * CHANNELS), CHANNELS // 2, 4, 2))
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2, 4)), (ROWS, WIDTH))


@triton.jit
def pieces(tile, PIECE: tl.constexpr):
    """A tile [tokens, channels] as one or two of PIECE channels."""
    TOKENS: tl.constexpr = tile.shape[0]
    if tile.shape[1] == PIECE:
        return (tile,)
    else:
        return tl.split(tl.permute(tl.reshape(tile, (TOKENS, 2, PIECE)), (0, 2, 1)))


@triton.jit
def folded_zeros(BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, FOLD: tl.constexpr):
    """What `fold` returns, zero."""
    return tl.zeros((BLOCK_T, BLOCK_C // FOLD), tl.float32)


@triton.jit
def fold(a, b, FOLD: tl.constexpr, IN_THREAD: tl.constexpr):
    """A first sum of a * b over FOLD neighbouring channels, so that a loop can accumulate cheaply; `tl.sum` ends it.

    IN_THREAD says that one thread holds them, and products may be fused into the sum: tiles that come from a dot with
    a packed phi, and 16-byte loads. Otherwise the sum crosses threads.
    """
    TOKENS: tl.constexpr = a.shape[0]
    WIDTH: tl.constexpr = a.shape[1]
    return tl.sum(tl.reshape(_product(a, b, IN_THREAD), (TOKENS, WIDTH // FOLD, FOLD)), 2)


@triton.jit
def fold_pair(a, b, c, d, FOLD: tl.constexpr, IN_THREAD: tl.constexpr):
    """[..., 2]: `fold` of a and b, and of c and d, all of them in one layout."""
    TOKENS: tl.constexpr = a.shape[0]
    WIDTH: tl.constexpr = a.shape[1]
    products = tl.join(_product(a, b, IN_THREAD), _product(c, d, IN_THREAD))
    return tl.sum(tl.reshape(products, (TOKENS, WIDTH // FOLD, FOLD, 2)), 2)


@triton.jit
def _product(a, b, IN_THREAD: tl.constexpr):
    return a * b if IN_THREAD else rounded_product(a, b)
