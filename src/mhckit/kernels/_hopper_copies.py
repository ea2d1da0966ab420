"""Streams on their way into shared memory and out of it, by Hopper's copy engine: where 128 divides C.

A program has 64 tokens, in two groups of 32 that take turns: step 2k is the first group's, step 2k + 1 the second's,
both with the same 128 channels. A step has a slot: of each tensor [tokens, N, C] two tiles, 64 channels of all N
streams, one stream below the other; of each [tokens, C] two tiles as well. One warp loads, one stores, and what
happens in between takes a result's tiles for those it was made of. Slots are taken in turn; barriers, one for each,
say that a slot is loaded, done or free.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ._descriptors import shared_layout
from ._hopper_launch import HOPPER_TOKENS
from ._launch import SUM_WIDTH

# [tokens, channels]: half of a program's tokens, and half of a step's channels.
STREAM_TILE = (HOPPER_TOKENS // 2, SUM_WIDTH // 2)
GROUP = gl.constexpr(STREAM_TILE[0])
PANEL = gl.constexpr(STREAM_TILE[1])
PANELS = gl.constexpr(SUM_WIDTH // STREAM_TILE[1])
# How tiles of 2-byte and of 4-byte numbers lie in shared memory.
SHARED = gl.constexpr(shared_layout(2, STREAM_TILE[1]))
SHARED_FLOAT = gl.constexpr(shared_layout(4, STREAM_TILE[1]))
# For each thread of the warps that copy.
COPY_REGISTERS = gl.constexpr(32)


@gluon.jit
def place_of(step, first, begin, STEP: gl.constexpr):
    """The first token and the first channel of a step."""
    return first + step % 2 * GROUP, begin + step // 2 * STEP


@gluon.jit
def steps_of(begin, end, C: gl.constexpr, STEP: gl.constexpr):
    """How many steps these channels are for both groups."""
    if C % (PANELS * PANEL) == 0:
        return (end - begin) // PANEL
    else:
        return (end - begin + (STEP - 1)) // STEP * 2


@gluon.jit
def load_tiles(
    streams, rows, stream_slots, row_slots, loaded, free, first, begin, end, C: gl.constexpr, N: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """streams: tensors [tokens, N, C], a tuple; rows: tensors [tokens, C]; each with its slots."""
    for step in range(steps_of(begin, end, C, PANELS * PANEL)):
        slot = step % SLOTS
        token, channel = place_of(step, first, begin, PANELS * PANEL)
        mbarrier.wait(free.index(slot), step // SLOTS % 2 ^ 1)
        arrived = loaded.index(slot)
        mbarrier.expect(arrived, (len(streams) * N + len(rows)) * GROUP * PANELS * PANEL * 2)
        for i in gl.static_range(N):
            for p in gl.static_range(PANELS):
                at, tile = [token, i * C + channel + p * PANEL], slot * PANELS + p
                for k in gl.static_range(len(streams)):
                    target = stream_slots[k].index(tile).slice(i * GROUP, GROUP)
                    tma.async_copy_global_to_shared(streams[k], at, arrived, target)
        for p in gl.static_range(PANELS):
            at, tile = [token, channel + p * PANEL], slot * PANELS + p
            for k in gl.static_range(len(rows)):
                tma.async_copy_global_to_shared(rows[k], at, arrived, row_slots[k].index(tile))


@gluon.jit
def store_tiles(
    streams, row, stream_slots, row_slots, done, free, first, begin, end, C: gl.constexpr, N: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """row: None where there is nothing but streams to store."""
    for step in range(steps_of(begin, end, C, PANELS * PANEL)):
        slot = step % SLOTS
        token, channel = place_of(step, first, begin, PANELS * PANEL)
        mbarrier.wait(done.index(slot), step // SLOTS % 2)
        for i in gl.static_range(N):
            for p in gl.static_range(PANELS):
                tile = stream_slots.index(slot * PANELS + p).slice(i * GROUP, GROUP)
                tma.async_copy_shared_to_global(streams, [token, i * C + channel + p * PANEL], tile)
        if row is not None:
            for p in gl.static_range(PANELS):
                tma.async_copy_shared_to_global(row, [token, channel + p * PANEL], row_slots.index(slot * PANELS + p))
        tma.store_wait(0)
        mbarrier.arrive(free.index(slot), count=1)
