"""How channels are found, and put in their places, where rows begin anywhere: the instructions that `_hopper_late`,
`_hopper_late_phi` and `_hopper_rows` write out, run here lane by lane. The kernels that they are part of run on an
emulated GPU in test_emulated.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from emulator.decode import Decoded
from emulator.program import LANES
from emulator.ptx import parse

from mhckit.kernels._hopper_launch import HAS_GLUON, hopper_step

if not HAS_GLUON:
    pytest.skip("kernels for Hopper are written for one version of Triton", allow_module_level=True)
from mhckit.kernels import _hopper_late as late_rows
from mhckit.kernels import _hopper_late_phi as late_phi
from mhckit.kernels import _hopper_rows as moved_rows
from mhckit.kernels._hopper_copies import GROUP

Registers = dict[str, int]


def _run(code: str, lanes: Sequence[Registers]) -> None:
    """The instructions on the registers of lanes, by name: what an emulated warp makes of them."""
    body, used = code.replace("$", "%r"), set(re.findall(r"\$\d+", code))
    decoded = Decoded(parse(f".visible .entry test(\n)\n.reqntid {LANES}\n{{\n{body}\n\tret;\n}}\n"))
    warp = decoded.warp(None, 0, (0, 0, 0), (1, 1, 1), [])
    for name in used & lanes[0].keys():
        values = [lanes[k % len(lanes)][name] for k in range(LANES)]
        warp.registers[decoded.slot(name.replace("$", "%r"))] = np.array(values, np.uint32)
    while not warp.done:
        warp.at += 1
        decoded.code[warp.at - 1](warp)
    for operand in used:
        for lane, value in zip(lanes, warp.registers[decoded.slot(operand.replace("$", "%r"))], strict=False):
            lane[operand] = int(value)


def _word(channels: Sequence[int]) -> int:
    return channels[1] << 16 | channels[0]


def _channels(word: int) -> list[int]:
    return [word & 0xFFFF, word >> 16]


def _read_late(how: tuple[str, str], places: Sequence[int], own: bool, given: int) -> list[int]:
    """What a thread makes of its sixteen places, as the bits of eight numbers."""
    code, operands = how
    assert operands.split(",") == ["=&r"] * 8 + ["r"] * (8 + 3 * 8)
    registers = {f"${8 + k}": _word(places[2 * k : 2 * k + 2]) for k in range(8)}
    registers |= {"$16": given, "$24": 0xFFFF0000 if own else 0, "$32": 0x1044 if own else 0x4444}
    _run(code, [registers])
    return [registers[f"${k}"] for k in range(8)]


@pytest.mark.parametrize("channels", [129, 130, 131, 132, 133, 134, 135])
@pytest.mark.parametrize("stream", range(4))
@pytest.mark.parametrize("token", [0, 1, 6, 7])
def test_late_channels_of_a_stream_are_read(channels: int, stream: int, token: int) -> None:
    """In the upper half of a word, where a float32 has what a bfloat16 has."""
    places = [0x1001 + 0x101 * k for k in range(16)]
    late = (token * 4 + stream) * channels % 8
    how = late_rows._reading_stream(channels, 4, stream, False)
    assert _read_late(how, places, True, token % 2) == [c << 16 for c in places[late : late + 8]]
    assert _read_late(how, places, False, token % 2) == [0] * 8


@pytest.mark.parametrize("late", range(8))
def test_late_channels_are_read_as_their_token_says(late: int) -> None:
    places = [0x1001 + 0x101 * k for k in range(16)]
    how = late_rows._reading_stream(1001, 1, 0, False)
    assert _read_late(how, places, True, late) == [c << 16 for c in places[late : late + 8]]
    assert _read_late(how, places, False, late) == [0] * 8


FIRST = 0x2000


def _late_row(number: int, late: int) -> list[int]:
    """128 places; channels differ from row to row, but for the first one."""
    return [*[7] * late, FIRST, *(0x2001 + 0x1000 * number + k for k in range(127 - late))]


def _read_from_next(how: tuple[str, str], rows: Sequence[Sequence[int]], panel: int, given: Sequence[int]) -> None:
    """Eight lanes have the vectors of each of four rows on a panel, and beside them those on the other. They read the
    row's channels, whatever comes before the first; the last lane of the second panel has none of its own, and reads 0.
    """
    code, operands = how
    assert operands.split(",") == ["=&r"] * 8 + ["r"] * (8 + 3 * 8 + 8)
    warp: list[Registers] = []
    for lane in range(LANES):
        row, vector = rows[lane // 8], lane % 8
        own = 64 * panel + 8 * vector < 120
        registers = {"$16": given[lane // 8], "$24": 0xFFFF0000 if own else 0, "$32": 0x1044 if own else 0x4444}
        registers["$40"] = vector
        for which, shown in enumerate((panel, 1 - panel)):
            for k in range(4):
                at = 64 * shown + 8 * vector + 2 * k
                registers[f"${8 + 4 * which + k}"] = _word(row[at : at + 2])
        warp.append(registers)
    _run(code, warp)
    for r, row in enumerate(rows):
        got = [lane[f"${k}"] for lane in warp[8 * r : 8 * r + 8] for k in range(8)]
        wanted = row[row.index(FIRST) + 64 * panel :][: 64 - 8 * panel]
        assert got == [c << 16 for c in wanted] + [0] * (64 - len(wanted))


@pytest.mark.parametrize("channels", [129, 130, 131, 132, 133, 134, 135])
@pytest.mark.parametrize("stream", range(4))
@pytest.mark.parametrize("panel", [0, 1])
def test_lanes_read_from_the_next_one(channels: int, stream: int, panel: int) -> None:
    """Four neighbouring tokens of a stream."""
    rows = [_late_row(token, (token * 4 + stream) * channels % 8) for token in range(4)]
    how = late_rows._reading_stream(channels, 4, stream, True)
    _read_from_next(how, rows, panel, [token % 2 for token in range(4)])


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("panel", [0, 1])
def test_lanes_read_from_the_next_one_as_their_token_says(first: int, panel: int) -> None:
    rows = [_late_row(number, first + number) for number in range(4)]
    _read_from_next(late_rows._reading_stream(1001, 1, 0, True), rows, panel, range(first, first + 4))


def _place(how: tuple[str, str], late: Sequence[int], given: bool) -> None:
    """Sixteen lanes have the vectors of two tokens' rows, and the vector that was carried for each; the other sixteen
    those of two more.
    """
    code, operands = how
    assert operands.split(",") == ["=&r"] * 8 + ["r"] * (16 + 16 * (2 if given else 1))
    carried = [[0x100 * token + k for k in range(8)] for token in range(4)]
    rows = [[0x1001 + 0x1000 * token + k for k in range(128)] for token in range(4)]
    warp: list[Registers] = []
    for lane in range(LANES):
        registers = {"$24": lane % 16}
        for pair in range(2):
            token = lane // 16 * 2 + pair
            own = rows[token][8 * (lane % 16) :]
            for k in range(4):
                registers[f"${8 + 4 * pair + k}"] = _word(own[2 * k : 2 * k + 2])
                registers[f"${16 + 4 * pair + k}"] = _word(carried[token][2 * k : 2 * k + 2])
            registers[f"${40 + 8 * pair}"] = late[token]
        warp.append(registers)
    _run(code, warp)
    for token in range(4):
        lanes = warp[token // 2 * 16 :][:16]
        got = [c for lane in lanes for k in range(4) for c in _channels(lane[f"${4 * (token % 2) + k}"])]
        assert got == (carried[token] + rows[token])[8 - late[token] :][:128]


@pytest.mark.parametrize("channels", [129, 130, 131, 132, 133, 134, 135])
@pytest.mark.parametrize("stream", range(4))
def test_vectors_of_a_stream_are_placed(channels: int, stream: int) -> None:
    """As late as the row, behind what was carried."""
    late = [(token * 4 + stream) * channels % 8 for token in range(4)]
    _place(moved_rows._placing_stream(channels, 4, stream), late, given=False)


@pytest.mark.parametrize("first", [0, 4])
def test_vectors_are_placed_as_their_token_says(first: int) -> None:
    _place(moved_rows._placing_stream(1001, 1, 0), range(first, first + 4), given=True)


@pytest.mark.parametrize("late", [1, 2, 3])
def test_phi_is_read_from_its_first_channel_on(late: int) -> None:
    """Sixteen lanes have a row's vectors, and each of them has the row's end."""
    code, operands = late_phi._shifting(late)
    assert operands.split(",") == ["=&r"] * 4 + ["r"] * 12
    rows = [[1000 * row + k for k in range(64 + 4)] for row in (1, 2)]
    warp: list[Registers] = []
    for lane in range(LANES):
        row, vector = rows[lane // 16], lane % 16
        registers = {"$12": vector}
        for k in range(4):
            registers[f"${4 + k}"], registers[f"${8 + k}"] = row[4 * vector + k], row[64 + k]
        warp.append(registers)
    _run(code, warp)
    for r, row in enumerate(rows):
        assert [lane[f"${k}"] for lane in warp[16 * r : 16 * r + 16] for k in range(4)] == row[late : late + 64]


@pytest.mark.parametrize("channels", [129, 130, 132, 255, 1001])
@pytest.mark.parametrize("streams", [1, 4])
def test_groups_begin_at_boundaries(channels: int, streams: int) -> None:
    """Of 16 bytes, in every group of tokens and every step."""
    step, boundaries = hopper_step(channels), moved_rows._boundaries.fn  # type: ignore[attr-defined]
    for token, channel in ((0, 0), (GROUP.value, 0), (GROUP.value, step), (5 * GROUP.value, 3 * step)):
        for t in range(GROUP.value):
            for stream in range(streams):
                row = boundaries(0, t, stream, _Number(token), channel, channels, streams)
                start = ((token + t) * streams + stream) * channels + channel
                assert row == (start // 8 * 8, start % 8)
                assert start % 8 + step < 128


class _Number(int):
    """A number in a kernel."""

    def to(self, kind: object) -> _Number:
        return self
