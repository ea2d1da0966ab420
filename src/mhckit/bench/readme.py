"""The results in README and docs, written from the committed lines: nothing in those blocks is typed by hand."""

from __future__ import annotations

import re
from pathlib import Path

from .budgets import DIRECTIONS
from .cases import RECIPE
from .results import Line, by_case, case_label, case_of, latest, newest, of_kind, read_lines

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
TRACE_BEGIN, TRACE_END = "<!-- trace: begin -->", "<!-- trace: end -->"
COST_BEGIN, COST_END = "<!-- cost: begin -->", "<!-- cost: end -->"
NOTHING = "No results committed yet."


def with_results(readme: str, results: Path) -> str:
    """The README with its block of results as the file of results has them."""
    block = results_block(read_lines(results))
    return _with_block(readme, BEGIN, END, block)


def with_trace(page: str, results: Path) -> str:
    """A page with its block as the profiler's trace of one step has it."""
    block = trace_block(read_lines(results))
    return _with_block(page, TRACE_BEGIN, TRACE_END, block)


def with_costs(page: str, results: Path) -> str:
    """A page with its block as the measured training steps have it."""
    block = cost_block(read_lines(results))
    return _with_block(page, COST_BEGIN, COST_END, block)


def _with_block(text: str, begin: str, end: str, block: str) -> str:
    pattern = re.compile(re.escape(begin) + r"\n.*?" + re.escape(end), re.DOTALL)
    written, blocks = pattern.subn(lambda _: f"{begin}\n{block}\n{end}", text)
    if blocks != 1:
        raise ValueError(f"there must be one block between {begin} and {end}, found {blocks}")
    return written


def results_block(lines: list[Line]) -> str:
    """Of each shape of the sublayer the last measurement; the rest each of the commit that measured it last."""
    own = latest(lines, "junction")
    if not own:
        return NOTHING
    parts = (
        _setting(own),
        _sublayer(own, lines),
        _kernels(lines),
        _others(lines),
        _recipes(lines),
        _decode(lines),
        _host(lines),
    )
    return "\n\n".join(part for part in parts if part)


def trace_block(lines: list[Line]) -> str:
    """Everything that one step of the first case does on the device, in order, as it was traced last."""
    traced = of_kind(lines, "trace")
    if not traced:
        return NOTHING
    case = case_of(traced[0])
    of_case = [line for line in lines if line["kind"] == "trace" and case_of(line) == case]
    runs = [line for line in lines if line["kind"] == "ceiling" or line in of_case]
    trace = of_kind(newest(runs, "trace"), "trace")
    rows = [[f"`{line['kernel']}`", f"{line['microseconds']:.1f}"] for line in trace]
    rows.append(["sum", f"{sum(line['microseconds'] for line in trace):.1f}"])
    heading = f"One junction, forward and backward, {case_label(case)}, commit {trace[0]['commit']}:"
    return f"{heading}\n\n{_markdown(['on the device', 'us'], rows)}"


def cost_block(lines: list[Line]) -> str:
    """Training steps: how much longer than with the plain residual in every run; of the last also memory and parts."""
    runs = _runs(of_kind(lines, "training"))
    last = {run[0]["case"]: run for run in runs}
    return "\n\n".join([_overheads(runs), *map(_costs, last.values())])


def _runs(lines: list[Line]) -> list[list[Line]]:
    """Of one case each; every run begins with the plain residual."""
    runs: list[list[Line]] = []
    for line in lines:
        if line["variant"] == "plain":
            runs.append([])
        elif not runs or runs[-1][0]["case"] != line["case"]:
            raise ValueError(f"{line['case']} at commit {line['commit']} lacks the plain residual, which comes first")
        runs[-1].append(line)
    return runs


def _overheads(runs: list[list[Line]]) -> str:
    names = list(dict.fromkeys(line["variant"] for run in runs for line in run[1:]))
    rows = []
    for plain, *others in runs:
        over = {line["variant"]: f"{line['milliseconds'] / plain['milliseconds'] - 1:+.1%}" for line in others}
        shown = [over.get(name, "") for name in names]
        rows.append([plain["commit"], f"C {plain['channels']}", f"{plain['milliseconds']:.1f}", *shown])
    return _markdown(["commit", "model", "plain, ms / step", *names], rows)


