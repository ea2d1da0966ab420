"""Shared by all tests: one thread per worker, reproducible hypothesis, interpreted kernels where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which reads it once

# What only a GPU can show. Not skipped silently: the header says so.
collect_ignore = [] if HAS_GPU else ["gpu"]

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


def pytest_report_header() -> str:
    if HAS_GPU:
        return f"kernels: run on {torch.cuda.get_device_name()}"
    return "kernels: interpreted; tests/gpu is not collected, there is no GPU (make test-gpu on a machine with one)"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
