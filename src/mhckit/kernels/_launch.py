"""Launch parameters as data: one frozen value per kernel, from one heuristic per kernel.

They are functions of N, P, C, the dtype and the device alone, never of the number of tokens: a token's result must not
depend on its batch, and a new batch size must not compile anything. (Into how many chunks sums over all tokens are cut
is neither; nor is how many programs share a slice of channels, whose sums have one order, see `_partial_sums`.) Their
sources are measurements on an H200 (benchmarks/results/junction.jsonl, and the attempts in
docs/performance.md) and the compiler: for 4 streams of bfloat16 on sm_90 registers are not spilled, or a few with all
options (`make sass`; CI holds them to it).

Two facts decide most of them. A row of a tile should be 128 bytes or more: at 64, half of the memory's speed is lost,
whatever else is done. And a program waits for its loads together, so several small programs per multiprocessor hide
more than a large one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

BFLOAT, FLOAT = torch.bfloat16, torch.float32
# How float32 operands are multiplied: three tf32 products keep 21 bits or more; AMD has no such mode.
PRECISION = "ieee" if torch.version.hip else "tf32x3"
# Rows of phi that one dot takes. With their low parts 64, what a warp group of tensor cores multiplies at once.
ROWS = 32
# Channels of one block of a packed phi.
PHI_BLOCK = 32
# Channels of all streams whose sums F1 ends before it begins the next. With few tokens a program takes no more.
SUM_WIDTH = 128
# Least channels per partial sum of F1 and plain J, which fixes the order of their sums. Models with more channels train
# with fewer tokens at a time: slices keep about as many programs of 32 tokens as a large device runs at once.
SLICE_WIDTH = 2560
# Tokens per partial sum of a parameter's gradient, at least, about, for each block of rows of phi; and tokens that
# tensor cores add up one after the other.
TOKEN_CHUNK, SHORT_SUM = 2048, 512
# Columns, of blocks of rows of phi, that programs of P on a multiprocessor have accumulators for; and so many of them
# keep the memory busy with steps of 32 tokens. With steps of 64, half as many have as many loads in flight.
COLUMNS_AT_ONCE, BUSY_COLUMNS = 512, 384

# Bytes of shared memory that a program may have on Hopper.
LARGE_SHARED_MEMORY = 227 << 10


@dataclass(frozen=True)
class Launch:
    """Tile of one program (tokens x channels), its warps, and how many steps of its loop are in flight."""

    block_t: int
    block_c: int
    num_warps: int
    num_stages: int = 2

    def meta(self) -> dict[str, Any]:
        return dict(BLOCK_T=self.block_t, BLOCK_C=self.block_c, STAGES=self.num_stages, num_warps=self.num_warps)


def cdiv(a: int, b: int) -> int:
    """Triton's own, as its next_power_of_2, costs microseconds a call."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def tokens_of(x: Tensor) -> tuple[int, int, int]:
    """T, N, C of streams [..., N, C]."""
    *lead, streams, channels = x.shape
    return math.prod(lead), streams, channels


def loads_are_wide(x: Tensor) -> bool:
    """Whether a thread's 16-byte load is eight neighbouring channels."""
    return x.element_size() == 2 and x.shape[-1] % 8 == 0


def threads_hold_neighbours(x: Tensor, launch: Launch) -> bool:
    """Whether a thread holds eight neighbouring channels of a tile that was loaded: wide loads, and enough of it."""
    return loads_are_wide(x) and launch.block_t * launch.block_c >= 8 * 32 * launch.num_warps


def rows_are_aligned(x: Tensor) -> bool:
    """Whether every row of channels starts at a multiple of 16 bytes."""
    return x.shape[-1] * x.element_size() % 16 == 0


def rows_are_loaded_in_words(x: Tensor) -> bool:
    """Whether F2 and B load rows as `_row_words` does: they begin between 8-byte words, and a program has one token."""
    return x.element_size() == 2 and x.shape[-1] % 4 > 0 and x.shape[-1] > 256


