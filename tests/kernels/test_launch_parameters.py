"""Launch parameters that follow the number of tokens, on a device like an H200; and where rows begin anywhere."""

from __future__ import annotations

import pytest
import torch

from mhckit.kernels._launch import (
    Launch,
    equally_late,
    parameters_bwd_launch,
    read_bwd_launch,
    read_launch,
    residual_launch,
    residual_programs_every,
    rows_are_loaded_in_words,
    steps_added_together,
    token_chunks,
)

CPU = torch.device("cpu")  # counts as one with 132 multiprocessors


def _launch(block_t: int) -> Launch:
    return Launch(block_t=block_t, block_c=128, num_warps=4)


@pytest.mark.parametrize(("tokens", "rows", "columns", "chunks"), [
    (8192, 24, 4 * 4096, 4),
    (16384, 24, 4 * 2560, 6),  # not 8, which would be 1.2 waves
    (10240, 24, 4 * 4096, 4),  # nor 5
    (32768, 24, 4 * 2048, 16),
    (4096, 24, 4 * 7168, 2),
    (8192, 80, 8 * 4096, 1),
    (1, 24, 4, 1),
    (0, 0, 4096, 1),
])  # fmt: skip
def test_chunks_of_tokens(tokens: int, rows: int, columns: int, chunks: int) -> None:
    assert token_chunks(tokens, rows, columns, _launch(32), CPU) == chunks


@pytest.mark.parametrize(("tokens", "columns", "block_t", "chunks"), [
    (8192, 4 * 4096, 64, 2),
    (8192, 4 * 4096, 32, 4),  # with half the loads in flight
    (16384, 4 * 2560, 64, 3),
    (32768, 4 * 2048, 64, 4),
    (4096, 4 * 7168, 64, 1),  # two would be more than run at once
    (65536, 4 * 12288, 64, 1),
    (65536, 4 * 9216, 64, 1),
    *((8192, 4 * channels, 64, 2) for channels in (4352, 4608, 5120, 6144)),  # of one, too few for a multiprocessor
    (2048, 4 * 2048, 64, 1),  # so few tokens are not worth more
    (0, 4, 64, 1),
])  # fmt: skip
def test_chunks_of_tokens_whose_sums_are_short(tokens: int, columns: int, block_t: int, chunks: int) -> None:
    assert token_chunks(tokens, 24, columns, _launch(block_t), CPU, sums_are_short=True) == chunks


@pytest.mark.parametrize(("rows", "block_t", "steps"), [
    (24, 64, 8), (32, 32, 16), (24, 1024, 1), (0, 64, 0), (33, 32, 0), (80, 32, 0),
])  # fmt: skip
def test_sums_are_short_where_registers_hold_a_total(rows: int, block_t: int, steps: int) -> None:
    assert steps_added_together(rows, _launch(block_t)) == steps
    assert steps_added_together(rows, _launch(block_t), sums_norm=True) == 0


@pytest.mark.parametrize(("streams", "channels", "every"), [
    (4, 5129, 2), (4, 5130, 1), (4, 5132, 1), (2, 5130, 2), (8, 5129, 1),
    (4, 5128, None),  # aligned
    (2, 5129, None), (1, 5130, None),  # four kinds of rows
])  # fmt: skip
def test_rows_that_are_equally_late(streams: int, channels: int, every: int | None) -> None:
    x = torch.empty(3, streams, channels, dtype=torch.bfloat16)
    assert equally_late(x) == every
    assert equally_late(x.float()) is None
    if every is not None:
        starts = {(token * streams * channels) % 8 for token in range(0, 64, every)}
        assert starts == {0}


@pytest.mark.parametrize(("channels", "words"), [(257, True), (5129, True), (5130, True), (5132, False), (255, False)])
def test_words_are_loaded_by_programs_of_one_token(channels: int, words: bool) -> None:
    x = torch.empty(3, 4, channels, dtype=torch.bfloat16)
    assert rows_are_loaded_in_words(x) == words and not rows_are_loaded_in_words(x.float())
    for streams in range(1, 9) if words else ():
        assert read_launch(streams, channels).block_t == 1
        assert read_bwd_launch(streams, channels, aligned=False, words=True).block_t == 1


@pytest.mark.parametrize(("streams", "channels", "sums_norm", "columns", "warps"), [
    (1, 4096, False, 256, 8),  # one of eight streams, whose 80 rows are three blocks
    (1, 2048, False, 128, 8),
    (1, 4096, True, 64, 4),
    (8, 4096, False, 32, 4),
])  # fmt: skip
def test_columns_of_a_program_of_p(streams: int, channels: int, sums_norm: bool, columns: int, warps: int) -> None:
    launch = parameters_bwd_launch(80, streams, channels, wide=True, asynchronous=True, sums_norm=sums_norm)
    assert (launch.block_c, launch.num_warps) == (columns, warps)
    plain = parameters_bwd_launch(80, streams, channels, wide=True, asynchronous=False)
    assert plain.num_warps == 4 and plain.block_c <= 64


@pytest.mark.parametrize(("wide", "asynchronous", "sums_norm", "tokens"), [
    (True, True, False, 64), (True, True, True, 32), (False, True, False, 32), (True, False, False, 32),
])  # fmt: skip
def test_steps_of_p_are_long_where_chunks_are(wide: bool, asynchronous: bool, sums_norm: bool, tokens: int) -> None:
    launch = parameters_bwd_launch(24, 1, 4096, wide=wide, asynchronous=asynchronous, sums_norm=sums_norm)
    assert launch.block_t == tokens


@pytest.mark.parametrize("channels", [64, 2560])
@pytest.mark.parametrize("streams", range(1, 9))
def test_programs_that_take_residual_maps_are_among_the_first_ones(streams: int, channels: int) -> None:
    maps = residual_launch(streams).block_t
    for launch in (read_launch(streams, channels), read_bwd_launch(streams, channels)):
        every = residual_programs_every(streams, channels, launch)
        assert every == max(1, 3 * maps // (4 * launch.block_t))
        for tokens in (1, 7, 64, 4097):
            residual = -(-tokens // maps)
            programs = residual + -(-tokens // launch.block_t)
            turns = [program for program in range(programs) if program % every == 0 and program // every < residual]
            assert len(turns) == residual
            assert turns[-1] <= 0.8 * programs


@pytest.mark.parametrize(("streams", "channels", "element_size", "tile"), [
    (4, 7168, 2, (4, 256)),
    (4, 8192, 2, (1, 2048)),
    (2, 12288, 2, (1, 2048)),
    (4, 12288, 4, (4, 256)),
    (8, 12288, 2, (4, 256)),
])  # fmt: skip
def test_b_takes_very_long_rows_one_by_one(
    streams: int, channels: int, element_size: int, tile: tuple[int, int]
) -> None:
    launch = read_bwd_launch(streams, channels, element_size=element_size)
    assert (launch.block_t, launch.block_c) == tile


def test_residual_maps_come_first_where_they_are_few() -> None:
    launch = read_bwd_launch(4, 4096)
    assert residual_programs_every(4, 4096, launch) == residual_programs_every(4, 2561, launch, words=True) == 1
    assert residual_programs_every(8, 4096, read_bwd_launch(8, 4096)) > 1
