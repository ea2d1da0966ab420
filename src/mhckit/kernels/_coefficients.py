"""Coefficients of a block of tokens on chip: from the rows of the projection to pre, post and H, and back.

Formulas in ops/activate.py. pre and post are [tokens, padded N]; residual logits [tokens, S, S], or flat [tokens, R]
for permutation and where the logits themselves are wanted. Padding is 0. MATH is a `_math.Math`.
"""

import triton
import triton.language as tl

from ._device import bfloat16_parts, join_last, load_float, part_column, rounded_product, store_as
from ._partial_sums import CHAIN, add_in_pairs, slots_of_chains


@triton.jit
def reciprocal_rms(mean_square, MATH: tl.constexpr):
    if MATH.norm_eps_inside:
        return tl.div_rn(1.0, tl.sqrt_rn(mean_square + MATH.norm_eps))
    else:
        return tl.div_rn(1.0, tl.sqrt_rn(mean_square) + MATH.norm_eps)


@triton.jit
def reciprocal_rms_backward(dr, mean_square, MATH: tl.constexpr):
    r = reciprocal_rms(mean_square, MATH)
    if MATH.norm_eps_inside:
        return -0.5 * dr * r * r * r
    else:
        rms = tl.sqrt_rn(mean_square)
        return tl.where(rms > 0, tl.div_rn(-0.5 * dr * r * r, tl.where(rms > 0, rms, 1.0)), rms * dr)


@triton.jit
def stream_index(MATH: tl.constexpr):
    """[1, padded N] and which of them exist."""
    n = tl.arange(0, MATH.padded_streams)[None, :]
    return n, n < MATH.streams


@triton.jit
def residual_index(MATH: tl.constexpr):
    """Where each residual logit lies among a token's, in the shape the residual map wants, and which exist."""
    if MATH.flat:
        index = tl.arange(0, MATH.padded_logits)[None, :]
        return index, index < MATH.logits
    else:
        row = tl.arange(0, MATH.padded_streams)[None, :, None]
        col = tl.arange(0, MATH.padded_streams)[None, None, :]
        return row * MATH.streams + col, (row < MATH.streams) & (col < MATH.streams)


@triton.jit
def residual_turn(program, residual_programs, EVERY: tl.constexpr):
    """Whether this is one of the programs that take residual maps, every EVERY-th until there are so many, and which of
    its kind it is.
    """
    turn = program // EVERY
    takes_maps = (program % EVERY == 0) & (turn < residual_programs)
    return takes_maps, tl.where(takes_maps, turn, program - tl.minimum(turn + 1, residual_programs))


@triton.jit
def matrix_index(MATH: tl.constexpr):
    """Where each entry of R, as stored, lies in H [out, in], and which exist."""
    row = tl.arange(0, MATH.padded_streams)[None, :, None]
    col = tl.arange(0, MATH.padded_streams)[None, None, :]
    index = col * MATH.streams + row if MATH.transposed else row * MATH.streams + col
    return index, (row < MATH.streams) & (col < MATH.streams)


@triton.jit
def load_matrices(pointer, first, live, MATH: tl.constexpr, TRANSPOSED: tl.constexpr):
    """[tokens, S, S] from N*N values per token at first [tokens], stored transposed or not; 0 outside of N.

    Loaded as a vector per column, so that a thread holds whole rows: sums along them stay inside it, sums of columns
    inside its warp. Left to itself the compiler would spread a matrix over warps.
    """
    N: tl.constexpr = MATH.streams
    PADDED: tl.constexpr = MATH.padded_streams
    TOKENS: tl.constexpr = first.shape[0]
    row = tl.arange(0, PADDED)[None, :]
    at = tl.reshape(first[:, None] + row * (1 if TRANSPOSED else N), (TOKENS * PADDED,))
    here = tl.reshape(live[:, None] & (row < N), (TOKENS * PADDED,))
    columns = ()
    for col in tl.static_range(PADDED):
        columns = columns + (load_float(pointer, at + col * (N if TRANSPOSED else 1), here & (col < N)),)
    return tl.reshape(join_last(columns), (TOKENS, PADDED, PADDED))


@triton.jit
def beside_residual(value, MATH: tl.constexpr):
    """[tokens] in a shape that broadcasts against the residual logits."""
    return value[:, None] if MATH.flat else value[:, None, None]


