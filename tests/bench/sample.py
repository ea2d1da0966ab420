"""Lines like those of a run, with numbers that are easy to check and were measured nowhere."""

from __future__ import annotations

from typing import Any

FACTS = {
    "commit": "new",
    "device": "Sample GPU",
    "torch": "2.0",
    "triton": "3.0",
    "python": "3.12",
    "date": "2000-01-01",
    "recipe": "deepseek_v4",
    "dtype": "bfloat16",
    "copy_terabytes_per_second": 4.0,
}
SMALL = {"tokens": 2, "channels": 3, "streams": 4, "out_norm": False}
NORMED = SMALL | {"out_norm": True}


def timed(microseconds: float, floor: float) -> dict[str, Any]:
    return {
        "microseconds": microseconds,
        "bytes": 1000,
        "floor_microseconds": floor,
        "of_ceiling": floor / microseconds,
    }


def sublayer(case: dict[str, Any], forward: float, backward: float) -> list[dict[str, Any]]:
    times = {"forward": forward, "backward": backward, "both": forward + backward}
    return [
        {"kind": "junction", **case, "direction": direction, **timed(time, time / 2), "launches": 5}
        for direction, time in times.items()
    ]


def lines() -> list[dict[str, Any]]:
    measured = [
        {"kind": "ceiling"},
        {"kind": "kernel", "operator": "junction", **SMALL, "kernel": "F1", **timed(40.0, 10.0)}
        | {"clean_cache_microseconds": 32.0, "clean_cache_of_ceiling": 0.3125},
        {"kind": "kernel", "operator": "junction", **NORMED, "kernel": "F1", **timed(50.0, 10.0)},
        *sublayer(SMALL, 100.0, 200.0),
        *sublayer(NORMED, 110.0, 290.0),
        {"kind": "memory", **SMALL, "peak_extra_bytes": 9, "kept_bytes": 4, "gradient_bytes": 4, "workspace_bytes": 1}
        | {"workspace_of_x": 0.02},
        {"kind": "trace", **SMALL, "position": 0, "kernel": "Memset (Device)", "microseconds": 1.0, "foreign": True},
        {"kind": "baseline", "baseline": "eager", **SMALL, "direction": "both", "microseconds": 900.0, "launches": 80},
        {"kind": "baseline", "baseline": "liger", **SMALL, "absent": "No module named 'liger_kernel'"},
        *(
            {"kind": "host", "operator": "junction", **SMALL, "direction": direction, "microseconds": microseconds}
            for direction, microseconds in (("inference", 22.0), ("forward", 33.0), ("backward", 44.0))
        ),
        *(
            {"kind": "cold_start", "operator": operator, **SMALL, "cache": "empty", "seconds": seconds}
            for operator, seconds in (("junction", 7.0), ("all", 12.5))
        ),
        {"kind": "cold_start", "operator": "warmup", **SMALL, "cache": "empty", "seconds": 4.25, "compiled": 18},
        {"kind": "cold_start", "operator": "junction", **SMALL, "cache": "warmed", "seconds": 0.125, "compiled": 0},
        {"kind": "recompilation", **SMALL, "compiled": 0},
        {"kind": "refused", "measurement": "junction, 7 x 7", "reason": "WrongResult: output 0"},
    ]
    return [FACTS | line for line in measured]


def recipes(case: dict[str, Any] = SMALL) -> list[dict[str, Any]]:
    """As of another run: the Sinkhorn recipe, and one that takes 3/4 of its time for half of its bytes."""
    measured = [{"kind": "ceiling"}]
    for name, part in (("deepseek_v4", 1.0), ("deepseek_v41", 0.75)):
        for direction, time in (("forward", 80.0), ("backward", 160.0), ("both", 240.0)):
            line = {"kind": "recipe", **case, "recipe": name, "direction": direction, **timed(part * time, 40.0)}
            measured.append(line | {"of_sinkhorn": part, "launches": 6})
    return [FACTS | line for line in measured]


def decode() -> list[dict[str, Any]]:
    """As of another run: 1 and 2 tokens; the reference compiled for 1 alone."""
    measured: list[dict[str, Any]] = [{"kind": "ceiling"}]
    how = {"kind": "decode", "recipe": "deepseek_v41", "links": 20, "inputs": "a chain", "graph": True}
    for tokens in (1, 2):
        here = how | SMALL | {"tokens": tokens}
        own = {"microseconds": 8.0 + tokens, "launches": 2, "same_bits_in": 4096}
        target = {"target_microseconds": 12.0} if tokens == 1 else {}
        measured.append(here | {"implementation": "mhckit"} | own | target)
        measured.append(here | {"implementation": "reference", "microseconds": 250.0 + tokens, "launches": 99})
        measured.append(here | {"implementation": "on the host", "microseconds": 900.0, "launches": 99, "graph": False})
    measured.append(how | SMALL | {"tokens": 1, "implementation": "compiled", "microseconds": 44.0, "launches": 7})
    return [FACTS | line for line in measured]
