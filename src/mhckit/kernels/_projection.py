"""The residual map "projection" on chip, forward and backward, for a block of tokens. Formulas in ops/_projection.py.

A matrix is a tuple of its N columns, each [tokens, S] and 0 in the rows that pad it: a thread holds a row, and sums
along rows stay inside it. What a column has, or a pair of them, is alike in all rows: every thread works it out.
Pairs j < k of columns come in the order (0, 1), (0, 2), ... (1, 2), ...: those of column 0, which is eliminated first,
are the first of a tuple, and what is behind them is the tuple of the columns that remain.
"""

import triton
import triton.language as tl

from mhckit.ops import _projection as reference

from ._device import join_last, rounded_product

START = tl.constexpr(reference.START)
REACH = tl.constexpr(reference.REACH)
FOLLOW_STEPS = tl.constexpr(reference.FOLLOW_STEPS)
FOLLOW_STEPS_PER_STREAM = tl.constexpr(reference.FOLLOW_STEPS_PER_STREAM)
POLISH_STEPS = tl.constexpr(reference.POLISH_STEPS)
LONGEST_STEP = tl.constexpr(reference.LONGEST_STEP)
FIXED_POINT = tl.constexpr(reference.FIXED_POINT)
LARGEST_LOGIT = tl.constexpr(reference.LARGEST_LOGIT)
TINY = tl.constexpr(2.0**-126)
NOISE = tl.constexpr(reference.NOISE * 2.0**-23)


@triton.jit
def projection(logits, valid, N: tl.constexpr):
    """R [tokens, S, S] from logits of that shape."""
    return _as_tensor(_projected(logits, valid, N), logits)


@triton.jit
def projection_backward(dmatrix, logits, valid, N: tl.constexpr):
    """The gradient of the logits; all are [tokens, S, S]."""
    matrix = _projected(logits, valid, N)
    gradients = _as_columns(dmatrix, N)
    y = _less(gradients, _balance(_eliminate(_weights(matrix, N), N), matrix, gradients, N), N)
    dlogits = ()
    for j in tl.static_range(N):
        total = tl.zeros_like(y[j])
        for k in tl.static_range(N):
            if k != j:
                total += matrix[k] * (y[j] - y[k])
        dlogits = dlogits + (rounded_product(matrix[j], total),)
    return _as_tensor(dlogits, logits)


@triton.jit
def _projected(logits, valid, N: tl.constexpr):
    """R as columns."""
    log, lost = _moved_to_zero(logits, valid, N)
    log = _as_columns(log, N)
    lost = _as_columns(lost, N)
    potentials = _follow(log, N)
    norm = _rounded(_log_sum_of_rows(_plus(log, potentials, N), N))
    matrix = ()
    for k in tl.static_range(N):
        matrix = matrix + (_existing(tl.exp((log[k] - (norm - potentials[k])) + lost[k]), 0.0, N),)
    for _ in range(POLISH_STEPS):
        matrix = _rows_divided(matrix, N)
        step = _newton_step(_eliminate(_weights(matrix, N), N), matrix, N)
        scaled = ()
        for k in tl.static_range(N):
            scaled = scaled + (matrix[k] * tl.exp(step[k]),)
        matrix = scaled
    return _rows_divided(matrix, N)


@triton.jit
def _as_columns(matrix, N: tl.constexpr):
    """The first N columns of [tokens, S, S]. A thread that holds whole rows moves nothing."""
    TOKENS: tl.constexpr = matrix.shape[0]
    S: tl.constexpr = matrix.shape[1]
    parts = (matrix,)
    for _ in tl.static_range(S):
        if len(parts) < S:
            parts = _even_and_odd_columns(parts)
    columns = ()
    for k in tl.static_range(N):
        columns = columns + (tl.reshape(parts[k], (TOKENS, S)),)
    return columns


@triton.jit
def _even_and_odd_columns(matrices):
    """Of all matrices the even columns, then the odd ones."""
    TOKENS: tl.constexpr = matrices[0].shape[0]
    S: tl.constexpr = matrices[0].shape[1]
    HALF: tl.constexpr = matrices[0].shape[2] // 2
    even = ()
    odd = ()
    for i in tl.static_range(len(matrices)):
        first, second = tl.split(tl.reshape(matrices[i], (TOKENS, S, HALF, 2)))
        even = even + (first,)
        odd = odd + (second,)
    return even + odd


