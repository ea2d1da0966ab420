"""Pictures of runs: drawn from whatever lines there are, without touching matplotlib's state."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs matplotlib, which `make` installs")

from mhckit.train import pictures
from mhckit.train.pictures import smoothed, spaced, training_picture


def _lines(factor: float, *, health: bool = True) -> list[dict]:
    lines: list[dict] = [
        {"step": step, "loss": factor * (6 - 0.01 * step), "grad_norm": 2.0 / step, "lr": 1e-3, "mfu": None}
        for step in range(1, 101)
    ]
    lines[49]["validation_loss"] = 4.0
    if health:
        lines[49] |= {"health/composite_gain_forward": 30.0, "health/composite_gain_backward": 1.5}
    return lines


def _drawn(runs: dict, matrices: dict | None = None) -> tuple[list, list]:
    """Axes with curves, and visible axes with a heat map."""
    rows = [pictures._Row(name, pictures._as_stack(name, matrix)) for name, matrix in (matrices or {}).items()]
    axes = [axes for axes in pictures._draw(runs, rows).get_axes() if axes.get_visible()]
    return [a for a in axes if not a.images], [a for a in axes if a.images]


def _values(line) -> list[float]:
    return [float(value) for value in line.get_ydata()]


def test_curves_are_the_runs() -> None:
    (loss, norm, gain), matrices = _drawn({"plain": _lines(1.0, health=False), "mhc": _lines(0.5)})
    assert not matrices
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["plain", "mhc", "validation"]
    raw, smooth, validation = loss.lines[3:6]  # of the second run
    assert _values(raw) == [line["loss"] for line in _lines(0.5)]
    assert _values(smooth) == smoothed(_values(raw))
    assert _values(validation) == [4.0] and list(validation.get_xdata()) == [50]
    assert loss.lines[0].get_color() != raw.get_color() == smooth.get_color()
    assert loss.get_ylim()[1] == pytest.approx(1.05 * 5.99)
    assert norm.get_yscale() == gain.get_yscale() == "log"
    low, high = gain.get_ylim()
    assert low <= 0.5 and high > 30
    assert [_values(line) for line in gain.lines[:2]] == [[30.0], [1.5]]
    assert [text.get_text() for text in gain.get_legend().get_texts()] == ["mhc, signal", "mhc, gradient"]


def test_without_health_there_is_no_gain() -> None:
    curves, _ = _drawn({"plain": _lines(1.0, health=False)})
    assert len(curves) == 2


def test_a_run_that_diverges_leaves_the_picture() -> None:
    """Values that are not finite are gaps, and large ones do not flatten the other runs."""
    lines = _lines(1.0)
    lines[60]["loss"], lines[61]["loss"], lines[62]["loss"] = 1e9, math.inf, math.nan
    lines[63]["grad_norm"] = 0.0
    (loss, norm, _), _ = _drawn({"hc": lines})
    assert loss.get_ylim()[1] < 10
    assert [math.isnan(value) for value in _values(loss.lines[0])[60:64]] == [False, True, True, False]
    assert math.isnan(_values(norm.lines[0])[63])


def test_matrices_are_shown_with_their_numbers() -> None:
    matrix = torch.tensor([[0.9, 0.1], [0.25, 0.75]])
    _, (axes,) = _drawn({"mhc": _lines(1.0)}, {"mhc": matrix})
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {(0, 0): "0.900", (1, 0): "0.100", (0, 1): "0.250", (1, 1): "0.750"}  # (from, to)
    torch.testing.assert_close(torch.tensor(axes.images[0].get_array().tolist()), matrix)
    assert axes.images[0].get_clim() == (0, 1)


def test_of_many_sublayers_some_are_shown() -> None:
    stacks = {"hc": torch.randn(48, 4, 4) * 3, "mhc": torch.eye(4).expand(3, 4, 4)}
    _, maps = _drawn({"hc": _lines(1.0), "mhc": _lines(1.0)}, stacks)
    assert [axes.get_title() for axes in maps[:6]] == [f"sublayer {n} of 48" for n in (1, 10, 20, 29, 39, 48)]
    torch.testing.assert_close(torch.tensor(maps[1].images[0].get_array().tolist()), stacks["hc"][9])
    low, high = maps[0].images[0].get_clim()
    assert low == -high < -1
    assert len(maps) == 9 and maps[8].images[0].get_clim() == (0, 1)


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "picture.png"
    assert training_picture({"mhc": _lines(1.0)}, {"mhc": torch.eye(4).expand(2, 4, 4)}, path) == path
    assert path.read_bytes().startswith(b"\x89PNG")
    assert training_picture({"mhc": _lines(1.0)[:1]}, None, tmp_path / "one.svg").stat().st_size > 1000


def test_errors(tmp_path: Path) -> None:
    for runs in ({}, {"mhc": []}):
        with pytest.raises(ValueError, match="runs must have lines"):
            training_picture(runs, None, tmp_path / "a.png")
    for shape in ((4,), (2, 3), (0, 4, 4), (1, 2, 4, 4)):
        with pytest.raises(ValueError, match=r"matrices\['mhc'\] must be \[N, N\] or \[L, N, N\]"):
            training_picture({"mhc": _lines(1.0)}, {"mhc": torch.zeros(shape)}, tmp_path / "a.png")


def test_helpers() -> None:
    assert smoothed([]) == []
    assert smoothed([1.0, 3.0]) == [1.0, 3.0]  # so few that each is its own mean
    assert smoothed([2.0] * 500) == pytest.approx([2.0] * 500)
    noisy = smoothed([0.0, 1.0] * 200)[50:-50]
    assert max(noisy) - min(noisy) < 0.1
    falling = [100.0 - step for step in range(100)]
    assert smoothed(falling) == pytest.approx(falling)  # no lag
    falling[50] = math.nan
    means = smoothed(falling)
    assert math.isnan(means[50])
    assert means[49] == pytest.approx((53 + 52 + 51 + 49) / 4)  # two on each side, of which one is none
    assert spaced(3, 6) == [0, 1, 2] and spaced(11, 6) == [0, 2, 4, 6, 8, 10]


def test_importing_draws_nothing_and_pyplot_is_not_loaded(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from mhckit.train.pictures import training_picture
assert "matplotlib" not in sys.modules
training_picture({{"a": [{{"step": 1, "loss": 2.0, "grad_norm": 1.0}}]}}, None, Path({str(tmp_path / "a.png")!r}))
assert "matplotlib.pyplot" not in sys.modules
sys.modules["matplotlib.figure"] = None
try:
    training_picture({{"a": [{{"step": 1, "loss": 2.0, "grad_norm": 1.0}}]}}, None, Path("b.png"))
except ImportError as error:
    assert "mhckit[viz]" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
