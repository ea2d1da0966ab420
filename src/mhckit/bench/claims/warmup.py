"""Compile every kernel of the claims beforehand, in parallel: Triton keeps what other processes compiled on disk."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed

from .cases import CASES
from .correctness import refuse_wrong
from .data import CLAIMS

PROCESSES = 12


def widths() -> list[tuple[str, int]]:
    """Each case at each of its numbers of channels, which kernels are compiled for; equal computations once."""
    pairs = {(id(CASES[claim.case]), shape.channels): claim.case for claim in CLAIMS for shape in claim.shapes}
    return [(case, channels) for (_, channels), case in pairs.items()]


def compile_all(advance: Callable[[], object], device: str = "cuda") -> None:
    """Call ``advance`` after each."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        for _ in as_completed([pool.submit(_compile, *pair, device) for pair in widths()]):
            advance()


def _compile(case: str, channels: int, device: str) -> None:
    """Errors are left to the measurement, which meets them again and reports them."""
    with contextlib.suppress(Exception):
        refuse_wrong(CASES[case], channels, device)