@triton.jit
def add_up(sums, t, live, T, READS: tl.constexpr, WRITES: tl.constexpr, MANY: tl.constexpr, MATH: tl.constexpr):
    """The sum of squares of each token, then those groups of z's rows that a read (pre) or the next write (post and the
    residual map) takes, from the slots that F1 left: one to four for each slice of channels, or MANY (`_partial_sums`).
    """
    partials, squares, slots, together = sums
    if MANY:
        total = _load_sums(partials, squares, t, live & (slots < 0), READS, WRITES, MATH)
        for first in range(0, slots, together):
            end = tl.minimum(first + together, slots)
            at, here = slots_of_chains(t, live, first, end, 0, T)
            chains = _load_sums(partials, squares, at, here, READS, WRITES, MATH)
            for k in tl.static_range(1, CHAIN):
                at, here = slots_of_chains(t, live, first, end, k, T)
                chains = _add_all(chains, _load_sums(partials, squares, at, here, READS, WRITES, MATH))
            total = _add_all(total, _add_all_in_pairs(chains))
        return total
    else:
        total = _add_parts(sums, 0, t, live, T, READS, WRITES, MATH)
        for first in range(together, slots, together):
            total = _add_all(total, _add_parts(sums, first, t, live, T, READS, WRITES, MATH))
        return total


@triton.jit
def _add_parts(sums, first, t, live, T, READS: tl.constexpr, WRITES: tl.constexpr, MATH: tl.constexpr):
    """The sum of a slice whose slots begin with `first`: in pairs, as a program that takes all of them adds it up."""
    together = sums[3]
    total = _load_slot(sums, first, 0, t, live, T, READS, WRITES, MATH)
    if together > 1:
        total = _add_all(total, _load_slot(sums, first, 1, t, live, T, READS, WRITES, MATH))
    if together > 2:
        pair = _load_slot(sums, first, 2, t, live, T, READS, WRITES, MATH)
        pair = _add_all(pair, _load_slot(sums, first, 3, t, live, T, READS, WRITES, MATH))
        total = _add_all(total, pair)
    return total


@triton.jit
def _load_slot(
    sums, first, part: tl.constexpr, t, live, T, READS: tl.constexpr, WRITES: tl.constexpr, MATH: tl.constexpr
):
    """Part of a slice, or 0 where there are fewer."""
    partials, squares, slots, together = sums
    slot = first + part
    here = live & (part < together) & (slot < slots)
    return _load_sums(partials, squares, tl.cast(slot, tl.int64) * T + t, here, READS, WRITES, MATH)


@triton.jit
def _load_sums(partials, squares, at, here, READS: tl.constexpr, WRITES: tl.constexpr, MATH: tl.constexpr):
    n, is_stream = stream_index(MATH)
    values = (load_float(squares, at, here),)
    if READS:
        values = values + (load_group(partials, 0, n, is_stream, at, here, MATH),)
    if WRITES and MATH.post != "none":
        values = values + (load_group(partials, 1, n, is_stream, at, here, MATH),)
    if WRITES and MATH.logits > 0:
        index, is_logit = residual_index(MATH)
        values = values + (load_group(partials, 2, index, is_logit, at, here, MATH),)
    return values


@triton.jit
def _add_all(a, b):
    values = ()
    for i in tl.static_range(len(a)):
        values = values + (a[i] + b[i],)
    return values


@triton.jit
def _add_all_in_pairs(chains):
    values = ()
    for i in tl.static_range(len(chains)):
        values = values + (add_in_pairs(chains[i]),)
    return values


@triton.jit
def load_group(z, GROUP: tl.constexpr, index, exists, t, live, MATH: tl.constexpr):
    """A group of the rows of z [T, P] for each token: 0 pre, 1 post, 2 residual."""
    first = t * MATH.rows + GROUP * MATH.streams
    if GROUP == 2 and not MATH.flat:
        return load_matrices(z, first, live, MATH, False)
    else:
        return load_float(z, first[:, None] + index, live[:, None] & exists)


