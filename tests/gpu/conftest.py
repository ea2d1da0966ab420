"""Tests that only a GPU can run, and a line about the run for benchmarks/results."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import triton

_START = time.time()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--summary", type=Path, help="append a JSON line about the run to this file")
    parser.addoption("--commit", default="unknown", help="the commit under test, for the summary")


LONGEST = (
    "test_sanitizer",
    "test_exported_on_gpu",
    "test_every_number_of_streams[junction-8]",
    "test_compiled_network",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no worker is left with one at the end."""
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONGEST))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say what failed at once: a run that is cut off prints no summary."""
    if report.failed:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-600:]}", flush=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    path: Path | None = session.config.getoption("--summary")
    if path is None or hasattr(session.config, "workerinput"):
        return
    stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
    line = {
        "what": "make test-gpu",
        "commit": session.config.getoption("--commit"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "collected": session.testscollected,
        **{outcome: len(stats.get(outcome, [])) for outcome in ("passed", "failed", "error", "skipped", "xfailed")},
        "seconds": round(time.time() - _START, 1),
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
