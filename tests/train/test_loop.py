"""The loop on one process: it learns, goes on to the bit after any interruption, and destroys nothing."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import computed, contents, small_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mhckit import param_groups
from mhckit.models import LanguageModel
from mhckit.train import TrainConfig, Trainer
from mhckit.train.build import build
from mhckit.train.checkpoint import latest
from mhckit.train.data import Corpus, batch, load_corpus
from mhckit.train.distributed import Place
from mhckit.train.loop import with_vocabulary
from mhckit.train.memory import MemorySnapshot
from mhckit.train.run_folder import read_metrics
from mhckit.train.step import Stepper

HERE = Place(0, 1, torch.device("cpu"))


Result = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads wait for each other longer than these runs take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(_one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that nothing interrupts."""
    return _run(small_config(tmp_path_factory.mktemp("whole")))


def _run(config: TrainConfig, **options: Any) -> Result:
    trainer = Trainer(config, show=False, **options)
    lines = trainer.run()
    assert trainer.model is not None
    return lines, trainer.model.state_dict()


def _assert_same(one: Result, other: Result) -> None:
    """The same numbers and weights, bit for bit."""
    assert computed(one[0]) == computed(other[0])
    assert one[1].keys() == other[1].keys()
    for name, weight in one[1].items():
        assert torch.equal(weight, other[1][name]), name


class _Interrupted(Exception):
    pass


def _interrupt_at(step: int) -> Any:
    def on_log(line: dict[str, Any]) -> None:
        if line["step"] == step:
            raise _Interrupted

    return on_log


def _stepper(config: TrainConfig, optimiser: Any = torch.optim.SGD, here: Place = HERE) -> Stepper:
    corpus = load_corpus(config.data, cache=Path(config.out))
    built = build(config, HERE)
    return Stepper(config, here, corpus, built, optimiser(built.model.parameters()))


@pytest.mark.parametrize("residual", ["plain", "hc", "mhc"])
def test_learns(tmp_path: Path, residual: str) -> None:
    config = small_config(tmp_path, max_steps=30, lr=1e-2)
    lines, _ = _run(config.replace(model=config.model.replace(residual=residual)))
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[-1]["loss"] < lines[0]["loss"] - 2 and lines[-1]["validation_loss"] < lines[0]["loss"] - 2
    assert all(line["memory_bytes"] > 0 and line["tokens_per_second"] > 0 and line["mfu"] is None for line in lines)
    assert [line["step"] for line in lines if "validation_loss" in line] == [6, 12, 18, 24, 30]


