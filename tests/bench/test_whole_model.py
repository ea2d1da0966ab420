"""The measurement of a whole model, on the CPU and with a clock that does not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mhckit.bench import whole_model
from mhckit.bench.launches import DeviceEvent
from mhckit.bench.results import Line
from mhckit.integrations.transformers import apply

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(whole_model, "median_microseconds", lambda step, rep: 1e3 * float(step().norm()))
    monkeypatch.setattr(whole_model, "peak_extra_bytes", lambda step: 7)
    monkeypatch.setattr(whole_model, "device_events", lambda step: [DeviceEvent("kernel", 2000.0)])
    model = whole_model.random_model(128, 2, device="cpu")
    return lambda: list(whole_model.measure(model, torch.randint(0, 1024, (1, 16)), rep=1))


def test_every_variant_is_measured(lines: Any) -> None:
    measured: list[Line] = lines()
    assert [line["variant"] for line in measured] == list(whole_model.VARIANTS)
    assert all(
        line["kind"] == "model" and line["milliseconds"] > 0 and line["kernel_milliseconds"] == 2 for line in measured
    )


def test_a_wrong_variant_is_refused(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_it(model: Any, **options: bool) -> Any:
        model.lm_head.weight.data.mul_(3)
        return apply(model, **options)

    monkeypatch.setattr(whole_model, "apply", break_it)
    assert [line["kind"] for line in lines()] == ["model", "refused", "refused", "refused"]


def test_table() -> None:
    size = dict(hidden=1, layers=2, batch=3, tokens=4)
    table = whole_model._table(
        [
            dict(
                kind="model",
                variant="transformers",
                milliseconds=3.0,
                kernel_milliseconds=2.0,
                peak_extra_bytes=5_000_000,
                **size,
            ),
            dict(
                kind="model",
                variant="layers",
                milliseconds=1.5,
                kernel_milliseconds=1.0,
                peak_extra_bytes=4_000_000,
                **size,
            ),
            dict(kind="refused", variant="across layers", error=0.5, **size),
        ]
    )
    assert [list(column.cells) for column in table.columns][3] == ["1.00x", "2.00x", ""]
