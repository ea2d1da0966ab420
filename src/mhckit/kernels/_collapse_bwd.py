"""B's pass over the streams: q, s, dw and b of `_read_bwd`, the sums over channels.

They stay in a thread until the end. Where rows begin anywhere a program has one token, and loads words (`_row_words`).
"""

import triton
import triton.language as tl

from ._device import (
    channels_exist,
    collapse,
    columns_of,
    fold,
    folded_zeros,
    from_columns,
    load_float,
    load_streams,
    rounded_product,
)
from ._row_words import load_words


@triton.jit
def collapse_backward(
    y,
    dx_in,
    norm_weight,
    u,
    w,
    token,
    t,
    live,
    C: tl.constexpr,
    MATH: tl.constexpr,
    WORDS: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dL/dw [tokens, padded N], and b, the share of u a in the gradient d of the collapsed vector."""
    N: tl.constexpr = MATH.streams
    PADDED: tl.constexpr = MATH.padded_streams
    NORM: tl.constexpr = norm_weight is not None
    share = tl.zeros((BLOCK_T,), tl.float32)
    weights = columns_of(w, N)
    if WORDS:
        dw = tl.zeros((BLOCK_T, PADDED), tl.float32)
        s = dw
        for turn in tl.static_range(4):
            if token % 4 == turn:
                sums = _sum_words(y, dx_in, norm_weight, weights, token, C, N, turn, BLOCK_C)
                dw = from_columns(sums[:N], N, PADDED)
                s = from_columns(sums[N:], N, PADDED) if NORM else dw
    else:
        products = _no_products(N, NORM, BLOCK_T, BLOCK_C, FOLD)
        for start in tl.range(0, C, BLOCK_C, num_stages=STAGES):
            c = start + tl.arange(0, BLOCK_C)
            here = channels_exist(c, C, BLOCK_C)
            tile = live[:, None] & here[None, :]
            e = load_float(dx_in, t[:, None] * C + c[None, :], tile)
            streams = load_streams(y, t[:, None] * (N * C) + c[None, :], tile, C, N)
            products = _add_products(products, e, streams, norm_weight, weights, c, here, N, FOLD)
        sums = _sums(products)
        dw = from_columns(sums[:N], N, PADDED)
        s = from_columns(sums[N:], N, PADDED) if NORM else dw
    if NORM:
        inverse = load_float(u, t, live)
        share += tl.sum(rounded_product(w, dw), 1) * inverse / C
        dw = inverse[:, None] * (dw - (inverse * share)[:, None] * s)
    return dw, share


@triton.jit
def _no_products(N: tl.constexpr, NORM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, FOLD: tl.constexpr):
    """Of each stream with e, and with a norm then with a, folded."""
    products = ()
    for _ in tl.static_range(2 * N if NORM else N):
        products = products + (folded_zeros(BLOCK_T, BLOCK_C, FOLD),)
    return products


@triton.jit
def _add_products(products, e, streams, norm_weight, weights, c, here, N: tl.constexpr, FOLD: tl.constexpr):
    NORM: tl.constexpr = norm_weight is not None
    if NORM:
        e *= load_float(norm_weight, c, here)[None, :]
        a = collapse(weights, streams, N)
    with_e = ()
    with_a = ()
    for i in tl.static_range(N):
        with_e = with_e + (products[i] + fold(e, streams[i], FOLD, True),)
        if NORM:
            with_a = with_a + (products[N + i] + fold(a, streams[i], FOLD, True),)
    return with_e + with_a


@triton.jit
def _sums(products):
    sums = ()
    for i in tl.static_range(len(products)):
        sums = sums + (tl.sum(products[i], 1),)
    return sums


@triton.jit
def _sum_words(
    y, dx_in, norm_weight, weights, token, C: tl.constexpr, N: tl.constexpr, TURN: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The sums of one token, where rows begin anywhere: first over the channels that are left beside whole steps."""
    STEP: tl.constexpr = BLOCK_C // 4
    STEPS: tl.constexpr = C // BLOCK_C
    LEFT: tl.constexpr = 1 << ((C + 3) // 4 - STEPS * STEP - 1).bit_length()
    NORM: tl.constexpr = norm_weight is not None
    left = _no_products(N, NORM, 1, LEFT, 1)
    left = _add_words(left, y, dx_in, norm_weight, weights, token, STEPS * STEP, C, N, TURN, LEFT, False)
    products = _no_products(N, NORM, 1, STEP, 1)
    for step in tl.range(0, STEPS, num_stages=1):
        products = _add_words(products, y, dx_in, norm_weight, weights, token, step * STEP, C, N, TURN, STEP, True)
    of_left, of_steps = _sums(left), _sums(products)
    sums = ()
    for i in tl.static_range(len(of_left)):
        sums = sums + (of_left[i] + of_steps[i],)
    return sums


@triton.jit
def _add_words(
    products, y, dx_in, norm_weight, weights, token, first, C: tl.constexpr, N: tl.constexpr, TURN: tl.constexpr,
    COUNT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    q = tl.arange(0, COUNT) + first
    gradients = load_words(dx_in, token, q[None, :], 0, C, 1, TURN, WHOLE)
    tiles = load_words(y, token, q[None, :], 0, C, N, TURN, WHOLE)
    for k in tl.static_range(4):
        c = 4 * q + k
        here = c < C
        e = _existing(gradients[k], here, WHOLE)
        streams = ()
        for i in tl.static_range(N):
            streams = streams + (_existing(tiles[4 * i + k], here, WHOLE),)
        products = _add_products(products, e, streams, norm_weight, weights, c, here, N, 1)
    return products


@triton.jit
def _existing(tile, here, WHOLE: tl.constexpr):
    return tile if WHOLE else tl.where(here[None, :], tile, 0.0)
