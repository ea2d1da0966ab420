"""Sums over channels in J for Hopper: dpost, dres and the gradient of read weights, token by token.

A thread has its share of each number of one token: the sum over eight channels of every tile that it worked on. Where a
chunk of channels ends, four threads of a warp add up theirs, two warps exchange what they have, and the sums go to the
chunk's slot, from which `_parameters_bwd` adds them up.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._device import fold, join_last
from ._hopper_copies import GROUP


@gluon.jit
def add_products(new_totals, totals, G, f, mixed):
    """new_totals, and the next of totals with the products of G with f and with each stream that is mixed."""
    new_totals = new_totals + (totals[len(new_totals)] + fold(G, f, 8, True),)
    for i in gl.static_range(len(mixed)):
        new_totals = new_totals + (totals[len(new_totals)] + fold(G, mixed[i], 8, True),)
    return new_totals


@gluon.jit
def store_totals(sums, totals, room, chunk, first, T, N: gl.constexpr, NUMBERS: gl.constexpr, SUMS_READ: gl.constexpr):
    """[chunks, T, numbers]: of a token dpost, then dres, then the gradient of its read weights. What crosses threads
    goes where d was, which nobody needs any more.
    """
    PER_STREAM: gl.constexpr = NUMBERS // N
    MIXED: gl.constexpr = N * N if PER_STREAM > N else 0
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    outer = ()  # dpost and the gradient of the read weights
    inner = ()
    for o in gl.static_range(N):
        outer = outer + (totals[o * PER_STREAM],)
        inner = inner + totals[o * PER_STREAM + 1 : o * PER_STREAM + 1 + MIXED // N]
    if SUMS_READ:
        for o in gl.static_range(N):
            outer = outer + (totals[(o + 1) * PER_STREAM - 1],)
    gl.thread_barrier()
    of_outer = room[0]._reinterpret(gl.float32, [GROUP, 2, len(outer)], LINES)
    of_inner = room[1]._reinterpret(gl.float32, [GROUP, 2, N * N], LINES)
    _exchange(of_outer, outer)
    if MIXED > 0:
        _exchange(of_inner, inner)
    gl.thread_barrier()
    slot = sums + (chunk.to(gl.int64) * T + first) * NUMBERS
    _store_numbers(slot, of_outer, T - first, NUMBERS, N, MIXED)
    if MIXED > 0:
        _store_numbers(slot + N, of_inner, T - first, NUMBERS, MIXED, 0)


@gluon.jit
def _exchange(halves, totals):
    """Put where all threads see them: of each token both halves of its sums, which two warps have."""
    COUNT: gl.constexpr = len(totals)
    LANES: gl.constexpr = totals[0].shape[1] // 2
    halves.store(gl.sum(gl.reshape(join_last(totals), (GROUP, 2, LANES, COUNT)), 2))


@gluon.jit
def _store_numbers(slot, halves, count, NUMBERS: gl.constexpr, FIRST: gl.constexpr, SKIPPED: gl.constexpr):
    """The sums of both halves, of tokens that may be more than `count`; behind the FIRST some numbers are skipped."""
    COUNT: gl.constexpr = halves.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 2, 1], [32 // COUNT, 1, COUNT], [8, 1, 1], [2, 1, 0])
    total = gl.sum(halves.load(layout), 1)
    t = gl.arange(0, GROUP, gl.SliceLayout(1, total.type.layout))[:, None]
    k = gl.arange(0, COUNT, gl.SliceLayout(0, total.type.layout))[None, :]
    gl.store(slot + t * NUMBERS + gl.where(k < FIRST, k, k + SKIPPED), total, mask=t < count)
