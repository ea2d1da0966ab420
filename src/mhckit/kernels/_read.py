"""F2: add up the projection, turn it into coefficients, and collapse the streams with them, in one pass over them.

    z = sum_s partial[s]    ms = sum_s square[s] / K    pre, post, H = coefficients(z, ms)
    a[t,c] = sum_i w[t,i] y[t,i,c]          x_in = a,  or with a norm weight g  u a g,  u = 1 / sqrt(mean_c a^2 + eps)

WEIGHTS says which w: "pre" just computed, "given", "first" (stream 0), a constant, or "none" for coefficients alone.
Some programs compute post and H, which the collapse does not need: Sinkhorn keeps their threads busy while the memory
serves the others, which compute pre and collapse the rows of a token or a few. Reads y, writes x_in: 10C bytes per
token for 4 streams of 2-byte activations; with a norm a row stays in registers (beyond MAX_STEPS steps it is read
twice, the second time from the nearest cache).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ._coefficients import (
    add_up,
    beside_residual,
    logits_of,
    matrix_index,
    post_of,
    pre_of,
    reciprocal_rms,
    residual_index,
    residual_turn,
    stream_index,
)
from ._device import (
    channels_exist,
    collapse,
    columns_of,
    load_float,
    load_streams,
    rounded_product,
    store_as,
)
from ._launch import (
    cdiv,
    read_launch,
    residual_launch,
    residual_programs_every,
    rows_are_aligned,
    rows_are_loaded_in_words,
    starts_early,
)
from ._launcher import Form, other_forms, run
from ._math import Math
from ._partial_sums import CHAINS
from ._residual import residual_map
from ._row_words import load_words, store_words
from ._write_project import Projection

# Steps of a row that a program with a norm keeps in registers.
MAX_STEPS = tl.constexpr(16)


@triton.jit(do_not_specialize=["T", "slots", "together", "residual_programs"])
def read_kernel(
    y,
    partials,
    squares,
    scale,
    bias,
    weights,
    norm_weight,
    x_in,
    pre,
    post,
    res,
    z,
    mean_square,
    u,
    T,
    C: tl.constexpr,
    slots,
    together,
    width,
    norm_eps,
    constant,
    residual_programs,
    MATH: tl.constexpr,
    WEIGHTS: tl.constexpr,
    SEPARATE: tl.constexpr,
    RESIDUAL_T: tl.constexpr,
    EVERY: tl.constexpr,
    MANY: tl.constexpr,
    EARLY: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    if MANY and EARLY:
        tl.extra.cuda.gdc_wait()
    ALONE: tl.constexpr = WEIGHTS == "none"
    # A program that loads CHAINS sums at a time for each token takes fewer tokens.
    TOKENS: tl.constexpr = (BLOCK_T + CHAINS - 1) // CHAINS if MANY and ALONE else BLOCK_T
    sums = (partials, squares, slots, together)
    takes_maps, program = residual_turn(tl.program_id(0).to(tl.int64), residual_programs, 1 if MANY else EVERY)
    if not takes_maps:
        t = program * TOKENS + tl.arange(0, TOKENS)
        live = t < T
        n, is_stream = stream_index(MATH)
        at, here = t[:, None] * MATH.streams + n, live[:, None] & is_stream
        if MATH.rows > 0:
            if MATH.dynamic:
                added = add_up(sums, t, live, T, True, not SEPARATE, MANY, MATH)
                r = _reciprocal_rms(added[0], width, mean_square, t, live, MATH)
                logits = _logits(added[1], r, scale, bias, z, 0, n, is_stream, t, live, MATH)
            else:
                added, r = (), None
                logits = _logits(None, None, scale, bias, z, 0, n, is_stream, t, live, MATH)
            value = pre_of(logits, is_stream, MATH)
            store_as(pre, at, value, here)
            if not SEPARATE:
                _write_half(y, added[2:], r, scale, bias, post, res, z, t, live, MATH)
        if not ALONE:
            if WEIGHTS == "constant":
                value = tl.where(here, constant, 0.0)
            elif WEIGHTS == "first":
                value = tl.where(here & (n == 0), 1.0, 0.0)
            elif WEIGHTS == "given":
                value = load_float(weights, at, here)
            columns = columns_of(value, MATH.streams)
            _collapse_rows(
                y, columns, norm_weight, x_in, u, program, t, live, C, norm_eps, MATH.streams, WORDS, BLOCK_T, BLOCK_C,
                STAGES,
            )  # fmt: skip
    elif SEPARATE:
        _write_half_alone(y, sums, width, scale, bias, post, res, z, program, T, MANY, MATH, RESIDUAL_T)


@triton.jit
def _write_half_alone(
    y, sums, width, scale, bias, post, res, z, program, T, MANY: tl.constexpr, MATH: tl.constexpr,
    RESIDUAL_T: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = (RESIDUAL_T + CHAINS - 1) // CHAINS if MANY else RESIDUAL_T
    t = program * TOKENS + tl.arange(0, TOKENS)
    live = t < T
    if MATH.dynamic:
        added = add_up(sums, t, live, T, False, True, MANY, MATH)
        r = _reciprocal_rms(added[0], width, None, t, live, MATH)
        _write_half(y, added[1:], r, scale, bias, post, res, z, t, live, MATH)
    else:
        _write_half(y, (), None, scale, bias, post, res, z, t, live, MATH)


@triton.jit
def _reciprocal_rms(square, width, mean_square, t, live, MATH: tl.constexpr):
    """1 / rms of each token's streams; the mean square is stored on the way."""
    square = tl.div_rn(square, width)
    if mean_square is not None:
        store_as(mean_square, t, square, live)
    return reciprocal_rms(square, MATH)