def test_goes_on_to_the_bit(tmp_path: Path, whole: Result) -> None:
    config = small_config(tmp_path, run_name="parts")
    for step in (4, 8, 11):  # before the first checkpoint, between two, and after the last
        with pytest.raises(_Interrupted):
            _run(config, on_log=_interrupt_at(step))
    with (tmp_path / "runs/parts/metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "lo')  # a line that was cut off
    parts = _run(config)
    _assert_same(whole, parts)
    assert read_metrics(tmp_path / "runs/parts/metrics.jsonl") == parts[0]


def test_a_run_that_is_done_is_left_as_it_is(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    lines, _ = _run(config)
    before = contents(tmp_path / "runs")
    again, _ = _run(config)
    assert again == lines
    after = contents(tmp_path / "runs")
    assert {path: after[path] for path in before} == before


def test_goes_on_with_more_steps(tmp_path: Path) -> None:
    config = small_config(tmp_path, schedule="constant", max_steps=6)
    whole = _run(config.replace(run_name="whole"))
    _run(config.replace(max_steps=3))
    parts = _run(config)
    assert parts[0][2].pop("validation_loss")  # the end of a run is validated
    _assert_same(whole, parts)


def test_time_is_up(tmp_path: Path, whole: Result) -> None:
    config = small_config(tmp_path, run_name="parts")
    lines, _ = _run(config.replace(max_minutes=1e-9))
    assert len(lines) == 1 and latest(tmp_path / "runs/parts/checkpoints") is not None
    _assert_same(whole, _run(config))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stops_between_steps_at_a_signal(tmp_path: Path, whole: Result, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    config = small_config(tmp_path, run_name="parts")

    def stop(line: dict[str, Any]) -> None:
        if line["step"] == 1:
            os.kill(os.getpid(), number)

    lines, _ = _run(config, on_log=stop)
    assert [line["step"] for line in lines] == [1, 2]  # one more, without waiting for the next report
    assert signal.getsignal(number) is before
    _assert_same(whole, _run(config))
    assert signal.getsignal(number) is before


def test_is_the_loop_that_anyone_would_write(tmp_path: Path, whole: Result) -> None:
    config = small_config(tmp_path)
    corpus = load_corpus(config.data, cache=tmp_path)
    model = LanguageModel(config.model, seed=config.seed)
    optimiser = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=config.lr, betas=config.betas)
    for step in range(config.max_steps):
        left = max(0, step + 1 - config.warmup_steps) / (config.max_steps - config.warmup_steps)
        factor = min(1, (step + 1) / config.warmup_steps) * (0.55 + 0.45 * math.cos(math.pi * left))
        for group in optimiser.param_groups:
            group["lr"] = config.lr * factor
        inputs, targets = batch(corpus.train, seq_len=32, batch_size=4, seed=config.seed, step=step)
        loss = model(inputs, targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimiser.step()
        optimiser.zero_grad()
        line = whole[0][step]
        assert (line["loss"], line["grad_norm"], line["lr"]) == pytest.approx((loss.item(), norm.item(), 4e-3 * factor))
    torch.testing.assert_close(model.state_dict(), whole[1])


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    config = small_config(tmp_path, batch_size=8, grad_clip=0)
    one, four = (_stepper(config.replace(grad_accum=accum)) for accum in (1, 4))
    for number in (1, 2):
        done, accumulated = one.step(number), four.step(number)
        torch.testing.assert_close(done.loss, accumulated.loss)
        torch.testing.assert_close(done.grad_norm, accumulated.grad_norm)
    torch.testing.assert_close(one.model.state_dict(), four.model.state_dict())
    torch.testing.assert_close(one.validate(), four.validate())


def test_clips_the_norm_of_all_gradients(tmp_path: Path) -> None:
    config = small_config(tmp_path, lr=1.0, warmup_steps=0, schedule="constant")
    moved = {}
    for clip in (0.0, 0.25):
        stepper = _stepper(config.replace(grad_clip=clip))
        before = {name: weight.clone() for name, weight in stepper.model.state_dict().items()}
        norm = stepper.step(1).grad_norm
        assert norm > 1
        difference = [(weight - before[name]).norm() for name, weight in stepper.model.state_dict().items()]
        moved[clip] = torch.stack(difference).norm() / (norm if clip == 0 else clip)
    assert moved == pytest.approx({0.0: 1, 0.25: 1}, rel=1e-3)


class _NoReads(TorchDispatchMode):
    """Refuses what would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")
        assert func.overloadpacket.__name__ not in names, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad_clip", [0.0, 1.0])
def test_a_step_waits_for_nothing(tmp_path: Path, grad_clip: float) -> None:
    stepper = _stepper(small_config(tmp_path, health_every=1, grad_accum=2, grad_clip=grad_clip))
    batches = list(stepper._micro_batches(stepper.corpus.train, 0))  # from the disk, which is no device
    stepper._micro_batches = lambda tokens, step: iter(batches)
    with pytest.raises(AssertionError, match="waits"), _NoReads():
        torch.ones(()).item()
    learning: list[bool] = []
    stepper.model.register_forward_pre_hook(lambda *_: learning.append(torch.is_grad_enabled()))
    with _NoReads():
        done = stepper.step(1)
        stepper.validate()
    assert done.health
    assert learning == [True, True] + [False] * (1 + 2 * 2)  # two micro-batches, a look, two validations


def test_looking_at_health_changes_nothing(tmp_path: Path, whole: Result) -> None:
    looked = _run(small_config(tmp_path, health_every=5))
    _assert_same(whole, looked)
    sampled = [line["step"] for line in looked[0] if "health/composite_gain_forward" in line]
    assert sampled == [5, 10]
    assert looked[0][4]["health/phi_grad_norm"] > 0 and looked[0][4]["health/row_error_max"] < 1e-3


def test_ways_to_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recompute gives the same bits; the others the same numbers, under the same names."""
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(type(module).__name__))
    config = small_config(tmp_path, max_steps=3, grad_accum=2)
    plain = _run(config.replace(run_name="plain"))
    _assert_same(plain, _run(config.replace(run_name="recompute", recompute="auto", compile="blocks")))
    assert compiled == ["Attention", "MLP"] * config.model.layers
    compiled.clear()
    for name, change in {"compile": "blocks", "loss": "fused", "sdpa": "math"}.items():
        lines, weights = _run(config.replace(run_name=name, **{name: change}))
        losses = [line["loss"] for line in lines]
        assert losses == pytest.approx([line["loss"] for line in plain[0]], rel=1e-5)
        assert weights.keys() == plain[1].keys()
    assert compiled == ["Block"] * config.model.layers


def test_a_folder_of_another_run(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    _run(config)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"holds a run with lr 0.004, and this one has 0.001: take another run name"):
        _run(config.replace(lr=1e-3))
    with pytest.raises(ValueError, match=r"model \{'layers': 2\}, and this one has \{'layers': 3\}"):
        _run(config.replace(model=config.model.replace(layers=3)))
    with pytest.raises(ValueError, match="holds a run, and resume is 'never'"):
        _run(config.replace(resume="never"))
    assert contents(tmp_path) == before


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    config = small_config(tmp_path, run_name="mine")
    with pytest.raises(ValueError, match=r"resume is 'always', and .*mine holds no run"):
        _run(config.replace(resume="always"))
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="holds something that is no run of mhckit"):
        _run(config)
    assert [path.name for path in (tmp_path / "runs/mine").iterdir()] == ["thesis.txt"]


def test_another_text_under_the_same_name(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    _run(config.replace(max_steps=5))
    Path(str(config.data)).write_text("something else " * 3000)
    with pytest.raises(ValueError, match="corpus"):
        _run(config)


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    config = small_config(tmp_path, checkpoint_every=1, max_steps=30, lr=1e6, warmup_steps=0, grad_clip=0, log_every=30)
    with pytest.raises(FloatingPointError, match="the run cannot go on"):
        _run(config)
    lines = read_metrics(tmp_path / "runs/tiny/metrics.jsonl")
    assert not math.isfinite(lines[-1]["loss"] + lines[-1]["grad_norm"])
    path = latest(tmp_path / "runs/tiny/checkpoints")
    assert path is not None and path.name == f"step-{lines[-1]['step'] - 1:08d}"


def test_lines_go_to_trackers_and_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="`make` installs it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked: list[dict[str, Any]] = []
    config = small_config(tmp_path, max_steps=6, health_every=3)
    lines, _ = _run(config, on_log=tracked.append)
    assert tracked == lines
    events = EventAccumulator(str(tmp_path / "runs/tiny/tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx({line["step"]: line["loss"] for line in lines})
    assert [event.step for event in events.Scalars("health/composite_gain_forward")] == [3, 6]


def test_the_model_has_a_row_for_every_token(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    tokens = torch.zeros(100, dtype=torch.int32)
    assert with_vocabulary(config, Corpus(tokens, tokens, 320, "")) == config
    assert with_vocabulary(config, Corpus(tokens, tokens, 1000, "")).model.vocab_size == 1024


def test_what_only_the_place_can_tell(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch_size must be a multiple of 3 processes times grad_accum 1, got 4"):
        _stepper(small_config(tmp_path), here=Place(0, 3, torch.device("cpu")))
    with pytest.raises(ValueError, match="seq_len"):
        _stepper(small_config(tmp_path, seq_len=100_000))
    with pytest.raises(ValueError, match="sdpa must be one of auto, flash, math on a CPU, got 'cudnn'"):
        _stepper(small_config(tmp_path, sdpa="cudnn")).step(1)
    with pytest.raises(ValueError, match="memory_snapshot needs a CUDA GPU"):
        MemorySnapshot(tmp_path / "memory.pickle", torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device='cuda' needs a CUDA GPU"):
        _run(small_config(tmp_path, device="cuda"))