def equally_late(x: Tensor) -> int | None:
    """Every how many tokens a stream's row begins equally far behind a 16-byte boundary, where rows begin anywhere: one
    or two; None where they need not be told apart, or are too many.
    """
    _T, N, C = tokens_of(x)
    every = 8 // math.gcd(N * C, 8)
    return every if x.element_size() == 2 and C % 8 > 0 and every <= 2 else None


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes that a program may have; as on Hopper where there is no device."""
    if device.type != "cuda":
        return LARGE_SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def dots_stay_in_threads(device: torch.device) -> bool:
    """Whether a thread holds CHANNELS neighbours of a dot with a packed phi: on Ampere's and Hopper's tensor cores."""
    if device.type != "cuda" or torch.version.hip:
        return device.type == "cpu"
    return torch.cuda.get_device_capability(device)[0] in (8, 9)


def has_ptx(device: torch.device) -> bool:
    """Whether kernels may hold instructions by name: on NVIDIA's GPUs since Ampere; the interpreter knows none."""
    if device.type != "cuda":
        return not triton.knobs.runtime.interpret
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def starts_early(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one it depends on has ended, and wait for it: since Hopper."""
    return has_ptx(device) and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0))


def dots_are_asynchronous(device: torch.device) -> bool:
    """Whether tensor cores work beside the warps that ask for them, which wait for groups of dots: on Hopper."""
    return has_ptx(device) and (device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9)


def row_blocks(rows: int) -> int:
    return cdiv(rows, ROWS)


def packs_densely(rows: int, channels: int) -> bool:
    """Whether the parts of phi's rows lie without padding between them: where that is less to load.

    48 rows take two dots, with which J gains where it takes the channels in slices, and loses 3% elsewhere. Not for
    many rows, nor beyond 32 where C is 32 or less: of 130 rows and 5 channels wrong sums were seen, on Hopper with
    Triton 3.6, whose reason is not found.
    """
    dense = cdiv(2 * rows, 16) * 16
    if dense >= _padded_rows(rows):
        return False
    if rows <= ROWS:
        return dense != 48 or channels >= 2 * SLICE_WIDTH
    return rows <= 80 and channels > PHI_BLOCK


def packed_rows(rows: int, channels: int) -> int:
    """Rows of a packed phi: high and low parts, a multiple of what tensor cores multiply at a time."""
    return cdiv(2 * rows, 16) * 16 if packs_densely(rows, channels) else _padded_rows(rows)


def _padded_rows(rows: int) -> int:
    return 2 * ROWS * row_blocks(rows)


class PhiLayout(NamedTuple):
    """How a form of J wants phi: rows of parts, with or without padding between them, channels of a stream in a block,
    and as many of them side by side as one of its threads holds. Blocks that make up a step may have room for more
    channels than it has. Or a block has so many streams together, each with its share of the block's columns.
    """

    rows: int
    dense: bool
    block: int
    channels_per_thread: int
    step: int
    together: int = 1

    def blocks(self, channels: int) -> int:
        """Of one stream."""
        return cdiv(channels, self.step) * cdiv(self.step, self.block)

    def padded(self, rows: int) -> int:
        """Rows of the tile in which so many of phi are packed: a power of two that holds them, and with the low parts
        the padding that follows them.
        """
        return power_of_2(self.rows - rows if self.dense else self.rows // 2)


NOT_PACKED = PhiLayout(0, False, PHI_BLOCK, 0, PHI_BLOCK)


def phi_layout(streams: int, channels: int, rows: int) -> PhiLayout:
    launch = streams_bwd_launch(streams, channels, rows=rows)
    dense = packs_densely(rows, channels)
    return PhiLayout(packed_rows(rows, channels), dense, PHI_BLOCK, channels_per_thread(launch), PHI_BLOCK)


def packed_dz_width(rows: int) -> int:
    """Columns of a packed dz: the parts of whole blocks of rows."""
    return _padded_rows(rows)


def slice_width(channels: int, step: int | None = None) -> int:
    """Channels per partial sum: as many slices as have SLICE_WIDTH channels, of equal width, whole steps."""
    step, slices = step or SUM_WIDTH, max(1, channels // SLICE_WIDTH)
    return cdiv(cdiv(channels, slices), step) * step


def sum_width(streams: int, *, writes: bool, wide: bool) -> int | None:
    """Channels of each of F1's sums, or None for all of a slice's.

    Sums that end early serve few tokens. Those that are not added up yet take registers, which a program that mixes
    more than four streams does not have, nor one that holds eight tokens in a thread: rows of 2-byte channels that are
    not aligned. There 490 bytes and more would be spilled, and F1 takes 526 us instead of 287 (4097 x 5129).
    """
    return None if writes and (streams > 4 or not wide) else SUM_WIDTH


def leaves_idle(programs: int, device: torch.device) -> bool:
    """Whether there are multiprocessors without a program."""
    return programs < multiprocessors_of(device)


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    """As an H200 has where there is no device."""
    return 132 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def broadcast_launch(channels: int) -> Launch:
    """`expand`: about a thousand channels of one token, or of a few tokens where C is small."""
    block_c = min(power_of_2(channels), 1024)
    return Launch(block_t=max(1, 256 // block_c), block_c=block_c, num_warps=4)


def write_launch(streams: int, channels: int) -> Launch:
    """`post` forward: 4096 channels of one token, whose rows then follow each other in memory; not where more than half
    of the last program's would be missing, nor with more streams, which take the registers.

    For 4 streams of bfloat16, 92% of the ceiling become 96 with 4096 channels, 89 become 94 with 2560, 95 become 98
    with 2048; with 5120 it is among the slowest (benchmarks/results/attempts.jsonl).
    """
    if streams > 4 or channels < 2048 or 0 < channels % 4096 < 2048:
        return broadcast_launch(channels)
    return Launch(block_t=1, block_c=min(power_of_2(channels), 4096), num_warps=8)


def write_project_launch(
    streams: int, rows: int, *, writes: bool, element_size: int, wide: bool, shared: int = LARGE_SHARED_MEMORY
) -> Launch:
    """F1; the projection alone has registers to spare for more tokens, which share a load of phi.

    More streams: phi's tiles take the shared memory, the streams the registers. float32 needs three products, and
    narrow loads room to be rearranged in. As many steps are in flight as fit; with hundreds of rows of phi, none.
    """
    if element_size == 4:
        launch = Launch(block_t=16, block_c=32, num_warps=4, num_stages=2)
    elif streams > 4:
        launch = Launch(block_t=64, block_c=32, num_warps=8, num_stages=2)
    elif not wide:
        launch = Launch(block_t=16, block_c=64, num_warps=4, num_stages=2)
    elif not writes:
        launch = Launch(block_t=64, block_c=64, num_warps=4, num_stages=2)
    else:
        launch = Launch(block_t=32, block_c=64, num_warps=4, num_stages=3)
    phi = streams * row_blocks(rows) * ROWS * launch.block_c * 4
    activations = (streams + writes) * launch.block_t * launch.block_c * element_size
    for stages in range(launch.num_stages, 1, -1):
        # Operands that tensor cores read in place have a buffer more than those that pass through registers.
        if phi * (stages - 1) + activations * (stages - writes) <= 0.85 * shared:
            return replace(launch, num_stages=stages)
    return Launch(block_t=16, block_c=32, num_warps=4, num_stages=1)


def read_launch(streams: int, channels: int, *, wide: bool = True) -> Launch:
    """F2: a token, or a few where C is small; a row of channels in few steps, fewer where loads are wide."""
    block_c = _channel_step(channels, 1024 if streams <= 4 and wide else 512)
    return Launch(block_t=max(1, 512 // block_c), block_c=block_c, num_warps=4)


def read_bwd_launch(
    streams: int, channels: int, *, aligned: bool = True, words: bool = False, element_size: int = 2
) -> Launch:
    """B: sums over channels stay in a thread until the end; few tokens, so that many programs share the memory. Very
    long rows one by one, whose steps follow each other in memory: 71 us instead of 72 at 2048 x 12288. At 8192 x 4096
    that would be 89 instead of 91, but the last small kernel would have 3 us more to add up, and at 32768 x 2048 194
    instead of 170 (benchmarks/results/attempts.jsonl).

    Loads of rows that are not aligned go to registers, element by element or in words, and want to be many at a time.
    """
    if not aligned:
        return Launch(block_t=1, block_c=_channel_step(channels, 1024), num_warps=2 if words else 4)
    if channels >= 8192 and streams <= 4 and element_size == 2:
        return Launch(block_t=1, block_c=2048, num_warps=4, num_stages=3)
    stages = 3 if streams * element_size <= 16 else 2
    return Launch(block_t=4, block_c=_channel_step(channels, 256), num_warps=4, num_stages=stages)


def streams_bwd_launch(
    streams: int,
    channels: int,
    *,
    rows: int = 0,
    sums_df: bool = False,
    element_size: int = 2,
    shared: int = LARGE_SHARED_MEMORY,
) -> Launch:
    """J: with dots 32 tokens, whose high and low parts fill a warp group's tile; without, some thousand channels of a
    token, unless df is to be summed over the tokens of each program: the more tokens, the fewer partial sums.

    A thread holds the N^2 + 2N coefficients of a token and as many sums; more streams leave room for fewer channels,
    and hundreds of rows of phi none for loads in flight. Narrow loads (C no multiple of 8) gain nothing from more than
    32 channels.
    """
    dots = rows > 0
    if not dots and sums_df:
        return Launch(block_t=16, block_c=_channel_step(channels, 64), num_warps=4)
    if not dots:
        few = streams <= 4
        return Launch(block_t=1, block_c=_channel_step(channels, 1024 if few else 256), num_warps=4 if few else 2)
    if streams > 4:
        # One buffer for streams, f and d, two for phi, one for dz on its way to registers; and a little besides.
        packed, activations = packed_rows(rows, channels), (2 * streams + 2) * 32 * 32 * element_size
        fits = 2 * (streams * packed * 32 * 2) + activations + 2 * 32 * packed * 2 + (6 << 10) <= shared
        return Launch(block_t=32, block_c=32, num_warps=8, num_stages=2 if fits else 1)
    block_c = 64 if channels > 32 and channels % 8 == 0 and shared >= 128 << 10 else 32
    return Launch(block_t=32, block_c=block_c, num_warps=4, num_stages=2 if rows <= ROWS else 1)


def loads_ahead(launch: Launch, streams: int, rows: int, shared: int) -> bool:
    """Whether J begins the loads of its next step before it works on this one (see `_streams_bwd`): where loads are in
    flight at all, and shared memory holds phi's tiles of both steps.
    """
    return rows > 0 and streams <= 4 and launch.num_stages > 1 and shared >= 128 << 10


def channels_per_thread(launch: Launch) -> int:
    """Neighbouring channels of one token that a thread of J holds: warps beyond 32 tokens lie side by side."""
    return 8 * 4 * launch.block_t // 32 // launch.num_warps


def streams_collapsed_together(streams: int, rows: int) -> int:
    """Streams per program of P beside a norm: all of them, whose collapse takes one load of dx_in, while registers hold
    the accumulators of all.
    """
    return streams if streams * row_blocks(rows) <= 8 else 1


def parameters_bwd_launch(
    rows: int, streams: int, channels: int, *, wide: bool, asynchronous: bool = False, sums_norm: bool = False
) -> Launch:
    """P: accumulators of 64 rows by BLOCK_C columns for each stream of a program and each block of rows: the more, the
    fewer columns. One of them has 128, not 256: a percent faster, and twice the programs where tokens are few.

    asynchronous: dots of bfloat16 on tensor cores that work by themselves, as Hopper's. There one block has steps of 64
    tokens, so that two programs have enough loads in flight; and three blocks of one stream have eight warps and more
    columns, or dz would be loaded more often than the streams: for eight of them at 8192 x 4096 152 us instead of 219
    to 238 (benchmarks/results/attempts.jsonl). With a norm's sums it would spill.
    """
    blocks = streams * max(row_blocks(rows), 1)
    if asynchronous and wide and blocks == 3 and not sums_norm:
        return Launch(block_t=32, block_c=256 if channels > 2048 else 128, num_warps=8, num_stages=4)
    if asynchronous and wide and blocks == 1 and not sums_norm:
        return Launch(block_t=64, block_c=128, num_warps=4, num_stages=3)
    columns = (256 if wide else 128) // power_of_2(blocks)
    return Launch(block_t=32, block_c=max(32, min(128, columns)), num_warps=4, num_stages=3)


def steps_added_together(rows: int, launch: Launch, *, sums_norm: bool = False) -> int:
    """After how many steps of P tensor cores begin a new sum; 0 where registers have no room for a total beside it."""
    return 0 if sums_norm or row_blocks(rows) != 1 else max(1, SHORT_SUM // launch.block_t)


def token_chunks(
    tokens: int, rows: int, columns: int, launch: Launch, device: torch.device, *, sums_are_short: bool = False
) -> int:
    """Partial sums of a parameter's gradient over the tokens, with so many columns of streams. Each takes memory, the
    more the more rows phi has.

    If tensor cores begin new sums often, as few as keep the memory busy: 8192 x 4096 in 2, 32768 x 2048 in 4 and 4096 x
    7168 in one, instead of 4, 16 and 2. P takes 74 us as before, 134 instead of 142, 67 instead of 68, and there is
    less to add up. With one program of 64-token steps on each multiprocessor P takes up to a fifth longer than with
    two, with one and a half as long; steps of 32 tokens, as other dtypes have, were not measured so.

    If not, a sum of more tokens would be less exact, and they are up to a quarter fewer if the last wave of programs is
    then full: 16384 x 2560 with a norm in 6 instead of 8 (0.9 instead of 1.2 waves), 112 us instead of 155
    (benchmarks/results/attempts.jsonl).
    """
    blocks = max(row_blocks(rows), 1)
    most = max(1, round(tokens / (TOKEN_CHUNK * blocks)))
    multiprocessors = multiprocessors_of(device)
    if sums_are_short:
        return min(most, cdiv(BUSY_COLUMNS * 32 // launch.block_t * multiprocessors, columns * blocks))

    def filled(chunks: int) -> float:
        waves = chunks * columns * blocks / (COLUMNS_AT_ONCE * multiprocessors)
        return waves / math.ceil(waves)

    return max(range(cdiv(3 * most, 4), most + 1), key=lambda chunks: (filled(chunks), chunks))


def _channel_step(channels: int, most: int) -> int:
    """A power of two, at least what tensor cores want."""
    return max(16, min(power_of_2(channels), most))


def residual_launch(streams: int) -> Launch:
    """Residual maps, and coefficients without streams: a row of a matrix per thread."""
    return Launch(block_t=max(1, 128 // power_of_2(streams)), block_c=16, num_warps=4)


def residual_programs_every(streams: int, channels: int, launch: Launch, *, words: bool = False) -> int:
    """Every how many programs of F2 and B one takes a residual map, until all are taken: in the first three quarters of
    the programs, so that most of those that run beside each other load, and none is left to the end. Where maps are
    few for the bytes there are, they had better begin; and where rows are loaded in words.

    With all of them first, B takes 186 us instead of 170 at 32768 x 2048 and 115 instead of 111 at 16384 x 2560, F2 168
    instead of 164; but 72 instead of 73 at 2048 x 12288, and at 4097 x 5129 F2 63 instead of 68: of rows in words no
    other shape was measured, nor shorter rows of more streams (benchmarks/results/attempts.jsonl).
    """
    if words or (streams <= 4 and channels >= 4096):
        return 1
    return max(1, 3 * residual_launch(streams).block_t // (4 * launch.block_t))
