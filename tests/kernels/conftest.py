"""The kernel tests run on the GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accuracy import poisoned_memory

if not torch.cuda.is_available():
    import interpreter

    interpreter.mend()


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield
