"""What compiling costs: the first calls of a fresh process, and after a warm-up; none for a new number of tokens."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from triton import knobs

import mhckit
from mhckit import Recipe
from mhckit.recipe import as_recipe

from .cases import DTYPE, OPERATORS, RECIPE, TOKEN_COUNTS, Case
from .launches import recorded_launches
from .step import Step, mhckit_outputs

# The tokens of a call whose only purpose is to compile: their number makes no difference.
TOKENS_TO_COMPILE = 16
COMPILING_PROCESSES = 12


def measure_cold_start(case: Case) -> list[dict[str, Any]]:
    """Seconds of the first forward and backward of each operator in a process of its own, one after the other: with an
    empty cache, then again in another process with what the first left in it; and once more after a warm-up.
    """
    lines = []
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", "filled"):
            with _processes(1, cache) as process:
                seconds = dict(zip(OPERATORS, process.map(first_call_seconds, OPERATORS, repeat(case)), strict=True))
            seconds["all"] = sum(seconds.values())
            lines += [_cold_start(operator, case, state, value) for operator, value in seconds.items()]
    return lines + _measure_warmup(case)


def _measure_warmup(case: Case) -> list[dict[str, Any]]:
    """Seconds of a warm-up with an empty cache, then of the first calls, and how many kernels these compiled still."""
    with tempfile.TemporaryDirectory() as cache, _processes(1, cache) as process:
        seconds, compiled = process.submit(warmup_compiles, case).result()
        after = dict(zip(OPERATORS, process.map(first_call_compiles, OPERATORS, repeat(case)), strict=True))
    after["all"] = (sum(seconds for seconds, _ in after.values()), sum(compiled for _, compiled in after.values()))
    return [
        _cold_start("warmup", case, "empty", seconds) | {"compiled": compiled},
        *(
            _cold_start(operator, case, "warmed", seconds) | {"compiled": compiled}
            for operator, (seconds, compiled) in after.items()
        ),
    ]


def _cold_start(operator: str, case: Case, cache: str, seconds: float) -> dict[str, Any]:
    return {"kind": "cold_start", "operator": operator, **case.facts(), "cache": cache, "seconds": round(seconds, 2)}


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


class Preparation(NamedTuple):
    """Something that another process does for what it leaves in the caches of compilers."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]


def preparation(operator: str, case: Case, recipe: Recipe | str = RECIPE) -> Preparation:
    """Of a call, forward and backward; equal for calls that compile the same kernels."""
    small = replace(case, tokens=TOKENS_TO_COMPILE, compiled=False)
    return Preparation(first_call_seconds, (operator, small, as_recipe(recipe)))


def compile_in_parallel(preparations: Iterable[Preparation]) -> None:
    """Each of them once; what fails to compile will fail again where it is measured."""
    # Named: Inductor gives a process that has not named its cache one of Inductor's own, where nothing would be found.
    _use_cache(knobs.cache.dir)
    different = list(dict.fromkeys(preparations))
    with _processes(max(1, min(len(different), COMPILING_PROCESSES))) as processes:
        wait([processes.submit(function, *arguments) for function, arguments in different])


def first_call_seconds(operator: str, case: Case, recipe: Recipe | str = RECIPE) -> float:
    """From calling an operator to the end of its backward on the device, once its inputs are there."""
    call = case.call(operator, recipe=recipe)
    torch.cuda.synchronize()
    start = time.perf_counter()
    Step(mhckit_outputs, call).both()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def first_call_compiles(operator: str, case: Case) -> tuple[float, int]:
    """Seconds of a first call, and how many kernels it compiled or loaded."""
    seconds: list[float] = []
    launches = recorded_launches(lambda: seconds.append(first_call_seconds(operator, case)))
    return seconds[0], sum(launch.compiled for launch in launches)


def warmup_compiles(case: Case) -> tuple[float, int]:
    """Seconds of a warm-up for the operators as the case calls them, once the device is there; and kernels compiled."""
    torch.cuda.synchronize()
    recipe = Recipe.preset(RECIPE, streams=case.streams)
    warmed = mhckit.warmup(case.channels, recipe, dtype=DTYPE, norm=case.out_norm)
    return warmed.seconds, warmed.compiled


def _processes(count: int, cache: str | None = None) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, get_context("spawn"), _use_cache, (cache,))


def _use_cache(directory: str | None) -> None:
    if directory is not None:
        knobs.cache.dir = directory