@triton.jit
def _as_tensor(columns, like):
    """[tokens, S, S], with columns of 0 behind these."""
    for _ in tl.static_range(like.shape[2] - len(columns)):
        columns = columns + (tl.zeros_like(columns[0]),)
    return tl.reshape(join_last(columns), like.shape)


@triton.jit
def _over_rows(column):
    """The sum of a column, in all of its rows."""
    return tl.broadcast_to(tl.sum(column, 1, keep_dims=True), column.shape)


@triton.jit
def _existing(column, OTHER: tl.constexpr, N: tl.constexpr):
    """[tokens, S] with OTHER in the rows that are padding."""
    if column.shape[1] == N:
        return column
    else:
        return tl.where(tl.arange(0, column.shape[1])[None, :] < N, column, OTHER)


@triton.jit
def _moved_to_zero(logits, valid, N: tl.constexpr):
    """The logits less the largest of each row, then of each column, and what rounding took away from that; both are
    [tokens, S, S], and 0 where not valid.
    """
    log = tl.where(logits > LARGEST_LOGIT, LARGEST_LOGIT, logits)
    log = tl.where(log < -LARGEST_LOGIT, -LARGEST_LOGIT, log)
    lost = tl.zeros_like(log)
    for step in tl.static_range(2):
        largest = tl.max(tl.where(valid, log, -4 * LARGEST_LOGIT), 2 - step, keep_dims=True)
        log, lost = _subtract(log, lost, largest)
    LOWEST: tl.constexpr = -REACH / N
    lost = tl.where(valid & (log > LOWEST), tl.clamp(lost, -1.0, 1.0), 0.0)
    return tl.where(valid, tl.where(log < LOWEST, LOWEST, log), 0.0), lost


@triton.jit
def _subtract(a, lost, b):
    """a - b, and lost with its rounding error, which is exact."""
    difference = a - b
    minus_b = difference - a
    return difference, lost + ((a - (difference - minus_b)) - (b + minus_b))


@triton.jit
def _rounded(value):
    return tl.floor(value * FIXED_POINT + 0.5) / FIXED_POINT


@triton.jit
def _follow(log, N: tl.constexpr):
    """The potential of each column at s = 1, rounded."""
    STEPS: tl.constexpr = FOLLOW_STEPS + FOLLOW_STEPS_PER_STREAM * N
    lowest = log[0]
    for k in tl.static_range(1, N):
        lowest = tl.minimum(lowest, log[k])
    lowest = tl.broadcast_to(tl.min(lowest, 1, keep_dims=True), lowest.shape)
    scale = START / tl.maximum(-lowest, START)
    ratio = tl.exp(tl.log(scale) * (-1.0 / STEPS))
    slopes = ()
    potentials = ()
    for k in tl.static_range(N):
        slope = -_over_rows(log[k]) / N
        slopes = slopes + (slope,)
        potentials = potentials + (scale * slope,)
    for step in range(STEPS):
        matrix = _softmax(log, scale, potentials, N)
        nodes = _eliminate(_weights(matrix, N), N)
        slopes = _less(slopes, _balance(nodes, matrix, _plus(log, slopes, N), N), N)
        next_scale = tl.where(step < STEPS - 1, scale * ratio, 1.0)
        x = _newton_step(nodes, matrix, N)
        moved = ()
        for k in tl.static_range(N):
            moved = moved + (potentials[k] + x[k] + (next_scale - scale) * slopes[k],)
        potentials = moved
        scale = next_scale
    rounded = ()
    for k in tl.static_range(N):
        rounded = rounded + (_rounded(potentials[k]),)
    return rounded


@triton.jit
def _less(a, b, N: tl.constexpr):
    values = ()
    for k in tl.static_range(N):
        values = values + (a[k] - b[k],)
    return values


@triton.jit
def _plus(a, b, N: tl.constexpr):
    values = ()
    for k in tl.static_range(N):
        values = values + (a[k] + b[k],)
    return values


@triton.jit
def _largest_of_rows(columns, N: tl.constexpr):
    largest = columns[0]
    for k in tl.static_range(1, N):
        largest = tl.maximum(largest, columns[k])
    return largest


@triton.jit
def _softmax(log, scale, potentials, N: tl.constexpr):
    """Of scale * log + potentials, along rows."""
    exponents = ()
    for k in tl.static_range(N):
        exponents = exponents + (scale * log[k] + potentials[k],)
    largest = _largest_of_rows(exponents, N)
    powers = ()
    total = tl.zeros_like(largest)
    for k in tl.static_range(N):
        powers = powers + (tl.exp(exponents[k] - largest),)
        total += powers[k]
    reciprocal = 1.0 / total
    matrix = ()
    for k in tl.static_range(N):
        matrix = matrix + (_existing(rounded_product(powers[k], reciprocal), 0.0, N),)
    return matrix


