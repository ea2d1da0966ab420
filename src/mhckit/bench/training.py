"""A whole training step of a language model, with each residual connection: what mHC costs end to end.

Everything is bfloat16 but the parameters of connections, which are float32; AdamW, fused; blocks compiled. With
recompute the sublayers are compiled instead, since its reads are not.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mhckit import HyperConnection, Mix, Recipe, Streams, param_groups
from mhckit.models import MODEL_PRESETS, LanguageModel, ModelConfig
from mhckit.testing import relative_error

from .baselines import plain_read, plain_write
from .launches import device_events
from .results import Line, append_lines
from .timing import environment

RECIPE = "deepseek_v4"
WARM_UP = 3
STEPS = 6
# Variants take turns so often.
ROUNDS = 4
# How far the gradients of the connections' biases may be apart, in relative norm, of bfloat16 models that round in
# different places. The biases are far from their initial values, so that a matrix transposed is farther off.
TOLERANCE = 0.1
SPREAD = 1.0


@dataclass(frozen=True)
class TrainingCase:
    name: str
    config: ModelConfig
    batch: int
    positions: int

    @property
    def tokens(self) -> int:
        return self.batch * self.positions


WIDE = ModelConfig(vocab_size=32768, dim=4096, layers=20, heads=32, kv_heads=8, hidden=14336)
CASES = (
    TrainingCase("1b", MODEL_PRESETS["1b"], batch=4, positions=4096),
    TrainingCase("C 4096", WIDE, batch=2, positions=4096),
)


class UnfusedConnection(HyperConnection):
    """A HyperConnection as plain PyTorch: what torch.compile makes of it."""

    def forward(self, streams: Any) -> tuple[Tensor, Streams]:
        x = streams.x
        if streams.mix is not None:
            x = plain_write(x, streams.f, streams.mix.post, streams.mix.res)
        assert self.phi is not None and self.scale is not None
        h, pre, post, res = plain_read(
            x, self.phi, self.scale, self.bias, self.out_norm_weight, self.recipe, self.out_norm_eps
        )
        return h, Streams(x, Mix(pre, post, res))


@dataclass(frozen=True)
class Variant:
    name: str
    residual: str = RECIPE
    unfused: bool = False
    recompute: bool = False

    def build(self, config: ModelConfig, device: str = "cuda") -> LanguageModel:
        config = config.replace(residual=self.residual, dtype="bfloat16")
        model = LanguageModel(config, recompute=self.recompute, loss="fused", device=device)
        if self.unfused:
            for module in model.modules():
                if isinstance(module, HyperConnection):
                    module.__class__ = UnfusedConnection
        return model.to(torch.bfloat16)

    def compile(self, model: LanguageModel) -> None:
        for block in model.blocks:
            for module in (block.attn, block.mlp) if self.recompute else (block,):
                module.compile(dynamic=False)  # type: ignore[operator]


VARIANTS = (
    Variant("plain", residual="plain"),
    Variant("mhckit"),
    Variant("mhckit, recompute", recompute=True),
    Variant("unfused PyTorch", unfused=True),
)


@dataclass(frozen=True)
class Run:
    """A variant that is ready to be timed: what is known of it, the gradients that are compared, and its step."""

    variant: Variant
    line: Line
    gradients: Tensor
    step: Callable[[], object]


def measure(case: TrainingCase, variants: tuple[Variant, ...] = VARIANTS) -> Iterator[Line]:
    """A line per variant; one of mHC whose gradients are unlike those of the first is refused.

    A GPU at its power limit drifts by more than variants differ, so they take turns. The unfused one, for whose
    activations the memory is needed, comes alone.
    """
    expected: Tensor | None = None
    for group in (tuple(v for v in variants if not v.unfused), tuple(v for v in variants if v.unfused)):
        lines, expected = _measure_together(case, group, expected)
        _free()
        yield from lines


def _measure_together(
    case: TrainingCase, variants: tuple[Variant, ...], expected: Tensor | None
) -> tuple[list[Line], Tensor | None]:
    """Their lines, and the gradients that those of mHC must have: given, or the first ones."""
    runs, lines = _prepare_all(case, variants)
    times = _take_turns([run.step for run in runs])
    for run, milliseconds in zip(runs, times, strict=True):
        error = 0.0
        if run.variant.residual != "plain":
            expected = run.gradients if expected is None else expected
            error = distance(run.gradients, expected)
        if error < TOLERANCE:
            lines.append({"kind": "training", **run.line, **_speed(case, milliseconds)})
        else:
            lines.append({"kind": "refused", **run.line, "error": error})
    return lines, expected


def _prepare_all(case: TrainingCase, variants: tuple[Variant, ...]) -> tuple[list[Run], list[Line]]:
    """Those that fit into memory together, and a line for each that does not."""
    runs, too_large = [], []
    for variant in variants:
        try:
            runs.append(_prepare(case, variant))
        except torch.OutOfMemoryError:
            too_large.append({**_described(case, variant), "kind": "training", "absent": "out of memory"})
    return runs, too_large


def _take_turns(steps: list[Callable[[], object]]) -> list[float]:
    """Milliseconds of each step, the median over all rounds."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for step, of_step in zip(steps, times, strict=True):
            step()
            of_step += _step_milliseconds(step)
    return [statistics.median(of_step) for of_step in times]


def _speed(case: TrainingCase, milliseconds: float) -> Line:
    return {
        "milliseconds": round(milliseconds, 3),
        "tokens_per_second": round(1e3 * case.tokens / milliseconds),
        "rounds": ROUNDS,
    }


def spread_out(model: LanguageModel) -> None:
    """Connections away from their start, where streams are alike and matrices symmetric; the same for every variant."""
    generator = torch.Generator().manual_seed(0)
    for bias in _biases(model):
        bias.data.add_(torch.randn(bias.shape, generator=generator).to(bias), alpha=SPREAD)


def gradients_of(model: LanguageModel) -> Tensor:
    """Of the biases of all connections: [L, P], or nothing for the plain residual."""
    gradients = [bias.grad.cpu() for bias in _biases(model) if bias.grad is not None]
    return torch.stack(gradients) if gradients else torch.zeros(0)


def distance(gradients: Tensor, expected: Tensor) -> float:
    """The largest relative error of those for pre, post and H, which differ in size."""
    groups = Recipe.preset(RECIPE).groups
    pairs = zip(gradients.split(groups, 1), expected.split(groups, 1), strict=True)
    return max(relative_error(got, want) for got, want in pairs)


def _biases(model: LanguageModel) -> list[Tensor]:
    return [module.bias for module in model.modules() if isinstance(module, HyperConnection)]


def _prepare(case: TrainingCase, variant: Variant) -> Run:
    """Built, compiled, warm, and with all but its time measured. Memory is its own, whatever else there is."""
    before = torch.cuda.memory_allocated()
    model = variant.build(case.config)
    spread_out(model)
    variant.compile(model)
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-4, fused=True)
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randint(
        0, case.config.vocab_size, (case.batch, case.positions + 1), device="cuda", generator=generator
    )

    def forward() -> Tensor:
        return model(tokens[:, :-1], tokens[:, 1:])

    def step() -> Tensor:
        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    loss = forward()
    loss.backward()
    gradients = gradients_of(model)
    optimizer.zero_grad(set_to_none=True)
    for _ in range(WARM_UP):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    where = where_time_goes(step)
    line: Line = {
        **_described(case, variant),
        "peak_bytes": peak,
        "activation_bytes": _activation_bytes(forward),
        "loss": loss.item(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "where": where,
    }
    torch.cuda.empty_cache()
    return Run(variant, line, gradients, step)


def _step_milliseconds(step: Callable[[], object]) -> list[float]:
    """Of each of some steps, one after the other as a training loop runs them, without waiting for the GPU between."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]


def _activation_bytes(forward: Callable[[], Tensor]) -> int:
    """What a forward leaves for its backward."""
    before = torch.cuda.memory_allocated()
    loss = forward()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    del loss
    return held


# Kernels of mhckit that a model's step launches.
OWN_KERNELS = (
    "write_project_kernel",
    "write_project_hopper_kernel",
    "write_project_eight_kernel",
    "read_kernel",
    "read_bwd_kernel",
    "streams_bwd_kernel",
    "streams_bwd_hopper_kernel",
    "streams_bwd_eight_kernel",
    "chunk_sums_kernel",
    "finish_kernel",
    "pack_phi_kernel",
    "pack_dz_kernel",
    "broadcast_kernel",
)
# Parts of a step by what their kernels are called, the first that fits.
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mhckit", OWN_KERNELS),
    ("attention", ("flash", "fmha", "sdpa", "attention")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "splitk", "triton_tem")),
    ("optimizer", ("adam",)),
)
REST = "everything else"


def part_of(kernel: str) -> str:
    lowered = kernel.lower()
    return next((part for part, names in PARTS if any(name in lowered for name in names)), REST)


def where_time_goes(step: Callable[[], object]) -> dict[str, float]:
    """Milliseconds on the device by part."""
    parts = {part: 0.0 for part, _ in PARTS} | {REST: 0.0}
    for event in device_events(step):
        parts[part_of(event.name)] += event.microseconds / 1e3
    return {part: round(milliseconds, 3) for part, milliseconds in parts.items()}


def _free() -> None:
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _described(case: TrainingCase, variant: Variant) -> Line:
    config = case.config
    size = {"channels": config.dim, "layers": config.layers, "batch": case.batch, "positions": case.positions}
    return {"case": case.name, "variant": variant.name, **size}


def run_training(
    output: Path | None, commit: str, console: Console, cases: tuple[TrainingCase, ...] = CASES
) -> list[Line]:
    base, lines = environment(commit), []
    for case in cases:
        measured = []
        for line in measure(case):
            measured.append({**base, **line})
            console.print(f"{case.name}: {line['variant']}: {line.get('milliseconds', line.get('absent', 'refused'))}")
            if output is not None:
                append_lines(output, measured[-1:])
        console.print(overhead_table(measured))
        lines += measured
    return lines


def overhead_table(lines: list[Line]) -> Table:
    title = "{case}: {layers} layers, C {channels}, {batch} x {positions} tokens, a training step"
    table = Table(
        "residual", "ms", "tokens/s", "over plain", "peak GB", "activations GB", "over plain",
        title=title.format(**lines[0]), box=None,
    )  # fmt: skip
    plain = next((line for line in lines if line["variant"] == "plain" and "milliseconds" in line), None)
    for line in lines:
        if "milliseconds" not in line or line["kind"] == "refused":
            table.add_row(line["variant"], line.get("absent", "refused: other gradients"))
            continue
        over = f"{line['milliseconds'] / plain['milliseconds'] - 1:+.1%}" if plain else ""
        memory = f"{line['activation_bytes'] / plain['activation_bytes']:.2f}x" if plain else ""
        table.add_row(
            line["variant"],
            f"{line['milliseconds']:.1f}",
            str(line["tokens_per_second"]),
            over,
            f"{line['peak_bytes'] / 1e9:.1f}",
            f"{line['activation_bytes'] / 1e9:.2f}",
            memory,
        )
    return table
