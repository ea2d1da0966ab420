"""Launch parameters that follow the number of tokens, on a device like an H200."""

from __future__ import annotations

import pytest
import torch

from mhckit.kernels._launch import token_chunks

CPU = torch.device("cpu")  # counts as one with 132 multiprocessors


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
    assert token_chunks(tokens, rows, columns, CPU) == chunks
