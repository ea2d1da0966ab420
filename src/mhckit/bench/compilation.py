"""What compiling costs: the first calls of a fresh process, and none for a new number of tokens."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context
from typing import Any

import torch
from triton import knobs

from .cases import OPERATORS, TOKEN_COUNTS, Case
from .launches import recorded_launches
from .step import Step, mhckit_outputs

# The tokens of a call whose only purpose is to compile: their number makes no difference.
TOKENS_TO_COMPILE = 16
COMPILING_PROCESSES = 12


def measure_cold_start(case: Case) -> list[dict[str, Any]]:
    """Seconds of the first forward and backward of each operator in a process of its own, one after the other: with an
    empty cache, then again in another process with what the first left in it."""
    lines = []
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", "filled"):
            with _processes(1, cache) as process:
                seconds = dict(zip(OPERATORS, process.map(first_call_seconds, OPERATORS, repeat(case)), strict=True))
            seconds["all"] = sum(seconds.values())
            lines += [
                {"kind": "cold_start", "operator": operator, **case.facts(), "cache": state, "seconds": round(value, 2)}
                for operator, value in seconds.items()
            ]
    return lines


def measure_recompilation(case: Case) -> list[dict[str, Any]]:
    """How many kernels each number of tokens compiles, after a call with the case's own."""
    first_call_seconds("junction", case)
    lines = []
    for tokens in TOKEN_COUNTS:
        other = replace(case, tokens=tokens)
        launches = recorded_launches(lambda other=other: first_call_seconds("junction", other))
        compiled = sum(launch.compiled for launch in launches)
        lines.append({"kind": "recompilation", **other.facts(), "compiled": compiled})
    return lines


def compile_in_parallel(calls: Iterable[tuple[str, Case]]) -> None:
    """Fill Triton's cache for these operators and cases; what fails to compile will fail again where it is measured."""
    small = [(operator, replace(case, tokens=TOKENS_TO_COMPILE)) for operator, case in calls]
    with _processes(max(1, min(len(small), COMPILING_PROCESSES))) as processes:
        wait([processes.submit(first_call_seconds, *call) for call in small])


def first_call_seconds(operator: str, case: Case) -> float:
    """From calling an operator to the end of its backward on the device, once its inputs are there."""
    call = case.call(operator)
    torch.cuda.synchronize()
    start = time.perf_counter()
    Step(mhckit_outputs, call).both()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _processes(count: int, cache: str | None = None) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, get_context("spawn"), _use_cache, (cache,))


def _use_cache(directory: str | None) -> None:
    if directory is not None:
        knobs.cache.dir = directory