def _costs(lines: list[Line]) -> str:
    plain = lines[0]
    rows = [
        [
            line["variant"],
            f"{line['milliseconds']:.1f}",
            f"{line['milliseconds'] / plain['milliseconds'] - 1:+.1%}",
            str(line["tokens_per_second"]),
            f"{line['peak_bytes'] / 1e9:.1f}",
            f"{line['activation_bytes'] / 1e9:.1f} ({line['activation_bytes'] / plain['activation_bytes']:.2f}x)",
            *(f"{milliseconds:.1f}" for milliseconds in line["where"].values()),
        ]
        for line in lines
    ]
    heading = (
        f"{plain['layers']} layers, C {plain['channels']}, {plain['batch']} x {plain['positions']} tokens, "
        f"{plain['parameters'] / 1e9:.1f}B parameters, {plain['device']}, torch {plain['torch']}, commit "
        f"{plain['commit']}:"
    )
    columns = ["residual", "ms / step", "over plain", "tokens / s", "peak, GB", "activations, GB"]
    return f"{heading}\n\n{_markdown([*columns, *(f'{part}, ms' for part in plain['where'])], rows)}"


def _setting(lines: list[Line]) -> str:
    common = lines[0]
    ceilings = sorted({line["copy_terabytes_per_second"] for line in lines})
    return (
        f"Measured on one {common['device']} with torch {common['torch']}, Triton {common['triton']} and Python "
        f"{common['python']}: {common['dtype']}, recipe `{common['recipe']}`, 4 streams unless N says otherwise. "
        "Percentages are of what a large copy reaches in the same run, "
        f"{' to '.join(map(str, dict.fromkeys((ceilings[0], ceilings[-1]))))} TB/s."
    )


def _sublayer(own: list[Line], lines: list[Line]) -> str:
    """A row per case: time and part of the ceiling in each direction, launches, memory, and where it was measured."""
    directions = {name: by_case(of_kind(own, "junction", direction=name)) for name in DIRECTIONS}
    memory = by_case(latest(lines, "memory"))
    rows = []
    for case, both in directions["both"].items():
        times = [_time_and_part(by[case]) for by in directions.values()]
        workspace = f"{memory[case]['workspace_of_x']:.1%}" if case in memory else ""
        rows.append([case_label(case), *times, str(both["launches"]), workspace, both["commit"]])
    columns = ["tokens x C", "forward, us", "backward, us", "both, us", "launches", "workspace / x", "commit"]
    return _markdown(columns, rows)


def _others(lines: list[Line]) -> str:
    """A row per case: the sublayer as others compute it, beside ours of the same run."""
    run = newest(lines, "baseline")
    own = by_case(of_kind(run, "junction", direction="both"))
    measured = of_kind(run, "baseline", direction="both")
    names = list(dict.fromkeys(line["baseline"] for line in measured))
    others = {name: by_case(of_kind(measured, "baseline", baseline=name)) for name in names}
    rows = [
        [
            case_label(case),
            f"{line['microseconds']:.0f}",
            *(_times_as_long(by.get(case), line) for by in others.values()),
        ]
        for case, line in own.items()
        if any(case in by for by in others.values())
    ]
    if not rows:
        return ""
    heading = f"Forward and backward beside plain PyTorch, us, in one run (commit {run[-1]['commit']}):"
    return f"{heading}\n\n{_markdown(['tokens x C', 'mhckit', *names], rows)}"


def _kernels(lines: list[Line]) -> str:
    """The kernels of the sublayer, for the case that was measured first."""
    measured = of_kind(newest(lines, "kernel"), "kernel", operator="junction")
    if not measured:
        return ""
    case = case_of(measured[0])
    of_case = [line for line in measured if case_of(line) == case]
    rows = [
        [line["kernel"], _time_and_part(line), _on_clean_cache(line), f"{line['floor_microseconds']:.0f}"]
        for line in of_case
    ]
    ceiling = measured[0]["copy_terabytes_per_second"]
    heading = f"kernel, {case_label(case)}, commit {measured[0]['commit']}, beside a copy at {ceiling} TB/s"
    return _markdown([heading, "us", "on a clean L2 cache", "its bytes at the ceiling, us"], rows)


