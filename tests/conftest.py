"""Shared by all tests: one thread per worker, reproducible hypothesis, and the recipes everything is tested with."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Files that need a second process or a compiler run in the same suite; keep hypothesis deterministic between runs.
settings.register_profile(
    "mhckit", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("mhckit")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
