"""What J for Hopper needs of each token where rows begin anywhere, in shared memory: coefficients and dz.

The warps that move rows load them through the L1 cache. What is loaded behind them, even if the cache has it, waits
about as long as they do: a tenth of J's time for a token's coefficients, and as much again for two registers that were
spilled. So nothing is, but for a norm's weight, long before it is needed, and registers that a norm, or sums of the
gradient of read weights, have no room for.

Of both groups: numbers [number, tokens], which are post, w, k, and the share of a norm; dz as left operands of dots,
eight columns at a time; the residual map, row by row [tokens, N].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._device import collapse, join_last, load_float, mixed_back, scaled, split_last
from ._hopper_columns import load_columns
from ._hopper_copies import GROUP

# Columns of dz, which are rows of phi.
BLOCK = 8
COLUMNS = gl.constexpr(BLOCK)
NUMBERS_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROWS_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
# Half of a left operand's columns, as threads hold them. Of 16 rows eight are high parts and eight are low ones.
HALF_OPERAND = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 0]],
        block_bases=[],
        shape=[2 * GROUP.value, BLOCK],
    )
)


@gluon.jit
def stage_tokens(
    dz_parts, read_weights, norm_share, k_share, k_more, post, res, first, T, N: gl.constexpr, P: gl.constexpr,
    DZ_WIDTH: gl.constexpr,
):  # fmt: skip
    """Allocates it and fills it. All is loaded before any is stored, beside the first rows, for which everybody waits.
    Barriers before it is read are the caller's.
    """
    NUMBERS: gl.constexpr = 2 * N + (1 if norm_share is None else 2)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * NUMBERS, GROUP], NUMBERS_LAYOUT)
    blocks = gl.allocate_shared_memory(gl.bfloat16, [2 * (P // COLUMNS), 2 * GROUP, COLUMNS], ROWS_LAYOUT)
    staged = (numbers, blocks)
    if res is not None:
        staged = staged + (gl.allocate_shared_memory(gl.float32, [2 * N, GROUP, N], ROWS_LAYOUT),)
    values = ()
    mixes = ()
    rows = ()
    for group in gl.static_range(2):
        before = first.to(gl.int64) + group * GROUP
        t = before + gl.arange(0, GROUP, gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])))
        values = values + _numbers_of(read_weights, norm_share, k_share, k_more, post, t, t < T, N)
        if res is not None:
            mixes = mixes + load_columns(res, t, t < T, N * N)
        rows = rows + _load_dz_blocks(dz_parts, before, T, P, DZ_WIDTH)
    for k in gl.static_range(2 * NUMBERS):
        numbers.index(k).store(values[k])
    for k in gl.static_range(len(mixes) // N):
        staged[2].index(k).store(gl.reshape(join_last(mixes[k * N : (k + 1) * N]), (GROUP, N)))
    for k in gl.static_range(len(rows)):
        blocks.index(k).store(rows[k])
    return staged


@gluon.jit
def _numbers_of(read_weights, norm_share, k_share, k_more, post, t, live, N: gl.constexpr):
    columns = load_columns(post, t, live, N) + load_columns(read_weights, t, live, N)
    numbers = ()
    for k in gl.static_range(2 * N):
        numbers = numbers + (gl.reshape(columns[k], (GROUP,)),)
    share = load_float(k_share, t, live)
    if k_more is not None:
        share += load_float(k_more, t, live)
    numbers = numbers + (share,)
    if norm_share is not None:
        numbers = numbers + (load_float(norm_share, t, live),)
    return numbers


@gluon.jit
def token_of_dz_row(r):
    """Which of a group's tokens row r of dz belongs to: neighbours, which lie in different banks, have threads of the
    same quarter of a warp.
    """
    return r // 16 * 8 + r % 8


@gluon.jit
def _load_dz_blocks(dz_parts, before, T, P: gl.constexpr, DZ_WIDTH: gl.constexpr):
    """Of a group, COLUMNS at a time, as `part_column` has them."""
    r = gl.arange(0, 2 * GROUP, gl.SliceLayout(1, HALF_OPERAND))
    t = (before + token_of_dz_row(r))[:, None]
    column = (r // 8 % 2 * COLUMNS)[:, None] + gl.arange(0, COLUMNS, gl.SliceLayout(0, HALF_OPERAND))[None, :]
    blocks = ()
    for k in gl.static_range(P // COLUMNS):
        blocks = blocks + (gl.load(dz_parts + t * DZ_WIDTH + (k * 2 * COLUMNS + column), mask=t < T, other=0.0),)
    return blocks


@gluon.jit
def load_dz_operands(staged, group, P: gl.constexpr, operand: gl.constexpr):
    """Left operands of the dots with phi's parts, 16 of them at a time: high parts of all P rows, then low ones."""
    BLOCKS: gl.constexpr = P // COLUMNS
    blocks = ()
    for k in gl.static_range(BLOCKS):
        blocks = blocks + (staged[1].index(group * BLOCKS + k).load(HALF_OPERAND),)
    operands = ()
    for k in gl.static_range(BLOCKS):
        pair = gl.join(blocks[2 * k % BLOCKS], blocks[(2 * k + 1) % BLOCKS])
        rows = gl.reshape(gl.permute(pair, (0, 2, 1)), (2 * GROUP, 2 * COLUMNS))
        operands = operands + (gl.convert_layout(rows, operand, assert_trivial=True),)
    return operands


@gluon.jit
def _number(staged, group, k, layout: gl.constexpr):
    NUMBERS: gl.constexpr = staged[0].shape[0] // 2
    return staged[0].index(group * NUMBERS + k).load(gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _row_of_map(staged, group, o, N: gl.constexpr, layout: gl.constexpr):
    """H[o], or () for identity."""
    columns = ()
    if len(staged) > 2:
        token = gl.arange(0, GROUP, gl.SliceLayout(1, layout))
        like = ()
        for _ in gl.static_range(N):
            like = like + (token,)
        wide: gl.constexpr = gl.reshape(join_last(like), (GROUP, N)).type.layout
        values = split_last(staged[2].index(group * N + o).load(wide), N)
        for i in gl.static_range(N):
            columns = columns + (gl.convert_layout(values[i], gl.SliceLayout(1, layout), assert_trivial=True)[:, None],)
    return columns


@gluon.jit
def load_of_stream(staged, group, o, N: gl.constexpr, layout: gl.constexpr):
    """w_o, k, post_o and H[o] of a group's tokens."""
    w, k = _number(staged, group, N + o, layout), _number(staged, group, 2 * N, layout)
    return w, k, _number(staged, group, o, layout), _row_of_map(staged, group, o, N, layout)


@gluon.jit
def load_collapsed(staged, group, N: gl.constexpr, layout: gl.constexpr):
    """What x_in was collapsed with, in terms of x and f, times the share of a norm."""
    posts = ()
    weights = ()
    mixes = ()
    for o in gl.static_range(N):
        w, _k, post, row = load_of_stream(staged, group, o, N, layout)
        posts, weights, mixes = posts + (post,), weights + (w,), mixes + row
    shares = scaled(weights, _number(staged, group, 2 * N + 1, layout), N)
    return mixed_back(shares, mixes, N) + (collapse(shares, posts, N),)
