"""Shared by all tests: one thread per worker, reproducible hypothesis, and the recipes everything is tested with."""

from __future__ import annotations

import os

import pytest
import torch

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # `make` installs it; a bare GPU machine may lack it, and then test_properties.py says so
    pass
else:
    settings.register_profile(
        "mhckit", derandomize=True, deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("mhckit")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