@triton.jit
def tanh(x):
    """Exact to rounding near 0 as well, where (1 - e) / (1 + e) cancels."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    power = tl.exp(-2 * tl.abs(x))
    far = (1 - power) / (1 + power)
    return tl.where(square < 0.09, near, tl.where(x < 0, -far, far))


@triton.jit
def activated(z, r, MATH: tl.constexpr):
    """What scale multiplies: the normalised projection, through tanh if free."""
    normed = z * r
    return tanh(normed) if MATH.pre == "free" else normed


@triton.jit
def logits_of(z, r, scale, bias, GROUP: tl.constexpr, index, exists, MATH: tl.constexpr):
    """Logits of a group, and what scale multiplies in them (static: nothing)."""
    bias = load_float(bias, GROUP * MATH.streams + index, exists)
    if MATH.dynamic:
        inner = activated(z, r, MATH)
        return inner * tl.load(scale + GROUP).to(tl.float32) + bias, inner
    else:
        return z + bias, z


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def pre_of(logits, exists, MATH: tl.constexpr):
    if MATH.pre == "free":
        return logits
    else:
        pre = tl.where(exists, sigmoid(logits) + MATH.pre_eps, 0.0)
        if MATH.pre == "normalized":
            pre = tl.div_rn(pre, tl.sum(pre, 1, keep_dims=True) + MATH.normalized_pre_eps)
        return pre


@triton.jit
def pre_backward(dpre, logits, exists, MATH: tl.constexpr):
    if MATH.pre == "free":
        return dpre
    else:
        weight = sigmoid(logits)
        if MATH.pre == "normalized":
            raw = tl.where(exists, weight + MATH.pre_eps, 0.0)
            total = tl.sum(raw, 1, keep_dims=True) + MATH.normalized_pre_eps
            dpre = tl.div_rn(dpre - tl.div_rn(tl.sum(rounded_product(dpre, raw), 1, keep_dims=True), total), total)
        return dpre * weight * (1 - weight)


@triton.jit
def post_of(logits, MATH: tl.constexpr):
    if MATH.post == "free":
        return logits
    else:
        return MATH.post_scale * sigmoid(logits) + MATH.post_eps


@triton.jit
def post_backward(dpost, logits, MATH: tl.constexpr):
    if MATH.post == "free":
        return dpost
    else:
        weight = sigmoid(logits)
        return dpost * MATH.post_scale * weight * (1 - weight)


@triton.jit
def group_backward(
    dlogits, z, inner, r, scale, dz, sums, FIRST: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, index, exists,
    t, live, MATH: tl.constexpr,
):  # fmt: skip
    """Finish a group: store dz, and the sums over these tokens of D and of D inner; returns its share of dL/dr.

    sums points at this program's [2, COUNT], the first of whose columns is row FIRST.
    """
    if GROUP == 2:
        token, here = beside_residual(t, MATH), beside_residual(live, MATH)
    else:
        token, here = t[:, None], live[:, None]
    row = GROUP * MATH.streams + index
    dlogits = tl.where(here & exists, dlogits, 0.0)
    store_as(sums, row - FIRST, tl.sum(dlogits, 0, keep_dims=True), exists)
    if MATH.dynamic:
        store_as(sums + COUNT, row - FIRST, tl.sum(rounded_product(dlogits, inner), 0, keep_dims=True), exists)
        dnormed = dlogits * tl.load(scale + GROUP).to(tl.float32)
        if MATH.pre == "free":
            dnormed = dnormed * (1 - inner * inner)
        _store_dz(dz, token, row, dnormed * r, here & exists, MATH)
        return _sum_of_token(rounded_product(dnormed, z), GROUP, MATH)
    else:
        return tl.zeros((t.shape[0],), tl.float32)


@triton.jit
def _store_dz(dz, token, row, value, mask, MATH: tl.constexpr):
    """As it is, or in two parts for the dots of J and P where dz holds bfloat16."""
    if dz.dtype.element_ty == tl.bfloat16:
        high, low = bfloat16_parts(value)
        tl.store(dz + token * MATH.part_columns + part_column(row, 0), high, mask=mask)
        tl.store(dz + token * MATH.part_columns + part_column(row, 1), low, mask=mask)
    else:
        store_as(dz, token * MATH.rows + row, value, mask)


@triton.jit
def _sum_of_token(value, GROUP: tl.constexpr, MATH: tl.constexpr):
    total = tl.sum(value, 1)
    return tl.sum(total, 1) if GROUP == 2 and not MATH.flat else total
