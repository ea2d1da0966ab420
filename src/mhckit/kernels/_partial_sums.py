"""The order in which F1's sums over channels are added up, the same whichever programs add them.

F1 ends a sum every SUM_WIDTH channels; a slice of channels has up to 7 CHAIN of them. Each CHAIN of a slice's sums that
follow one another are added in that order, to c_0, c_1, ..., and these in pairs, the pairs in pairs:

    ((c_0 + c_1) + (c_2 + c_3)) + ((c_4 + c_5) + (c_6 + 0))

With many tokens a program of F1 takes a slice and does all of this on the way (`push`, `end_pairs`), or a part of it,
one, two or four chains, and F2 adds the parts in pairs. With few tokens each sum is the work of a program, and F2 loads
all of a slice's at once, to wait for them once (`add_up` in `_coefficients`).
"""

import triton
import triton.language as tl

CHAIN = tl.constexpr(8)
LEVELS = tl.constexpr(3)
CHAINS = tl.constexpr(1 << 3)


@triton.jit
def no_pairs(like):
    """What `push` begins with."""
    levels = ()
    for _ in tl.static_range(LEVELS):
        levels = levels + (tl.zeros_like(like),)
    return levels


@triton.jit
def push(levels, chain, index):
    """Chain number `index` comes in: level l holds a finished sum of 2^l chains until its neighbour is finished too."""
    carry = chain
    pairs = index >= 0
    pushed = ()
    for level in tl.static_range(LEVELS):
        is_second = ((index >> level) & 1) == 1
        pushed = pushed + (tl.where(pairs & (is_second == 0), carry, levels[level]),)
        carry = tl.where(pairs & is_second, levels[level] + carry, carry)
        pairs = pairs & is_second
    return pushed


@triton.jit
def end_pairs(levels, count):
    """The sum of `count` chains."""
    total = tl.where((count & 1) == 1, levels[0], 0.0)
    for level in tl.static_range(1, LEVELS):
        total = tl.where(((count >> level) & 1) == 1, levels[level] + total, total)
    return total


@triton.jit
def slots_of_chains(t, live, first, end, k: tl.constexpr, T):
    """Where the k-th sum of each chain lies in slots [slots, T] from `first` to `end`: [tokens * CHAINS]; and whether
    it exists.
    """
    SIZE: tl.constexpr = t.shape[0] * CHAINS
    slot = first + tl.arange(0, CHAINS) * CHAIN + k
    at = slot[None, :].to(tl.int64) * T + t[:, None]
    return tl.reshape(at, (SIZE,)), tl.reshape(live[:, None] & (slot < end)[None, :], (SIZE,))


@triton.jit
def add_in_pairs(chains):
    """[tokens, ...] from [tokens * CHAINS, ...]"""
    total = chains
    for _ in tl.static_range(LEVELS):
        total = _add_neighbours(total)
    return total


@triton.jit
def _add_neighbours(x):
    HALF: tl.constexpr = x.shape[0] // 2
    if len(x.shape) == 1:
        return tl.sum(tl.reshape(x, (HALF, 2)), 1)
    elif len(x.shape) == 2:
        return tl.sum(tl.reshape(x, (HALF, 2, x.shape[1])), 1)
    else:
        return tl.sum(tl.reshape(x, (HALF, 2, x.shape[1], x.shape[2])), 1)


@triton.jit
def channels_of_part(split, span, WIDTH: tl.constexpr, C: tl.constexpr, MOST_PARTS: tl.constexpr):
    """Where the channels of program `split` begin and end: slices of WIDTH, each in parts of `span`.

    Every warp of F1 for Hopper works it out, so not by division, for which some of them have no registers left.
    """
    parts = 1
    for k in tl.static_range(1, MOST_PARTS):
        parts += (k * span < WIDTH).to(tl.int32)
    slices = 0  # before this one
    for k in tl.static_range(1, (C + WIDTH - 1) // WIDTH):
        slices += (split >= k * parts).to(tl.int32)
    begin = slices * WIDTH + (split - slices * parts) * span
    return begin, tl.minimum(tl.minimum(begin + span, (slices + 1) * WIDTH), C)
