"""The residual map on chip, forward and backward, for a block of tokens.

Matrices are [tokens, S, S] as the recipe stores them, padded to a power of two with `valid` false (R = 0) outside. MATH
is a `_math.Math`. The formulas and the reasons for log space are in ops/sinkhorn.py. The backward runs the iteration
again, a segment at a time, and keeps the matrices of its iterations in registers: nothing of it goes through memory.
"""

import triton
import triton.language as tl

from ._device import rounded_product
from ._projection import projection, projection_backward

ROWS = tl.constexpr(2)  # the axis of [tokens, S, S] that is summed
COLS = tl.constexpr(1)


@triton.jit
def residual_map(logits, valid, MATH: tl.constexpr):
    """R as stored, from logits [tokens, S, S] ([tokens, F] for permutation)."""
    if MATH.residual == "permutation":
        return _permutation(_softmax(logits, valid, 1), MATH)
    elif MATH.residual == "projection":
        return projection(logits, valid, MATH.streams)
    elif MATH.residual == "free":
        return logits
    else:
        state = _start(logits, valid, MATH)
        for _ in range(MATH.iterations):
            state, _w = _first_step(state, valid, MATH)
            state, _w = _second_step(state, valid, MATH)
        return tl.exp(state) if MATH.log_space else state


@triton.jit
def residual_map_backward(dmatrix, logits, valid, MATH: tl.constexpr):
    """The gradient of the logits from that of R as stored; dmatrix is 0 where not valid."""
    if MATH.residual == "permutation":
        weights = _softmax(logits, valid, 1)
        dweights = _permutation_backward(dmatrix, MATH)
        return weights * (dweights - tl.sum(rounded_product(dweights, weights), 1, keep_dims=True))
    elif MATH.residual == "projection":
        return projection_backward(dmatrix, logits, valid, MATH.streams)
    elif MATH.residual == "free":
        return dmatrix
    else:
        return _iterate_backward(dmatrix, logits, valid, MATH)


@triton.jit
def _iterate_backward(dmatrix, logits, valid, MATH: tl.constexpr):
    """In segments from the last: each is run again from the start, the matrices after each division are kept, and it is
    gone back through. A segment may reach beyond the last iteration: there nothing changes, forward or backward.
    """
    LENGTH: tl.constexpr = MATH.segment_iterations
    start = _start(logits, valid, MATH)
    dlog = dmatrix if MATH.segments > 0 else rounded_product(dmatrix, start)
    for segment in range(MATH.segments):
        first = (MATH.segments - 1 - segment) * LENGTH
        state = start
        for _ in range(first):
            state, _w = _first_step(state, valid, MATH)
            state, _w = _second_step(state, valid, MATH)
        divided = ()
        for step in tl.static_range(LENGTH):
            between, first_divided = _first_step(state, valid, MATH)
            after, second_divided = _second_step(between, valid, MATH)
            divided = divided + (first_divided, second_divided)
            state = tl.where(first + step < MATH.iterations, after, state)
        last = rounded_product(dmatrix, tl.exp(state) if MATH.log_space else state)
        dlog = tl.where(segment == 0, last, dlog)
        for step in tl.static_range(LENGTH):
            dbefore = _step_backward(dlog, divided[2 * (LENGTH - 1 - step) + 1], not MATH.rows_first)
            dbefore = _step_backward(dbefore, divided[2 * (LENGTH - 1 - step)], MATH.rows_first)
            dlog = tl.where(first + LENGTH - 1 - step < MATH.iterations, dbefore, dlog)
    return _start_backward(dlog, logits, valid, MATH)


@triton.jit
def _first_step(state, valid, MATH: tl.constexpr):
    return _normalise(state, valid, ROWS if MATH.rows_first else COLS, MATH)


@triton.jit
def _second_step(state, valid, MATH: tl.constexpr):
    return _normalise(state, valid, COLS if MATH.rows_first else ROWS, MATH)


@triton.jit
def _step_backward(dlog, divided, OVER_ROWS: tl.constexpr):
    return dlog - divided * tl.sum(dlog, ROWS if OVER_ROWS else COLS, keep_dims=True)


@triton.jit
def _normalise(state, valid, AXIS: tl.constexpr, MATH: tl.constexpr):
    """The state after dividing by sums along AXIS, and R where a sum (not eps) divided it, else 0."""
    if MATH.log_space:
        log_sum = _log_sum(state, AXIS)
        divided_by_sum = log_sum == log_sum
        if MATH.eps_mode == "none":
            log_divisor = log_sum
        elif MATH.eps_mode == "add":
            above = log_sum - MATH.log_eps
            log_divisor = tl.where(above > 0, log_sum, MATH.log_eps) + tl.log(1.0 + tl.exp(-tl.abs(above)))
        elif MATH.eps_mode == "clamp":
            divided_by_sum = log_sum >= MATH.log_eps
            log_divisor = tl.where(log_sum < MATH.log_eps, MATH.log_eps, log_sum)
        else:
            divided_by_sum = log_sum > MATH.log_eps
            log_divisor = tl.where(log_sum <= MATH.log_eps, 0.0 if AXIS == ROWS else float("inf"), log_sum)
        state = tl.where(valid, state - log_divisor, float("-inf"))
        return state, tl.where(divided_by_sum, tl.exp(state), 0.0)
    else:
        # One reciprocal per sum, to two ulps: an error that the next step divides out.
        reciprocal = 1.0 / (tl.sum(state, AXIS, keep_dims=True) + MATH.eps)
        state = tl.where(valid, rounded_product(state, reciprocal), 0.0)
        return state, state