@triton.jit
def _log_sum_of_rows(log, N: tl.constexpr):
    largest = _largest_of_rows(log, N)
    total = tl.zeros_like(largest)
    for k in tl.static_range(N):
        total += tl.exp(log[k] - largest)
    return tl.log(total) + largest


@triton.jit
def _rows_divided(matrix, N: tl.constexpr):
    total = matrix[0]
    for k in tl.static_range(1, N):
        total += matrix[k]
    total = _existing(total, 1.0, N)
    divided = ()
    for k in tl.static_range(N):
        divided = divided + (tl.div_rn(matrix[k], total),)
    return divided


@triton.jit
def _weights(matrix, N: tl.constexpr):
    weights = ()
    for j in tl.static_range(N):
        for k in tl.static_range(j + 1, N):
            weights = weights + (_over_rows(rounded_product(matrix[j], matrix[k])),)
    return weights


@triton.jit
def _flows(matrix, d, N: tl.constexpr):
    flows = ()
    for j in tl.static_range(N):
        for k in tl.static_range(j + 1, N):
            product = rounded_product(matrix[j], matrix[k])
            flows = flows + (_over_rows(rounded_product(product, d[j] - d[k])),)
    return flows


@triton.jit
def _eliminate(weights, N: tl.constexpr):
    """Of each node but the last its degree, and the shares of those that remain, one node's behind the other's."""
    degrees = ()
    shares = ()
    for p in tl.static_range(N - 1):
        degree = weights[0]
        for k in tl.static_range(1, N - 1 - p):
            degree += weights[k]
        degree = tl.maximum(degree, TINY)
        own = ()
        for k in tl.static_range(N - 1 - p):
            own = own + (weights[k] / degree,)
        rest = ()
        for j in tl.static_range(N - 1 - p):
            for k in tl.static_range(j + 1, N - 1 - p):
                rest = rest + (tl.fma(weights[j], own[k], weights[N - 1 - p + len(rest)]),)
        degrees = degrees + (degree,)
        shares = shares + own
        weights = rest
    return degrees, shares


@triton.jit
def _put_back(nodes, above, last, N: tl.constexpr):
    """Every node from those that were eliminated after it, and how far it is above their weighted mean."""
    _degrees, shares = nodes
    values = (last,)
    for p in tl.static_range(N - 1):
        own = shares[len(shares) - (p + 1) * (p + 2) // 2 :]
        value = above[N - 2 - p]
        for k in tl.static_range(p + 1):
            value = tl.fma(own[k], values[k], value)
        values = (value,) + values
    return values


@triton.jit
def _balance(nodes, matrix, d, N: tl.constexpr):
    degrees, shares = nodes
    flows = _flows(matrix, d, N)
    above = ()
    for p in tl.static_range(N - 1):
        own = shares[p * (2 * N - 1 - p) // 2 :]
        total = flows[0]
        for k in tl.static_range(1, N - 1 - p):
            total += flows[k]
        above = above + (total / degrees[p],)
        rest = ()
        for j in tl.static_range(N - 1 - p):
            for k in tl.static_range(j + 1, N - 1 - p):
                onward = own[j] * flows[k] - flows[j] * own[k]
                rest = rest + (flows[N - 1 - p + len(rest)] + onward,)
        flows = rest
    return _put_back(nodes, above, tl.zeros_like(d[0]), N)


@triton.jit
def _newton_step(nodes, matrix, N: tl.constexpr):
    degrees, shares = nodes
    total = tl.zeros_like(matrix[0])
    alone = ()
    for k in tl.static_range(N):
        alone = alone + (1.0 - _over_rows(matrix[k]),)
        total += alone[k]
    missing = ()
    for k in tl.static_range(N):
        missing = missing + (alone[k] - total / N,)
    above = ()
    for p in tl.static_range(N - 1):
        own = shares[p * (2 * N - 1 - p) // 2 :]
        step = missing[0] * degrees[p] / (degrees[p] * degrees[p] + NOISE * NOISE)
        above = above + (tl.clamp(step, -LONGEST_STEP, LONGEST_STEP),)
        rest = ()
        for k in tl.static_range(N - 1 - p):
            rest = rest + (tl.fma(own[k], missing[0], missing[k + 1]),)
        missing = rest
    return _put_back(nodes, above, tl.zeros_like(total), N)
