"""What racecheck of compute-sanitizer reports of the kernels for Hopper, but for what it does not understand.

It does not know that warps of a group have met where one of them arrives at a barrier for all, and takes what another
group then does with the same shared memory for a race: of a small CUDA program, too (tests/gpu/handed_on.cu), and not
if all of its threads arrive. The emulated GPU (`emulator`) passes on what a warp has heard: it finds nothing there, and
finds races between such lines where the warps of a group do not meet (test_emulated.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import mhckit.kernels

FOLDER = Path(mhckit.kernels.__file__).parent
# In each pair what one group of warps does and what another does before or after it, as text of a line of a file.
_COPIED = ("_hopper_rows.py", "async_copy.async_copy_global_to_shared(tile")
_TAKEN_OUT = ("_hopper_rows.py", "tile.load(STORED)")
HANDED_ON = (
    (_COPIED, ("_hopper_late.py", "here.load(layout), following.load(layout)")),
    (("_write_project_hopper.py", "tiles.store("), _TAKEN_OUT),
    (("_streams_bwd_hopper.py", ".store(narrow)"), _TAKEN_OUT),
    (("_streams_bwd_eight.py", "exchanged.store("), ("_streams_bwd_eight.py", "exchanged.load(")),
)


def unknown_races(output: str) -> list[str]:
    """Every race that is reported, but for those that are known to be none."""
    races = re.findall(r"Race reported.*?(?========== \n|\Z)", output, re.S)
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", output)
    if summary is None or int(summary[1]) != len(races):
        return [f"{len(races)} races are reported, and not as many counted", *races]
    known = [*_hand_overs(), *map(places_of, HANDED_ON)]
    return [race for race in races if not _is_known(race, known)]


def _is_known(race: str, known: list[list[set[str]]]) -> bool:
    """Whether its accesses are of places that are known together, some of each."""
    accesses = set(re.findall(r"access at \S+ in (\S+:\d+)", race))
    complete = len(re.findall(r"access at \S+ in \S+:\d+", race)) == race.count(" access at ") > 1
    return complete and any(
        accesses <= set().union(*together) and all(accesses & places for places in together) for together in known
    )


def places_of(pair: tuple[tuple[str, str], tuple[str, str]]) -> list[set[str]]:
    return [{place for place, line in _lines(FOLDER / file) if text in line} for file, text in pair]


def _hand_overs() -> Iterator[list[set[str]]]:
    """Lines of each kernel for which Triton itself makes code: groups of warps are told, in shared memory, what to run
    and with which values. racecheck sees no barrier between that and their reading it. A condition around it may be
    its place.
    """
    for file in sorted([*FOLDER.glob("*_hopper.py"), *FOLDER.glob("*_eight.py")]):
        lines = list(_lines(file))
        begun = {place for place, line in lines if re.match(r"def \w+_(hopper|eight)_kernel\(", line)}
        told = {place for place, line in lines if line.lstrip().startswith("gl.warp_specialize(")}
        around = {
            place
            for (place, line), (following, _line) in itertools.pairwise(lines)
            if following in told and line.lstrip().startswith("if ")
        }
        yield [begun | told | around]


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Each with its place."""
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        yield f"{file.name}:{number}", line
