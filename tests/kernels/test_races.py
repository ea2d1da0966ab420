"""What of racecheck's output counts as a race; its runs are in tests/gpu/test_sanitizer.py."""

from __future__ import annotations

import pytest
from races import FOLDER, HANDED_ON, unknown_races


def _place(file: str, text: str) -> str:
    lines = (FOLDER / file).read_text().splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, start=1) if text in line)}"


def _race(first: str, *others: str) -> str:
    accesses = "".join(f"=========     and Write access at a_kernel+0x20 in {other} [3 hazards]\n" for other in others)
    return f"========= Error: Race reported between Read access at a_kernel+0x10 in {first}\n{accesses}========= \n"


def _output(*races: str, counted: int | None = None) -> str:
    counted = len(races) if counted is None else counted
    return f"{''.join(races)}all of it ran\n========= RACECHECK SUMMARY: {counted} hazards displayed (2 errors)\n"


PLACES = [[_place(*each) for each in pair] for pair in HANDED_ON]
KERNEL = _place("_streams_bwd_hopper.py", "def streams_bwd_hopper_kernel(")


def test_no_race() -> None:
    assert unknown_races(_output()) == []


@pytest.mark.parametrize("pair", PLACES, ids=" and ".join)
def test_what_groups_of_warps_hand_on_is_known(pair: list[str]) -> None:
    assert unknown_races(_output(_race(*pair), _race(*pair[::-1]), _race(*pair, pair[1]))) == []


def test_what_warps_are_told_is_known() -> None:
    told = _place("_streams_bwd_hopper.py", "gl.warp_specialize(")
    assert unknown_races(_output(_race(KERNEL, KERNEL, told), _race(KERNEL, told))) == []


@pytest.mark.parametrize("race", [
    _race(PLACES[0][0], PLACES[3][0]),  # of two kernels
    _race(PLACES[3][0], PLACES[3][0]),  # within a group
    _race(PLACES[3][0], KERNEL),
    _race(PLACES[3][0], PLACES[3][1], "_streams_bwd_eight.py:1"),
    _race(*PLACES[3]).replace(" in _streams_bwd_eight.py", " somewhere", 1),
    _race(PLACES[3][0]),
    _race(KERNEL),  # with what, it does not say
    "========= Error: Race reported somewhere\n========= \n",
])  # fmt: skip
def test_others_are_not(race: str) -> None:
    assert unknown_races(_output(_race(*PLACES[0]), race)) == [
        race.removeprefix("========= Error: ").removesuffix("========= \n")
    ]


@pytest.mark.parametrize("counted", [0, 2])
def test_one_that_is_not_counted_or_not_shown(counted: int) -> None:
    assert len(unknown_races(_output(_race(*PLACES[0]), counted=counted))) == 2
    assert unknown_races("all of it ran") == ["0 races are reported, and not as many counted"]
