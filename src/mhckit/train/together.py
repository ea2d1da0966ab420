"""Steps that all processes take together, so that an error of one is an error of all and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """This process among all; (0, 1) without a group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_first_rank(function: Callable[[], T]) -> T:
    """Called on rank 0 alone; every process gets the result, or the exception."""
    rank, world = rank_and_world()
    outcomes = [_outcome(function) if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(outcomes, src=0)
    return _results(outcomes)[0]


def on_every_rank(function: Callable[[], T]) -> list[T]:
    """Called on all; every process gets the results of all in order, or the first exception."""
    _, world = rank_and_world()
    outcome = _outcome(function)
    if world == 1:
        return _results([outcome])
    outcomes: list[Any] = [None] * world
    dist.all_gather_object(outcomes, outcome)
    return _results(outcomes)


def _outcome(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # raised again by all processes
        return None, error


def _results(outcomes: list[Any]) -> list[Any]:
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]
