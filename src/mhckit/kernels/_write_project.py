"""F1: write a sublayer's output into the streams and project the result, in one pass over it.

    y[t,o,c] = sum_i H[t,o,i] x[t,i,c] + post[t,o] (f[t,c] + b[c])           rounded once
    partial[s,t,p] = sum_{k in slice s} y[t,k] phi[p,k] w[k]                 square[s,t] = sum_{k in slice s} y[t,k]^2
    x_in[t,c] = sum_i v[t,i] y[t,i,c]                                        if the read weights v are known already

Either half can be left out: without f nothing is written and x itself is projected; without phi it is `post`. Reads x
and f, writes y: 18C bytes per token for 4 streams of 2-byte activations, 20C with x_in.

Sums are over SUM_WIDTH channels of all streams at a time. A program takes `span` channels: a slice or a part of it,
whose sums it adds up, or with few tokens the channels of one sum, so that many programs share a token. `_partial_sums`
has the order.
Where SUM_WIDTH is None, a slice is one sum (`sum_width`). On Hopper many tokens have a form of their own, with the same
sums, and so has any number of them whose rows begin anywhere: `_write_project_hopper`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mhckit.ops._register import empty

from ._device import (
    channels_exist,
    end_dots,
    fold,
    load_float,
    load_per_token,
    load_streams,
    rounded,
    row_start,
    stacked_parts,
    store_as,
    sum_parts,
    tokens_of_program,
    write_stream,
)
from ._hopper_launch import (
    HAS_GLUON,
    HOPPER_TOKENS,
    fills,
    has_hopper_channels,
    has_hopper_forms,
    hopper_slice_width,
    hopper_step,
    write_project_span,
)
from ._launch import (
    BFLOAT,
    FLOAT,
    PRECISION,
    ROWS,
    SUM_WIDTH,
    Launch,
    cdiv,
    dots_are_asynchronous,
    has_ptx,
    leaves_idle,
    loads_are_wide,
    row_blocks,
    shared_memory_of,
    slice_width,
    starts_early,
    sum_width,
    threads_hold_neighbours,
    tokens_of,
    write_launch,
    write_project_launch,
)
from ._launcher import Form, other_forms, run
from ._partial_sums import CHAIN, end_pairs, no_pairs, push

if HAS_GLUON:
    from . import _write_project_eight as _eight
    from . import _write_project_hopper as _hopper
else:
    _hopper = _eight = None


@triton.jit(do_not_specialize=["T"])
def write_project_kernel(
    x,
    f,
    f_bias,
    post,
    res,
    phi,
    norm_weight,
    read_weights,
    y,
    x_in,
    partials,
    squares,
    T,
    span,
    C: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    SUM_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    IN_THREAD: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
    EARLY: tl.constexpr,
    ASYNCHRONOUS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # F2, where it is launched to wait for this kernel's end
    t, live = tokens_of_program(T, BLOCK_T)
    split = tl.program_id(1)
    if f is not None:
        post_columns = load_per_token(post, t, live, N)
        res_columns = () if res is None else load_per_token(res, t, live, N * N)
    if x_in is not None:
        weights = load_per_token(read_weights, t, live, N)
    if phi is not None:
        IN_PARTS: tl.constexpr = x.dtype.element_ty == tl.bfloat16
        z = _zeros(ROW_BLOCKS, 2 * ROWS if IN_PARTS else ROWS, BLOCK_T)
        square = tl.zeros((BLOCK_T, BLOCK_C // 8), tl.float32)
        # Of z and of the squares: the chain of sums that is not finished, and finished chains (see `_partial_sums`).
        chain = _zeros(ROW_BLOCKS, ROWS, BLOCK_T) + (tl.zeros((BLOCK_T,), tl.float32),)
        pairs = () if SUM_WIDTH is None else _no_pairs(chain)
    begin = split * span
    end = tl.minimum(begin + span, C)  # span is a multiple of BLOCK_C
    for start in tl.range(begin, end, BLOCK_C, num_stages=STAGES):
        c = start + tl.arange(0, BLOCK_C)
        here = channels_exist(c, C, BLOCK_C)
        tile = live[:, None] & here[None, :]
        at = row_start(x, t, N, C)[:, None] + c[None, :]
        if f is not None:
            f_tile = load_float(f, row_start(f, t, 1, C)[:, None] + c[None, :], tile)
            if f_bias is not None:
                f_tile += load_float(f_bias, c, here)[None, :]
            streams = load_streams(x, at, tile, C, N)
        tiles = ()
        collapsed = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for o in tl.static_range(N):
            if f is not None:
                y_tile = write_stream(o, streams, f_tile, post_columns, res_columns, N)
                y_tile = rounded(y_tile, y.dtype.element_ty, PTX)
                tl.store(y + at + o * C, y_tile, mask=tile)
            else:
                y_tile = tl.load(x + at + o * C, mask=tile, other=0.0)
            wide = y_tile.to(tl.float32)
            if x_in is not None:
                collapsed = weights[o] * wide if o == 0 else tl.fma(weights[o], wide, collapsed)  # as `collapse`
            if phi is not None:
                square += fold(wide, wide, 8, IN_THREAD)
                tiles = tiles + (y_tile,)
        if x_in is not None:
            store_as(x_in, row_start(x_in, t, 1, C)[:, None] + c[None, :], collapsed, tile)
        if phi is not None:
            # Tiles that were computed go to the tensor cores through shared memory: two at a time wait half as often.
            TOGETHER: tl.constexpr = 1 if f is None else 2
            for o in tl.static_range(0, N, TOGETHER):
                if o + TOGETHER <= N and TOGETHER == 2:
                    column = tl.arange(0, 2 * BLOCK_C)
                    c_pair = start + column % BLOCK_C
                    k = (o + column // BLOCK_C) * C + c_pair
                    exists = channels_exist(c_pair, C, BLOCK_C)
                    pair = _side_by_side(tiles[o], tiles[o + 1])
                    z = _add_projection(z, pair, phi, norm_weight, k, exists, N * C, P, ROWS, PRECISION, PTX)
                else:
                    z = _add_projection(z, tiles[o], phi, norm_weight, o * C + c, here, N * C, P, ROWS, PRECISION, PTX)
            if SUM_WIDTH is not None:
                done = start + BLOCK_C - begin
                if (done % SUM_WIDTH == 0) | (start + BLOCK_C >= end):
                    chain = _add_sums(chain, z, square, IN_PARTS)
                    z = _zeros(ROW_BLOCKS, 2 * ROWS if IN_PARTS else ROWS, BLOCK_T)
                    square = tl.zeros((BLOCK_T, BLOCK_C // 8), tl.float32)
                    if (done % (CHAIN * SUM_WIDTH) == 0) | (start + BLOCK_C >= end):
                        pairs = _push(pairs, chain, (done - BLOCK_C) // (CHAIN * SUM_WIDTH))
                        chain = _zeros(ROW_BLOCKS, ROWS, BLOCK_T) + (tl.zeros((BLOCK_T,), tl.float32),)
            if f is None:
                end_dots(ASYNCHRONOUS)
    if phi is not None:
        if SUM_WIDTH is None:
            totals = _add_sums(chain, z, square, IN_PARTS)
        else:
            totals = _end_pairs(pairs, tl.cdiv(end - begin, CHAIN * SUM_WIDTH))
        slot = tl.cast(split, tl.int64) * T + t
        for block in tl.static_range(ROW_BLOCKS):
            rows = block * ROWS + tl.arange(0, ROWS)
            store_as(partials, slot[None, :] * P + rows[:, None], totals[block], live[None, :] & (rows < P)[:, None])
        store_as(squares, slot, totals[ROW_BLOCKS], live)


@triton.jit
def _zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    blocks = ()
    for _ in tl.static_range(COUNT):
        blocks = blocks + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    return blocks


@triton.jit
def _add_sums(chain, z, square, IN_PARTS: tl.constexpr):
    sums = ()
    for block in tl.static_range(len(z)):
        sums = sums + (chain[block] + (sum_parts(z[block]) if IN_PARTS else z[block]),)
    return sums + (chain[len(z)] + tl.sum(square, 1),)


@triton.jit
def _no_pairs(chain):
    pairs = ()
    for i in tl.static_range(len(chain)):
        pairs = pairs + (no_pairs(chain[i]),)
    return pairs


@triton.jit
def _push(pairs, chain, index):
    pushed = ()
    for i in tl.static_range(len(chain)):
        pushed = pushed + (push(pairs[i], chain[i], index),)
    return pushed


@triton.jit
def _end_pairs(pairs, count):
    totals = ()
    for i in tl.static_range(len(pairs)):
        totals = totals + (end_pairs(pairs[i], count),)
    return totals


@triton.jit
def _add_projection(
    z, y_tile, phi, norm_weight, k, here, K, P: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """z + phi[:, k] y^T for each block of rows; phi in parts beside bfloat16, whose products are exact.

    float16 lacks the range for such parts, so it goes the way of float32: tf32x3 (or ieee where that is missing).
    """
    sums = ()
    for block in tl.static_range(len(z)):
        p = block * ROWS + tl.arange(0, ROWS)
        rows = load_float(phi, p[:, None].to(tl.int64) * K + k[None, :], (p < P)[:, None] & here[None, :])
        if norm_weight is not None:
            rows *= load_float(norm_weight, k, here)[None, :]
        if y_tile.dtype == tl.bfloat16:
            sums = sums + (tl.dot(stacked_parts(rows, PTX), tl.trans(y_tile), z[block]),)
        else:
            sums = sums + (tl.dot(rows, tl.trans(y_tile.to(tl.float32)), z[block], input_precision=PRECISION),)
    return sums


@triton.jit
def _side_by_side(left, right):
    """[tokens, 2 channels]"""
    TOKENS: tl.constexpr = left.shape[0]
    WIDTH: tl.constexpr = left.shape[1]
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (TOKENS, 2 * WIDTH))


class Projection(NamedTuple):
    """Partial sums of z [slots, T, P] and of the squares [slots, T]: one to four for each slice of channels, or many.

    together: slots of a slice. many: None where it is never many, however few tokens there are.
    """

    z: Tensor
    squares: Tensor
    together: int = 1
    many: bool | None = None


class Collapse(NamedTuple):
    """Read weights [T, N] that are known before the streams are written, and where x_in goes."""

    weights: Tensor | None = None
    x_in: Tensor | None = None


NO_COLLAPSE = Collapse()


def write(
    x: Tensor, f: Tensor, f_bias: Tensor | None, post: Tensor, res: Tensor | None, collapse: Collapse = NO_COLLAPSE
) -> Tensor:
    """y; without a projection."""
    T, N, C = tokens_of(x)
    y = empty(x, *x.shape)
    launch = write_launch(N, C)
    grid = (cdiv(T, launch.block_t), cdiv(C, launch.block_c))
    run(
        write_project_kernel, grid,
        x, f, f_bias, post, res, None, None, collapse.weights, y, collapse.x_in, None, None, T, launch.block_c, C, 0,
        N=N, SUM_WIDTH=SUM_WIDTH, ROWS=ROWS, ROW_BLOCKS=0, IN_THREAD=False, PRECISION=PRECISION,
        PTX=False, EARLY=False, ASYNCHRONOUS=False, **launch.meta(),
    )  # fmt: skip
    return y


def project_partials(x: Tensor, phi: Tensor, norm_weight: Tensor | None, *, many: bool = True) -> Projection:
    """many: False where a slice of channels must have one slot."""
    return _project(x, None, None, None, None, phi, norm_weight, None, NO_COLLAPSE, many)


def write_project(
    x: Tensor,
    f: Tensor,
    f_bias: Tensor | None,
    post: Tensor,
    res: Tensor | None,
    phi: Tensor,
    norm_weight: Tensor | None,
    collapse: Collapse = NO_COLLAPSE,
) -> tuple[Tensor, Projection]:
    y = empty(x, *x.shape)
    return y, _project(x, f, f_bias, post, res, phi, norm_weight, y, collapse, True)


def _project(
    x: Tensor,
    f: Tensor | None,
    f_bias: Tensor | None,
    post: Tensor | None,
    res: Tensor | None,
    phi: Tensor,
    norm_weight: Tensor | None,
    y: Tensor | None,
    collapse: Collapse,
    may_be_many: bool,
) -> Projection:
    T, _, C = tokens_of(x)
    width, sums = slice_width(C), _sum_width(x, f)
    has_two_forms = sums is not None and width > sums
    args = (x, f, f_bias, post, res, phi, norm_weight, collapse.weights, y, collapse.x_in)
    if _has_form_for_eight(args):
        return Projection(*_eight.project_partials(args))
    form, programs, span = _form(args), cdiv(T, _launch_of(x, f, phi).block_t), width
    many = may_be_many and has_two_forms and leaves_idle(programs * cdiv(C, width), x.device)
    hopper = _hopper_form(args)
    if hopper is not None:
        hopper_programs, hopper_width = cdiv(T, HOPPER_TOKENS), hopper_slice_width(C)
        hopper_span = write_project_span(C, hopper_programs, x.device)
        # Where a slice is one sum, the plain form's sums are others, and a token's must not depend on its batch.
        if sums is None or fills(hopper_programs * _slots(C, hopper_width, hopper_span), x.device):
            form, programs, many, width, span = hopper, hopper_programs, False, hopper_width, hopper_span
    if many:
        span = sums
    slots = cdiv(C, span) if many else _slots(C, width, span)
    z, squares = empty(phi, slots, T, phi.shape[0], dtype=FLOAT), empty(phi, slots, T, dtype=FLOAT)
    run(form.kernel, (programs, slots), *args, z, squares, T, span, C, phi.shape[0], **form.constants)
    return Projection(z, squares, cdiv(width, span), many if has_two_forms else None)


def _slots(channels: int, width: int, span: int) -> int:
    """Of all slices, each in parts of so many channels, the last one maybe of fewer."""
    return cdiv(channels, width) * cdiv(width, span)


def _sum_width(x: Tensor, f: Tensor | None) -> int | None:
    return sum_width(x.shape[-2], writes=f is not None, wide=loads_are_wide(x) or x.element_size() == 4)


def _launch_of(x: Tensor, f: Tensor | None, phi: Tensor) -> Launch:
    return write_project_launch(
        x.shape[-2],
        phi.shape[0],
        writes=f is not None,
        element_size=x.element_size(),
        wide=loads_are_wide(x),
        shared=shared_memory_of(x.device),
    )


def _form(args: tuple[Any, ...]) -> Form:
    x, f, phi = args[0], args[1], args[5]
    launch = _launch_of(x, f, phi)
    constants = dict(
        N=x.shape[-2], SUM_WIDTH=_sum_width(x, f), ROWS=ROWS, ROW_BLOCKS=row_blocks(phi.shape[0]),
        IN_THREAD=threads_hold_neighbours(x, launch), PRECISION=PRECISION, PTX=has_ptx(x.device),
        EARLY=starts_early(x.device), ASYNCHRONOUS=dots_are_asynchronous(x.device), **launch.meta(),
    )  # fmt: skip
    return Form(write_project_kernel, constants)


def _hopper_takes(args: tuple[Any, ...]) -> bool:
    """Streams of bfloat16 that are written and projected."""
    x, f, phi, y, x_in = args[0], args[1], args[5], args[8], args[9]
    if not HAS_GLUON or f is None or phi is None or not has_hopper_forms(x.device):
        return False
    return phi.dtype == FLOAT and all(tensor.dtype == BFLOAT for tensor in (x, f, y, x_in) if tensor is not None)


def _has_form_for_eight(args: tuple[Any, ...]) -> bool:
    """Eight streams that are mixed, with any number of tokens."""
    x, res, phi = args[0], args[4], args[5]
    if not _hopper_takes(args) or x.shape[-2] != _eight.STREAMS or res is None:
        return False
    return _eight.takes(x.shape[-1], phi.shape[0])


def _hopper_form(args: tuple[Any, ...]) -> Form | None:
    """For four streams; phi has as many rows as a dot takes, or fewer."""
    if not _hopper_takes(args):
        return None
    rows, (streams, channels) = args[5].shape[0], args[0].shape[-2:]
    if streams != 4 or rows > _hopper.MAX_ROWS or not has_hopper_channels(channels):
        return None
    width, step = hopper_slice_width(channels), hopper_step(channels)
    constants = dict(N=streams, WIDTH=width, STEP=step, num_warps=8)
    return Form(_hopper.write_project_hopper_kernel, constants)


def _other_than_plain(args: tuple[Any, ...], constants: dict[str, Any]) -> list[Form]:
    hopper = _hopper_form(args)
    return [] if hopper is None else [hopper]


def _other_than_hopper(args: tuple[Any, ...], constants: dict[str, Any]) -> list[Form]:
    return [] if _sum_width(args[0], args[1]) is None else [_form(args)]


other_forms[write_project_kernel.__name__] = _other_than_plain
other_forms["write_project_hopper_kernel"] = _other_than_hopper
