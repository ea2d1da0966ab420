"""How the kernels that are written for Hopper are launched: where they can be, their steps, and how programs share the
channels.

As in `_launch`, nothing that a result depends on follows the number of tokens. How many programs share a token's
channels does: sums begin and end at the same channels whoever adds them up (`_partial_sums`), so that few tokens, or a
last small wave of programs, need not leave multiprocessors idle.
"""

from __future__ import annotations

import torch
import triton

from ._launch import SUM_WIDTH, cdiv, multiprocessors_of, power_of_2, slice_width, starts_early
from ._partial_sums import CHAIN

# Tokens of a program where a kernel is written for Hopper.
HOPPER_TOKENS = 64
# Parts of a slice at most, each with a slot, that programs take one by one where that keeps more of them busy.
MAX_PARTS = 4
# What kernels for Hopper are written in. Triton calls it experimental, so each version has to be tried.
HAS_GLUON = triton.__version__.startswith("3.6.")


def has_hopper_forms(device: torch.device) -> bool:
    """Whether kernels that drive Hopper's copy engine and tensor cores themselves can run."""
    if not HAS_GLUON or not starts_early(device):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def has_hopper_channels(channels: int) -> bool:
    """Whether kernels written for Hopper take so many: whole steps, or rows that begin anywhere. Where 8 divides C and
    128 does not, plain ones are faster: 132 us for F1 and 208 for J at 8192 x 2880, where 162 and 236 were measured
    (benchmarks/results/attempts.jsonl).
    """
    return channels % SUM_WIDTH == 0 or (channels > SUM_WIDTH and channels % 8 > 0)


def hopper_step(channels: int) -> int:
    """Channels of one step, and of one sum, where a kernel is written for Hopper: 120 where rows begin anywhere, and
    bring what lies before them (`_hopper_rows`).
    """
    return SUM_WIDTH if channels % 8 == 0 else SUM_WIDTH - 8


def hopper_slice_width(channels: int) -> int:
    """As `slice_width`. Like its parts a multiple of 16: for those Triton compiles another kernel than for other
    numbers, and the number of tokens must not decide which one runs.
    """
    step = hopper_step(channels)
    return slice_width(channels, step if step % 16 == 0 else 2 * step)


def fills(programs: int, device: torch.device) -> bool:
    """Whether programs that have a multiprocessor to themselves leave few of them without one.

    F1 at C = 4096: 64 programs for 132 multiprocessors take 141 us where twice as many small ones take 117; 96 take
    145 us where those take 155, and in quarters 41 where those take 46 (benchmarks/results/attempts.jsonl).
    """
    return programs >= 0.7 * multiprocessors_of(device)


def write_project_span(channels: int, programs: int, device: torch.device) -> int:
    """Channels per program of F1 for Hopper where so many programs share the tokens: a slice, or a part of one.

    A part is a power of two of chains: where a sum of pairs of chains begins (`_partial_sums`), so that a slice has the
    same sum in however many parts it is added up.
    """
    step = hopper_step(channels)
    width = hopper_slice_width(channels)
    last = channels - (cdiv(channels, width) - 1) * width
    spans = [CHAIN.value * step << level for level in (2, 1, 0)]
    # Slices may differ in width, but not in how many parts they have.
    possible = [span for span in spans if 1 < cdiv(width, span) == cdiv(last, span) <= MAX_PARTS]
    return _busiest([width, *possible], channels, programs, device, width)


def chunk_width(channels: int) -> int:
    """Channels per partial sum of J for Hopper, and of F1 for eight streams: one, two, four or eight sums, and where
    there are several, each but the last over 1024 channels or more.
    """
    sums, step = min(8, power_of_2(channels // 1024 + 1) // 2), hopper_step(channels)
    return cdiv(cdiv(channels, max(sums, 1)), step) * step


def chunks_span(channels: int, programs: int, device: torch.device) -> int:
    """Channels per program, where so many programs share the tokens: those of some partial sums."""
    width = chunk_width(channels)
    sums = cdiv(channels, width)
    spans = [cdiv(sums, parts) * width for parts in (1, 2, 4, 8) if parts <= sums]
    return _busiest(spans, channels, programs, device, channels)


def _busiest(spans: list[int], channels: int, programs: int, device: torch.device, width: int) -> int:
    """The first span, of programs that have a multiprocessor to themselves and share slices of such a width, unless
    multiprocessors would be idle, mostly because the last wave of programs is a small one, and one of the others keeps
    8% more of them busy.
    """
    most = multiprocessors_of(device)
    if not programs:
        return spans[0]

    def busy(span: int) -> float:
        waves = cdiv(programs * cdiv(channels, width) * cdiv(width, span), most)
        return programs * channels / (waves * span * most)

    best = spans[0]
    for span in spans[1:]:
        if busy(span) > 1.08 * busy(best):
            best = span
    return best
