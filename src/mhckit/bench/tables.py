"""Results as tables for the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from .cases import RECIPE
from .results import Line, by_recipe_and_case, case_label, case_of, of_kind


def tables(lines: list[Line]) -> list[Table | Text]:
    """Every table that these lines fill, and what was refused, absent or foreign."""
    makers = (_kernels, _junction, _recipes, _decode, _baselines, _memory, _host, _compilation)
    filled = [make(lines) for make in makers]
    return [*(table for table in filled if table.row_count), *_remarks(lines)]


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=None)


def _floor(line: Line) -> tuple[str, ...]:
    megabytes = f"{line['bytes'] / 1e6:.1f}"
    return f"{line['microseconds']:.1f}", megabytes, f"{line['floor_microseconds']:.1f}", f"{line['of_ceiling']:.1%}"


def _kernels(lines: list[Line]) -> Table:
    columns = ("tokens x C", "operator", "kernel", "us", "MB", "floor us", "of ceiling", "clean cache us", "of ceiling")
    table = _table("Kernels", *columns)
    for line in of_kind(lines, "kernel"):
        table.add_row(case_label(case_of(line)), line["operator"], line["kernel"], *_floor(line), *_clean(line))
    return table


def _clean(line: Line) -> tuple[str, ...]:
    if "clean_cache_microseconds" not in line:
        return "", ""
    return f"{line['clean_cache_microseconds']:.1f}", f"{line['clean_cache_of_ceiling']:.1%}"


def _junction(lines: list[Line]) -> Table:
    table = _table("Sublayer", "tokens x C", "direction", "us", "MB", "floor us", "of ceiling", "launches")
    for line in of_kind(lines, "junction"):
        table.add_row(case_label(case_of(line)), line["direction"], *_floor(line), str(line["launches"]))
    return table


def _recipes(lines: list[Line]) -> Table:
    columns = ("tokens x C", "recipe", "direction", "us", "MB", "floor us", "of ceiling", "launches")
    table = _table("Recipes", *columns, f"of {RECIPE}'s time")
    for line in of_kind(lines, "recipe"):
        where = (case_label(case_of(line)), line["recipe"], line["direction"])
        table.add_row(*where, *_floor(line), str(line["launches"]), f"{line['of_sinkhorn']:.1%}")
    return table


def _decode(lines: list[Line]) -> Table:
    title = "Inference: us of a junction (launches), in a CUDA graph unless it says otherwise"
    measured = of_kind(lines, "decode")
    names = list(dict.fromkeys(line["implementation"] for line in measured))
    table = _table(title, "recipe", "tokens x C", "target us", *names)
    for (recipe, case), of_case in by_recipe_and_case(measured).items():
        target = of_case.get("mhckit", {}).get("target_microseconds", "")
        shown = [_time_and_launches(of_case.get(name)) for name in names]
        table.add_row(recipe, case_label(case), str(target), *shown)
    return table


def _time_and_launches(line: Line | None) -> str:
    return "" if line is None else f"{line['microseconds']:.1f} ({line['launches']})"


def _baselines(lines: list[Line]) -> Table:
    table = _table("Others", "tokens x C", "implementation", "direction", "us", "launches", "mhckit is faster by")
    ours = {(case_of(line), line["direction"]): line["microseconds"] for line in of_kind(lines, "junction")}
    for line in of_kind(lines, "baseline"):
        own = ours.get((case_of(line), line["direction"]))
        faster = "" if own is None else f"{line['microseconds'] / own:.2f}x"
        where = (case_label(case_of(line)), line["baseline"], line["direction"])
        table.add_row(*where, f"{line['microseconds']:.1f}", str(line["launches"]), faster)
    return table


def _memory(lines: list[Line]) -> Table:
    columns = ("tokens x C", "peak MB", "kept MB", "gradients MB", "workspace / x")
    table = _table("Memory of forward and backward", *columns)
    for line in of_kind(lines, "memory"):
        megabytes = [f"{line[name] / 1e6:.1f}" for name in ("peak_extra_bytes", "kept_bytes", "gradient_bytes")]
        table.add_row(case_label(case_of(line)), *megabytes, f"{line['workspace_of_x']:.2%}")
    return table


def _host(lines: list[Line]) -> Table:
    table = _table("Host", "operator", "direction", "us")
    for line in of_kind(lines, "host"):
        table.add_row(line["operator"], line["direction"], f"{line['microseconds']:.1f}")
    return table


def _compilation(lines: list[Line]) -> Table:
    table = _table("Compilation", "what", "result")
    for line in of_kind(lines, "cold_start"):
        compiled = f", {line['compiled']} kernels compiled" if "compiled" in line else ""
        table.add_row(_cold_label(line), f"{line['seconds']:.2f} s{compiled}")
    for line in of_kind(lines, "recompilation"):
        table.add_row(f"then {line['tokens']} tokens", f"{line['compiled']} kernels compiled")
    return table


def _cold_label(line: Line) -> str:
    if line["operator"] == "warmup":
        return f"warm-up, {line['cache']} cache"
    when = "after a warm-up" if line["cache"] == "warmed" else f"{line['cache']} cache"
    return f"first call of {line['operator']}, {when}"


def _remarks(lines: list[Line]) -> list[Text]:
    absent = {line["baseline"]: line["absent"] for line in lines if "absent" in line}
    foreign = {line["kernel"] for line in of_kind(lines, "trace", foreign=True)}
    remarks = [
        *(f"absent: {name} ({reason})" for name, reason in absent.items()),
        *(f"not a kernel of ours in the junction: {kernel}" for kernel in sorted(foreign)),
        *(f"refused: {line['measurement']}: {line['reason']}" for line in of_kind(lines, "refused")),
    ]
    return [Text(remark) for remark in remarks]