@triton.jit
def _log_sum(log, AXIS: tl.constexpr):
    largest = tl.max(log, AXIS, keep_dims=True)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    return tl.log(tl.sum(tl.exp(log - largest), AXIS, keep_dims=True)) + largest


@triton.jit
def _start(logits, valid, MATH: tl.constexpr):
    """The state before the first of MATH.iterations."""
    if MATH.log_space:
        log = tl.where(valid, logits, float("-inf"))
        if MATH.init == "exp_minus_max":
            largest = tl.max(log, ROWS, keep_dims=True)
            log = tl.where(valid, log - largest, float("-inf"))
        return log
    else:
        state = _linear_start(logits, valid, MATH)
        if MATH.first_cols:
            state, _w = _normalise(state, valid, COLS, MATH)
        return state


@triton.jit
def _linear_start(logits, valid, MATH: tl.constexpr):
    start = _softmax(logits, valid, ROWS) if MATH.init == "softmax" else tl.abs(logits)
    return tl.where(valid, start + MATH.eps, 0.0)


@triton.jit
def _start_backward(dlog, logits, valid, MATH: tl.constexpr):
    if MATH.log_space:
        return dlog
    else:
        start = _linear_start(logits, valid, MATH)
        if MATH.first_cols:
            _state, divided = _normalise(start, valid, COLS, MATH)
            dlog = _step_backward(dlog, divided, False)
        dstart = tl.where(valid, tl.div_rn(dlog, tl.where(valid, start, 1.0)), 0.0)
        if MATH.init == "softmax":
            softmax = _softmax(logits, valid, ROWS)
            return softmax * (dstart - tl.sum(rounded_product(dstart, softmax), ROWS, keep_dims=True))
        else:
            return tl.where(logits > 0, dstart, tl.where(logits < 0, -dstart, 0.0))


@triton.jit
def _softmax(logits, valid, AXIS: tl.constexpr):
    logits = tl.where(valid, logits, float("-inf"))
    largest = tl.max(logits, AXIS, keep_dims=True)
    powers = tl.exp(logits - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(powers, AXIS, keep_dims=True)
    return tl.where(valid, tl.div_rn(powers, tl.where(total == 0.0, 1.0, total)), 0.0)


@triton.jit
def _permuted_columns(MATH: tl.constexpr):
    """For each row of the N! permutation matrices, in lexicographic order, the column of its one: N tensors [F]."""
    N: tl.constexpr = MATH.streams
    rest = tl.arange(0, MATH.padded_logits)
    used = rest * 0
    orderings: tl.constexpr = MATH.logits
    columns = ()
    for row in tl.static_range(N):
        orderings = orderings // (N - row)
        skip = rest // orderings
        rest = rest % orderings
        chosen = used * 0
        for c in tl.static_range(N):
            free = ((used >> c) & 1) == 0
            chosen = tl.where(free & (skip == 0), c, chosen)
            skip = tl.where(free, skip - 1, skip)
        used = used | (1 << chosen)
        columns = columns + (chosen,)
    return columns


@triton.jit
def _permutation(weights, MATH: tl.constexpr):
    """sum_k weights[k] P_k"""
    N: tl.constexpr = MATH.streams
    PADDED: tl.constexpr = MATH.padded_streams
    row_index = tl.arange(0, PADDED)[None, :, None]
    col_index = tl.arange(0, PADDED)[None, None, :]
    columns = _permuted_columns(MATH)
    matrix = tl.zeros((weights.shape[0], PADDED, PADDED), tl.float32)
    for row in tl.static_range(N):
        for c in tl.static_range(N):
            entry = tl.sum(tl.where((columns[row] == c)[None, :], weights, 0.0), 1)
            matrix = tl.where((row_index == row) & (col_index == c), entry[:, None, None], matrix)
    return matrix


@triton.jit
def _permutation_backward(dmatrix, MATH: tl.constexpr):
    """dL/dweights[k] = sum of dmatrix over the ones of P_k"""
    N: tl.constexpr = MATH.streams
    WEIGHTS: tl.constexpr = MATH.padded_logits
    row_index = tl.arange(0, MATH.padded_streams)[None, :, None]
    col_index = tl.arange(0, MATH.padded_streams)[None, None, :]
    columns = _permuted_columns(MATH)
    dweights = tl.zeros((dmatrix.shape[0], WEIGHTS), tl.float32)
    for row in tl.static_range(N):
        for c in tl.static_range(N):
            entry = tl.sum(tl.sum(tl.where((row_index == row) & (col_index == c), dmatrix, 0.0), 2), 1)
            dweights += tl.where((columns[row] == c)[None, :], entry[:, None], 0.0)
    return dweights
