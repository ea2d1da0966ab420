"""What J for Hopper needs of each token where rows begin anywhere, in shared memory, of both groups: coefficients and dz.

What the warps that move rows load waits in the queue of the L1 cache. What is loaded behind it waits as long, even if
the cache has it; so nothing is while they run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._device import collapse, join_last, load_float, mixed_back, scaled, split_last
from ._hopper_columns import load_columns
from ._hopper_copies import GROUP

NUMBERS_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROWS_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
BLOCK = gl.constexpr(8)  # rows of phi
BLOCK_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
# A left operand's rows and half of its columns.
HALF_OPERAND = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 0]],
        block_bases=[],
        shape=[2 * GROUP.value, 8],
    )
)


@gluon.jit
def allocate_staged(N: gl.constexpr, P: gl.constexpr, MIXES: gl.constexpr, HAS_NORM: gl.constexpr):
    NUMBERS: gl.constexpr = 2 * N + 1 + (1 if HAS_NORM else 0)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * NUMBERS, GROUP], NUMBERS_LAYOUT)
    blocks = gl.allocate_shared_memory(gl.bfloat16, [2 * (P // BLOCK), 2 * GROUP, BLOCK], BLOCK_LAYOUT)
    if MIXES:
        return numbers, blocks, gl.allocate_shared_memory(gl.float32, [2 * N, GROUP, N], ROWS_LAYOUT)
    else:
        return numbers, blocks


@gluon.jit
def stage(
    staged, group, t, T, tokens, is_low, dz_parts, read_weights, norm_share, k_share, k_more, post, res, N: gl.constexpr, P: gl.constexpr,
    WIDTH: gl.constexpr,
):
    live = t < T
    NUMBERS: gl.constexpr = 2 * N + 1 + (0 if norm_share is None else 1)
    weights, posts = load_columns(read_weights, t, live, N), load_columns(post, t, live, N)
    k = load_float(k_share, t, live)
    if k_more is not None:
        k += load_float(k_more, t, live)
    for o in gl.static_range(N):
        staged[0].index(group * NUMBERS + o).store(gl.reshape(posts[o], (GROUP,)))
        staged[0].index(group * NUMBERS + N + o).store(gl.reshape(weights[o], (GROUP,)))
    staged[0].index(group * NUMBERS + 2 * N).store(k)
    if norm_share is not None:
        staged[0].index(group * NUMBERS + 2 * N + 1).store(load_float(norm_share, t, live))
    if res is not None:
        mixes = load_columns(res, t, live, N * N)
        for o in gl.static_range(N):
            staged[2].index(group * N + o).store(gl.reshape(join_last(mixes[o * N : (o + 1) * N]), (GROUP, N)))
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, HALF_OPERAND))[None, :] + gl.where(is_low, BLOCK, 0)[:, None]
    for block in gl.static_range(P // BLOCK):
        rows = gl.load(dz_parts + tokens[:, None] * WIDTH + block * 2 * BLOCK + column, mask=(tokens < T)[:, None], other=0.0)
        staged[1].index(group * (P // BLOCK) + block).store(rows)


@gluon.jit
def load_dz_parts(staged, group, P: gl.constexpr, operand: gl.constexpr):
    BLOCKS: gl.constexpr = P // BLOCK
    blocks = ()
    for k in gl.static_range(BLOCKS):
        blocks = blocks + (staged[1].index(group * BLOCKS + k).load(HALF_OPERAND),)
    parts = ()
    for k in gl.static_range(BLOCKS):
        pair = gl.join(blocks[2 * k % BLOCKS], blocks[(2 * k + 1) % BLOCKS])
        part = gl.reshape(gl.permute(pair, (0, 2, 1)), (2 * GROUP, 2 * BLOCK))
        parts = parts + (gl.convert_layout(part, operand, assert_trivial=True),)
    return parts


@gluon.jit
def load_number(staged, group, k, N: gl.constexpr, HAS_NORM: gl.constexpr, layout: gl.constexpr):
    NUMBERS: gl.constexpr = 2 * N + 1 + (1 if HAS_NORM else 0)
    return staged[0].index(group * NUMBERS + k).load(gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def load_mixes(staged, group, o, N: gl.constexpr, layout: gl.constexpr):
    """H[o]."""
    row = gl.arange(0, GROUP, gl.SliceLayout(1, layout))
    WIDE: gl.constexpr = gl.reshape(join_last((row, row, row, row)), (GROUP, N)).type.layout
    values = split_last(staged[2].index(group * N + o).load(WIDE), N)
    columns = ()
    for k in gl.static_range(N):
        columns = columns + (gl.convert_layout(values[k], row.type.layout, assert_trivial=True)[:, None],)
    return columns


@gluon.jit
def load_collapsed(staged, group, N: gl.constexpr, MIXES: gl.constexpr, layout: gl.constexpr):
    """What x_in was collapsed with, in terms of x and f."""
    share = load_number(staged, group, 2 * N + 1, N, True, layout)
    posts = ()
    shares = ()
    mixes = ()
    for o in gl.static_range(N):
        posts = posts + (load_number(staged, group, o, N, True, layout),)
        shares = shares + (load_number(staged, group, N + o, N, True, layout) * share,)
        if MIXES:
            mixes = mixes + load_mixes(staged, group, o, N, layout)
    return mixed_back(shares, mixes, N) + (collapse(shares, posts, N),)