@triton.jit
def _write_half(y, values, r, scale, bias, post, res, z, t, live, MATH: tl.constexpr):
    """post and the residual map, which the next write-back takes; values: their rows of z, () if static."""
    if MATH.post != "none":
        n, is_stream = stream_index(MATH)
        value = values[0] if MATH.dynamic else None
        value = post_of(_logits(value, r, scale, bias, z, 1, n, is_stream, t, live, MATH), MATH)
        if MATH.round_mix:
            value = value.to(y.dtype.element_ty).to(tl.float32)
        store_as(post, t[:, None] * MATH.streams + n, value, live[:, None] & is_stream)
    if MATH.logits > 0:
        index, is_logit = residual_index(MATH)
        value = values[len(values) - 1] if MATH.dynamic else None
        logits = _logits(value, r, scale, bias, z, 2, index, is_logit, t, live, MATH)
        if MATH.residual == "logits":
            store_as(res, t[:, None] * MATH.logits + index, logits, live[:, None] & is_logit)
        else:
            matrix = residual_map(logits, is_logit, MATH)
            if MATH.round_mix:
                matrix = matrix.to(y.dtype.element_ty).to(tl.float32)
            entry, is_entry = matrix_index(MATH)
            store_as(
                res, t[:, None, None] * (MATH.streams * MATH.streams) + entry, matrix, live[:, None, None] & is_entry
            )


@triton.jit
def _logits(value, r, scale, bias, z, GROUP: tl.constexpr, index, exists, t, live, MATH: tl.constexpr):
    """Logits of a group of z's rows, which are stored on the way; static: value and r are None."""
    token = beside_residual(t, MATH) if GROUP == 2 else t[:, None]
    here = (beside_residual(live, MATH) if GROUP == 2 else live[:, None]) & exists
    if MATH.dynamic:
        if z is not None:
            store_as(z, token * MATH.rows + GROUP * MATH.streams + index, value, here)
        beside = beside_residual(r, MATH) if GROUP == 2 else r[:, None]
        return logits_of(value, beside, scale, bias, GROUP, index, exists, MATH)[0]
    else:
        return logits_of(tl.where(here, 0.0, 0.0), None, scale, bias, GROUP, index, exists, MATH)[0]


