"""`mhckit train` and `mhckit export`: what they offer, say and leave, and that kill -9 costs nothing but time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import as_flags, computed, small_config
from typer.testing import CliRunner

from mhckit.cli import app
from mhckit.train import TrainConfig, Trainer, load_config
from mhckit.train.progress import Bar, describe, make_reporter
from mhckit.train.run_folder import read_metrics

SECONDS = 60


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the processes that are compared have, so that sums have the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_help() -> None:
    result = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for word in ("--config", "--preset", "--scale", "--residual", "--lr", "--no-memory-log", "Optimiser", "Data"):
        assert word in result.output


def test_prints_a_config_that_can_be_read(tmp_path: Path) -> None:
    flags = ["--preset", "deep", "--residual", "hc", "--betas", "0.8", "0.9", "--recompute", "3", "--scale", "0.5"]
    result = CliRunner().invoke(app, ["train", *flags, "--print-config"])
    assert result.exit_code == 0, result.output
    path = tmp_path / "run.yaml"
    path.write_text(result.output)
    want = load_config(preset="deep", residual="hc", betas=(0.8, 0.9), recompute=3, scale=0.5)
    assert load_config(path) == want
    again = CliRunner().invoke(app, ["train", "--config", str(path), "--lr", "1", "--print-config"])
    assert again.output == result.output.replace(f"\nlr: {want.lr}\n", "\nlr: 1.0\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset", "2b"], "mhckit: preset must be one of tiny"),
        (["--lr", "-1"], "mhckit: lr must be positive, got -1.0"),
        (["--config", "absent.yaml"], "mhckit: absent.yaml is no file"),
        (["--data", "absent.txt"], "absent.txt"),
    ],
)
def test_mistakes_are_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", *flags])
    assert result.exit_code == 1
    assert message in result.output and "Traceback" not in result.output


def test_every_field_is_an_option(tmp_path: Path) -> None:
    config = small_config(tmp_path, max_minutes=5, decay_steps=3, tokenizer=str(tmp_path / "tokenizer.json"))
    config = config.replace(model=config.model.replace(kv_heads=1, tied=True))
    result = CliRunner().invoke(app, ["train", *as_flags(config), "--print-config"])
    path = tmp_path / "run.yaml"
    path.write_text(result.output)
    assert load_config(path) == config


def test_goes_on_to_the_bit_after_kill_9(tmp_path: Path) -> None:
    config = small_config(tmp_path, run_name="killed", max_steps=24, log_every=1, checkpoint_every=4)
    whole = Trainer(config.replace(run_name="whole"), show=False).run()
    _kill_after(config, 9)
    lines = read_metrics(tmp_path / "runs/killed/metrics.jsonl")
    assert 9 <= len(lines) < 24
    result = CliRunner().invoke(app, ["train", *as_flags(config)])
    assert result.exit_code == 0, result.output
    assert "from step" in result.output and f"step 24/24  {describe(whole[-1])[:20]}" in result.output
    parts = read_metrics(tmp_path / "runs/killed/metrics.jsonl")
    assert computed(parts) == computed(whole)
    assert [sorted(line) for line in parts] == [sorted(line) for line in whole]
    files = [tmp_path / f"{name}.safetensors" for name in ("whole", "killed")]
    for file in files:
        exported = CliRunner().invoke(app, ["export", str(tmp_path / "runs" / file.stem), str(file)])
        assert exported.exit_code == 0, exported.output
    weights = [load_file(file) for file in files]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def _kill_after(config: TrainConfig, lines: int) -> None:
    """Start a run, and kill it when it has written so many lines, wherever it is then."""
    code = f"import torch; torch.set_num_threads({torch.get_num_threads()}); from mhckit.cli import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, "train", *as_flags(config)], stdout=subprocess.DEVNULL)
    metrics = Path(config.out) / config.run_name / "metrics.jsonl"
    deadline = time.monotonic() + SECONDS
    try:
        while len(read_metrics(metrics)) < lines:
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, f"not so far after {SECONDS} s"
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_export_of_what_is_no_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "weights.safetensors")])
    assert result.exit_code == 1 and "is no checkpoint of mhckit" in result.output
    assert not list(tmp_path.iterdir())


def test_a_bar_in_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"step": 3, "loss": 2.5, "grad_norm": 1.0, "tokens_per_second": 12345.0, "mfu": 0.4, "memory_bytes": 2**31}
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    reporter = make_reporter("mine", 10, 2)
    assert isinstance(reporter, Bar)
    reporter.show({**line, "validation_loss": 2.75})
    reporter.close()
    shown = capsys.readouterr().out
    for text in ("mine", "3/10", "loss 2.5000", "12.3k tokens/s", "MFU 40.0%", "2.00 GiB", "validation loss 2.75"):
        assert text in shown
