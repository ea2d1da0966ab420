"""How channels get to their places where rows begin anywhere: the instructions that `_hopper_words` writes out, run
here lane by lane. The kernels they are part of run on a GPU only (tests/gpu).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from mhckit.kernels._hopper_launch import HAS_GLUON, hopper_step, hopper_word

if not HAS_GLUON:
    pytest.skip("kernels for Hopper are written for one version of Triton", allow_module_level=True)
from mhckit.kernels import _hopper_late as late_rows
from mhckit.kernels import _hopper_words as words
from mhckit.kernels._hopper_copies import GROUP

LANES = 32
Registers = dict[str, int]


def _run(code: str, warp: Sequence[Registers]) -> None:
    """The instructions on the registers of a warp's lanes, by name; operands are registers too."""
    for line in code.strip("{}").splitlines():
        operation, _, rest = line.strip().rstrip(";").partition(" ")
        if operation == ".reg":
            continue
        name = operation.split(".")[0]
        target, *operands = [operand.strip() for operand in rest.split(",")]
        values = [[_value(lane, operand) for operand in operands] for lane in warp]
        for number, (lane, of) in enumerate(zip(warp, values, strict=True)):
            if name == "shfl":
                assert of[3] == 0xFFFFFFFF and of[2] & 31 == 31
                segment = of[2] >> 8  # bits of the lane's number that stay as they are
                lane[target] = values[(number & segment) | (of[1] & ~segment & 31)][0]
            elif name == "selp":
                lane[target] = of[0] if of[2] else of[1]
            elif name == "prmt":
                together = (of[1] << 32 | of[0]).to_bytes(8, "little")
                chosen = bytes(together[of[2] >> 4 * k & 7] for k in range(4))
                lane[target] = int.from_bytes(chosen, "little")
            else:
                lane[target] = _ALONE[operation](*of)


_ALONE = {
    "setp.eq.u32": lambda a, b: int(a == b),
    "setp.ne.u32": lambda a, b: int(a != b),
    "add.u32": lambda a, b: a + b,
    "and.b32": lambda a, b: a & b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
}


def _value(lane: Registers, operand: str) -> int:
    return int(operand, 0) if re.fullmatch(r"0x[0-9a-f]+|\d+", operand) else lane[operand]


def _word(channels: Sequence[int]) -> int:
    return channels[1] << 16 | channels[0]


def _channels(word: int) -> list[int]:
    return [word & 0xFFFF, word >> 16]


def _turn(how: tuple[str, str], rows: Sequence[Sequence[Sequence[int]]], given: Sequence[int]) -> list[list[list[int]]]:
    """rows[r][half of the warp]: 128 numbers each. What becomes of them, in the same shape."""
    code, operands = how
    count = 4 * len(rows)
    assert operands.split(",") == ["=&r"] * count + ["r"] * (count + 2 * count * (len(given) + 1))
    warp: list[Registers] = []
    for number in range(LANES):
        half, lane = divmod(number, 16)
        registers = {}
        for r, row in enumerate(rows):
            for k in range(4):
                at = 8 * lane + 2 * k
                registers[f"${count + 4 * r + k}"] = _word(row[half][at : at + 2])
        for place, value in enumerate([*given, lane]):
            registers[f"${2 * count + 2 * count * place}"] = value
        warp.append(registers)
    _run(code, warp)
    return [
        [
            [c for lane in range(16) for k in range(4) for c in _channels(warp[16 * half + lane][f"${4 * r + k}"])]
            for half in range(2)
        ]
        for r in range(len(rows))
    ]


def _rows(count: int) -> list[list[list[int]]]:
    return [[[1 + 1000 * r + 500 * half + place for place in range(128)] for half in range(2)] for r in range(count)]


def _shifted(row: Sequence[int], late: int) -> list[int]:
    return [*row[late : late + 120], *[0] * 8]


@pytest.mark.parametrize("channels", [129, 130, 131, 132, 133, 134, 135])
@pytest.mark.parametrize("stream", range(4))
def test_rows_of_a_stream_are_turned(channels: int, stream: int) -> None:
    """Those of an even token and of the odd one behind it, by what is known when the kernel is compiled."""
    rows = _rows(2)
    shifts = [(parity * 4 + stream) * channels % 8 for parity in range(2)]
    got = _turn(words._turn_stream(channels, 4, stream), rows, [])
    assert got == [[_shifted(half, late) for half in row] for row, late in zip(rows, shifts, strict=True)]