def _on_clean_cache(line: Line) -> str:
    if "clean_cache_microseconds" not in line:
        return ""
    return f"{line['clean_cache_microseconds']:.0f} ({line['clean_cache_of_ceiling']:.0%})"


def _recipes(lines: list[Line]) -> str:
    """A row per shape and recipe: time and part of the ceiling in each direction, beside the first recipe's."""
    measured = of_kind(newest(lines, "recipe"), "recipe")
    rows = []
    for place in dict.fromkeys((case_of(line), line["recipe"]) for line in measured):
        of_place = {line["direction"]: line for line in measured if (case_of(line), line["recipe"]) == place}
        both = of_place["both"]
        times = [_time_and_part(of_place[direction]) for direction in DIRECTIONS]
        rows.append(
            [case_label(place[0]), f"`{place[1]}`", *times, str(both["launches"]), f"{both['of_sinkhorn']:.2f}"]
        )
    if not rows:
        return ""
    columns = ["tokens x C", "recipe", "forward, us", "backward, us", "both, us", "launches", f"of `{RECIPE}`'s time"]
    heading = f"Other recipes, in turns in one run, each beside its own bytes (commit {measured[0]['commit']}):"
    return f"{heading}\n\n{_markdown(columns, rows)}"


def _decode(lines: list[Line]) -> str:
    """A row per recipe, number of channels and implementation in a graph; a column per number of tokens."""
    measured = of_kind(newest(lines, "decode"), "decode", graph=True)
    own = of_kind(measured, "decode", implementation="mhckit")
    if not own:
        return ""
    counts = sorted({line["tokens"] for line in measured})
    times: dict[tuple[str, int, str], dict[int, str]] = {}
    for line in measured:
        row = times.setdefault((line["recipe"], line["channels"], line["implementation"]), {})
        row[line["tokens"]] = f"{line['microseconds']:.1f}"
    rows = [
        [f"`{recipe}`", str(channels), name, *(row.get(tokens, "") for tokens in counts)]
        for (recipe, channels, name), row in times.items()
    ]
    heading = (
        "Inference: us of a junction of so many tokens, one of {links} in a CUDA graph. The reference is plain torch. "
        "A token gets the bits that it gets among {same_bits_in} (commit {commit}):"
    ).format(**own[0])
    return f"{heading}\n\n{_markdown(['recipe', 'C', 'by', *map(str, counts)], rows)}"


def _host(lines: list[Line]) -> str:
    """What a call costs the host, and the first calls of a process."""
    host = of_kind(newest(lines, "host"), "host", operator="junction")
    first = of_kind(newest(lines, "cold_start"), "cold_start", cache="empty")
    if not host or not first:
        return ""
    times = {line["direction"]: line["microseconds"] for line in host}
    cold = {line["operator"]: line["seconds"] for line in first}
    return (
        f"Host time of a junction in eager mode (commit {host[0]['commit']}): forward {times['forward']:.0f} us, "
        f"backward {times['backward']:.0f} us, without gradients {times['inference']:.0f} us. From an empty cache "
        f"(commit {first[0]['commit']}), the first junction of a size takes {cold['junction']:.0f} s to compile, "
        f"forward and backward; with all other operators, {cold['all']:.0f} s.{_warmup(cold)}"
    )


def _warmup(cold: dict[str, float]) -> str:
    if "warmup" not in cold:
        return ""
    return f" `mhckit.warmup` compiles all of them, and C++ for the host, in {cold['warmup']:.0f} s."


def _time_and_part(line: Line) -> str:
    return f"{line['microseconds']:.0f} ({line['of_ceiling']:.0%})"


def _times_as_long(other: Line | None, own: Line) -> str:
    if other is None:
        return ""
    return f"{other['microseconds']:.0f} ({other['microseconds'] / own['microseconds']:.1f}x)"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