@triton.jit
def _collapse_rows(
    y, weights, norm_weight, x_in, u, token, t, live, C: tl.constexpr, norm_eps, N: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    if norm_weight is None and WORDS:
        for turn in tl.static_range(4):
            if token % 4 == turn:
                _collapse_words(y, weights, x_in, token, C, N, turn, BLOCK_C)
    elif norm_weight is None:
        for start in tl.range(0, C, BLOCK_C, num_stages=STAGES):
            offsets, mask, _c, _here = _tile(t, live, start, C, BLOCK_C)
            store_as(x_in, offsets, _collapse(y, weights, t, live, start, C, N, BLOCK_C), mask)
    elif STEPS <= MAX_STEPS:
        tiles = ()
        square = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for step in tl.static_range(STEPS):
            tiles = tiles + (_collapse(y, weights, t, live, step * BLOCK_C, C, N, BLOCK_C),)
            square += rounded_product(tiles[step], tiles[step])
        inverse = _inverse_rms(square, u, t, live, C, norm_eps)
        for step in tl.static_range(STEPS):
            _store_normed(x_in, tiles[step], inverse, norm_weight, t, live, step * BLOCK_C, C, BLOCK_C)
    else:
        square = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for start in tl.range(0, C, BLOCK_C, num_stages=STAGES):
            a = _collapse(y, weights, t, live, start, C, N, BLOCK_C)
            square += rounded_product(a, a)
        inverse = _inverse_rms(square, u, t, live, C, norm_eps)
        for start in tl.range(0, C, BLOCK_C, num_stages=STAGES):
            a = _collapse(y, weights, t, live, start, C, N, BLOCK_C)
            _store_normed(x_in, a, inverse, norm_weight, t, live, start, C, BLOCK_C)


@triton.jit
def _tile(t, live, start, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Offsets and mask of a tile of [tokens, C], its channels and which of them exist."""
    c = start + tl.arange(0, BLOCK_C)
    here = channels_exist(c, C, BLOCK_C)
    return t[:, None] * C + c[None, :], live[:, None] & here[None, :], c, here


@triton.jit
def _collapse(y, weights, t, live, start, C: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr):
    offsets, mask, _c, _here = _tile(t, live, start, C, BLOCK_C)
    return collapse(weights, load_streams(y, offsets + (t * (N - 1) * C)[:, None], mask, C, N), N)


@triton.jit
def _collapse_words(
    y, weights, x_in, token, C: tl.constexpr, N: tl.constexpr, TURN: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The row of one token, where rows begin anywhere: first the words at its ends, which may be parts of them."""
    AHEAD: tl.constexpr = TURN * C % 4
    STEP: tl.constexpr = BLOCK_C // 4
    FIRST: tl.constexpr = 1 if AHEAD > 0 else 0
    STEPS: tl.constexpr = ((C + AHEAD) // 4 - FIRST) // STEP
    ENDS: tl.constexpr = FIRST + (C + AHEAD + 3) // 4 - (FIRST + STEPS * STEP)
    end = tl.arange(0, 1 << (ENDS - 1).bit_length())[None, :]
    end = tl.where(end < FIRST, 0, end + STEPS * STEP)
    _collapse_step(y, weights, x_in, token, end, C, N, TURN, False)
    for step in tl.range(0, STEPS, num_stages=1):
        q = tl.arange(0, STEP)[None, :] + (step * STEP + FIRST)
        _collapse_step(y, weights, x_in, token, q, C, N, TURN, True)


@triton.jit
def _collapse_step(
    y, weights, x_in, token, q, C: tl.constexpr, N: tl.constexpr, TURN: tl.constexpr, WHOLE: tl.constexpr
):
    tiles = load_words(y, token, q, TURN * C % 4, C, N, TURN, WHOLE)
    collapsed = ()
    for k in tl.static_range(4):
        streams = ()
        for i in tl.static_range(N):
            streams = streams + (tiles[4 * i + k],)
        collapsed = collapsed + (collapse(weights, streams, N),)
    store_words(x_in, token, q, collapsed, TURN * C % 4, C, WHOLE)


@triton.jit
def _inverse_rms(square, u, t, live, C: tl.constexpr, norm_eps):
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(square, 1) / C + norm_eps))
    store_as(u, t, inverse, live)
    return inverse[:, None]


@triton.jit
def _store_normed(x_in, a, inverse, norm_weight, t, live, start, C: tl.constexpr, BLOCK_C: tl.constexpr):
    offsets, mask, c, here = _tile(t, live, start, C, BLOCK_C)
    store_as(x_in, offsets, a * inverse * load_float(norm_weight, c, here)[None, :], mask)


def read(
    y: Tensor | None,
    projection: Projection | None,
    scale: Tensor | None,
    bias: Tensor | None,
    math: Math,
    *,
    tokens: int,
    channels: int = 1,
    width: float | None = None,
    weights: Tensor | str = "none",
    constant: float = 0.0,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    x_in: Tensor | None = None,
    pre: Tensor | None = None,
    post: Tensor | None = None,
    res: Tensor | None = None,
    z: Tensor | None = None,
    mean_square: Tensor | None = None,
    u: Tensor | None = None,
) -> None:
    """Fill the given results. weights: a tensor [T, N], or what WEIGHTS may be; width: what divides the squares."""
    alone = isinstance(weights, str) and weights == "none"
    slots, together = (0, 1) if projection is None else (projection.z.shape[0], projection.together)
    many = None if projection is None else projection.many
    early = projection is not None and starts_early(projection.z.device)
    residual = residual_launch(math.streams)
    words = y is not None and rows_are_loaded_in_words(y)
    wide = words or y is None or rows_are_aligned(y)
    launch = residual if alone else read_launch(math.streams, channels, wide=wide)
    separate = not alone and math.rows > math.streams
    residual_programs = cdiv(tokens, _tokens_of_sums(residual.block_t, many)) if separate else 0
    programs = cdiv(tokens, _tokens_of_sums(launch.block_t, many) if alone else launch.block_t)
    given = isinstance(weights, Tensor)
    run(
        read_kernel, (residual_programs + programs,),
        y, *((None, None) if projection is None else projection[:2]), scale, bias,
        weights if given else None, norm_weight, x_in, pre, post, res if math.logits else None, z, mean_square,
        u if norm_weight is not None else None,
        tokens, channels, slots, together, width or float(math.streams * channels), norm_eps, constant,
        residual_programs,
        MATH=math, WEIGHTS="given" if given else weights, SEPARATE=separate, RESIDUAL_T=residual.block_t,
        EVERY=residual_programs_every(math.streams, channels, launch, words=words), MANY=many, EARLY=early, WORDS=words,
        **_launched_early(many, early), **launch.meta(),
    )  # fmt: skip


def _tokens_of_sums(tokens: int, many: bool | None) -> int:
    """Tokens of a program that loads sums for each of them, and nothing else."""
    return cdiv(tokens, CHAINS.value) if many else tokens


def _launched_early(many: bool | None, early: bool) -> dict[str, bool]:
    """With few tokens, launching F2 takes as long as its work: it is launched beside F1, and waits for it to end."""
    return {"launch_pdl": bool(many)} if early else {}


def _other_forms(args: tuple[Any, ...], constants: dict[str, Any]) -> list[Form]:
    """MANY follows the number of tokens, unless it is None. For Triton, options in another order are other ones."""
    many, early = constants["MANY"], constants["EARLY"]
    if many is None:
        return []
    return [Form(read_kernel, constants | {"MANY": not many} | _launched_early(not many, early))]


other_forms[read_kernel.__name__] = _other_forms
