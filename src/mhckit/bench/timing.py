"""The clock: times on the device and on the host, peak memory, the copy ceiling, and what they were measured with."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import torch
import triton
from triton.testing import do_bench

COPIED_ELEMENTS = 1 << 30
CALLS_IN_FLIGHT = 8
CALLS_IN_GRAPH = 4
WARM_UP = 3
ROUNDS = 3
CALLS_ON_CLEAN_CACHE = 50


def copy_ceiling() -> float:
    """Bytes per second of a large copy on the device, read and written counted."""
    source = torch.empty(COPIED_ELEMENTS, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_microseconds(lambda: target.copy_(source)) * 1e-6)


def median_microseconds(run: Callable[[], object], rep: int = 50) -> float:
    """Time of a call on the device, with a cold L2 cache; ``rep`` is the milliseconds spent repeating it.

    Launches on the host are hidden as long as they take less time than the kernels before them.
    """
    milliseconds: Any = do_bench(run, rep=rep, return_mode="median")
    return 1e3 * milliseconds


def clean_cache_microseconds(run: Callable[[], object]) -> float:
    """As `median_microseconds`, with nothing in the cold L2 cache that has to be written back.

    There, zeros have been written to flush the cache, and go to memory while a call is timed. One that writes leaves as
    much behind for the next; one that only reads pays for bytes that are not its own: up to the size of the cache.
    """
    driver: Any = triton.runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark().zero_()
    for _ in range(WARM_UP):
        run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS_ON_CLEAN_CACHE)]
    for start, end in pairs:
        cache.amax()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in pairs)


def captured(prepare: Callable[[], Callable[[], object]], calls: int = 1) -> Callable[[], None]:
    """A call's work on the device alone: a CUDA graph of it, made ``calls`` times, to be replayed.

    ``prepare`` returns the call; both run on the stream that is captured, where autograd also runs the backward of
    what was computed there.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call = prepare()
        for _ in range(WARM_UP):
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()

    def replay(_inputs: object = call) -> None:
        """Keeps what the graph reads."""
        graph.replay()

    return replay


def graph_microseconds(prepare: Callable[[], Callable[[], object]], rep: int = 50) -> float:
    """Time of a call on the device without the host: as one of a few, as in a model, which share the start of a graph.

    Most of what a call reads has left the L2 cache before it, by then for other data or, the first time, flushed.
    """
    return median_microseconds(captured(prepare, CALLS_IN_GRAPH), rep) / CALLS_IN_GRAPH


def interleaved_graph_microseconds(
    calls: dict[str, Callable[[], Callable[[], object]]], rep: int = 50
) -> dict[str, float]:
    """`graph_microseconds` of calls that are to be compared: they take turns, so that a device whose clock changes
    meanwhile changes it for all of them. The median over the rounds.
    """
    graphs = {name: captured(prepare, CALLS_IN_GRAPH) for name, prepare in calls.items()}
    rounds = [{name: median_microseconds(graph, rep) for name, graph in graphs.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(times[name] for times in rounds) / CALLS_IN_GRAPH for name in calls}


def host_microseconds(run: Callable[[], object], repeats: int = 200) -> float:
    """Time until a call returns, without waiting for the device, whose queue stays too short to block a launch."""
    run()
    times = []
    for repeat in range(repeats):
        if repeat % CALLS_IN_FLIGHT == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def peak_extra_bytes(run: Callable[[], object]) -> int:
    """The most memory allocated at any moment of a call, beyond what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def environment(commit: str) -> dict[str, str]:
    """What a measurement depends on besides the code it times."""
    return {
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