@pytest.mark.parametrize("late", range(8))
def test_rows_are_turned_as_their_threads_say(late: int) -> None:
    rows = _rows(words.ROWS_TURNED)
    got = _turn((words.TURN_ANY.value, words.TURN_ANY_OPERANDS.value), rows, [late])
    assert got == [[_shifted(half, late) for half in row] for row in rows]


def _read_late(how: tuple[str, str], places: Sequence[int], own: bool, given: int) -> list[int]:
    """What a thread makes of its sixteen places, as the bits of eight numbers."""
    code, operands = how
    assert operands.split(",") == ["=&r"] * 8 + ["r"] * (8 + 3 * 8)
    registers = {f"${8 + k}": _word(places[2 * k : 2 * k + 2]) for k in range(8)}
    registers |= {"$16": 0xFFFF0000 if own else 0, "$24": 0x1044 if own else 0x4444, "$32": given}
    _run(code, [registers])
    return [registers[f"${k}"] for k in range(8)]


@pytest.mark.parametrize("channels", [129, 130, 131, 132, 133, 134, 135])
@pytest.mark.parametrize("stream", range(4))
@pytest.mark.parametrize("token", [0, 1, 6, 7])
def test_late_channels_of_a_stream_are_read(channels: int, stream: int, token: int) -> None:
    """In the upper half of a word, where a float32 has what a bfloat16 has."""
    places = [0x1001 + 0x101 * k for k in range(16)]
    late = (token * 4 + stream) * channels % 8
    how = late_rows._reading_stream(channels, 4, stream)
    assert _read_late(how, places, True, token % 2) == [c << 16 for c in places[late : late + 8]]
    assert _read_late(how, places, False, token % 2) == [0] * 8


@pytest.mark.parametrize("late", range(8))
def test_late_channels_are_read_as_their_token_says(late: int) -> None:
    places = [0x1001 + 0x101 * k for k in range(16)]
    how = late_rows._reading_stream(1001, 1, 0)
    assert _read_late(how, places, True, late) == [c << 16 for c in places[late : late + 8]]
    assert _read_late(how, places, False, late) == [0] * 8


@pytest.mark.parametrize("odd", [0, 1])
def test_words_are_moved(odd: int) -> None:
    """Of an odd row each channel one place down, so that words begin with its second one."""
    count = 2 * words.ROWS_MOVED
    rows = [[1 + 200 * r + place for place in range(128)] for r in range(words.ROWS_MOVED)]
    assert words.MOVE_OPERANDS.value.split(",") == ["=&r"] * count + ["r"] * (5 * count)
    warp: list[Registers] = []
    for lane in range(LANES):
        registers = {f"${2 * count}": odd, f"${4 * count}": lane}
        for r, row in enumerate(rows):
            for panel in range(2):
                at = 64 * panel + 2 * lane
                registers[f"${count + 2 * r + panel}"] = _word(row[at : at + 2])
        warp.append(registers)
    _run(words.MOVE.value, warp)
    for r, row in enumerate(rows):
        got = [c for panel in range(2) for lane in range(LANES) for c in _channels(warp[lane][f"${2 * r + panel}"])]
        assert got[: 128 - odd] == row[odd:]


@pytest.mark.parametrize("channels", [129, 130, 132, 255, 1001])
@pytest.mark.parametrize("streams", [1, 4])
def test_groups_begin_at_boundaries(channels: int, streams: int) -> None:
    """Which `_origin` and the shifts of rows rely on: of 16 bytes, for every group of tokens and every step."""
    step = hopper_step(channels)
    assert GROUP.value * streams * channels % 8 == 0 and step % 8 == 0
    for token in range(2 * GROUP.value):
        for stream in range(streams):
            late = (token % (8 // streams) * streams + stream) * channels
            start = (token * streams + stream) * channels
            rounded = late // 8 * 8 + token // (8 // streams) * (8 * channels)
            assert start - rounded == late % 8 == start % 8 and late % 8 + step < 128
            assert (start + start % 2 * (channels % 2)) % hopper_word(channels) == 0
