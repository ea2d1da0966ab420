"""The kernel tests run on the GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    import interpreter

    interpreter.mend()


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Torch fills uninitialised memory with NaN: an element that a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all() and torch.ones(1).new_empty(2, dtype=torch.bfloat16).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
