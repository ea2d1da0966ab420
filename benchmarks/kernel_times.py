"""How long each kernel of an operator takes, beside the time its bytes take at the copy ceiling of the same run.

    make kernel-times

The operator runs once with the launches recorded; each launch is then repeated alone, with a cold L2 cache. Bytes are
those of the tensors a kernel is given, each counted once: what it must read and write at least.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.runtime.jit import JITFunction
from triton.testing import do_bench

from mhckit import Recipe
from mhckit.testing import make_call

SHAPES = ((8192, 4096), (16384, 2560), (4096, 7168), (4097, 5129))
OPERATORS = ("junction", "enter", "leave", "head")


def copy_ceiling() -> float:
    """Bytes per second of a large copy, read and written counted."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (do_bench(lambda: target.copy_(source), return_mode="median") * 1e-3)


def recorded_launches(run: Any) -> list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]]:
    launches = []
    original = JITFunction.run

    def record(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        launches.append((self, args, kwargs))
        return original(self, *args, **kwargs)

    JITFunction.run = record
    try:
        run()
    finally:
        JITFunction.run = original
    return launches


def measure(operator: str, recipe: Recipe, tokens: int, channels: int, ceiling: float) -> list[dict]:
    call = make_call(
        operator, recipe, lead=(tokens,), channels=channels, dtype=torch.bfloat16, device="cuda", optional=False
    ).requires_grad()

    def run() -> None:
        outputs = call()
        torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])

    lines = []
    for kernel, args, kwargs in recorded_launches(run):
        tensors = {t.data_ptr(): t.nbytes for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)}
        microseconds = do_bench(lambda k=kernel, a=args, kw=kwargs: k.run(*a, **kw), rep=50, return_mode="median") * 1e3
        moved = sum(tensors.values())
        lines.append(
            {
                "operator": operator,
                "kernel": kernel.__name__.strip("_").removesuffix("_kernel"),
                "tokens": tokens,
                "streams": recipe.streams,
                "channels": channels,
                "dtype": "bfloat16",
                "microseconds": round(microseconds, 2),
                "bytes": moved,
                "floor_microseconds": round(moved / ceiling * 1e6, 2),
                "of_ceiling": round(moved / ceiling * 1e6 / microseconds, 3),
            }
        )
    return lines


def main(
    output: Annotated[Path | None, typer.Option(help="Append JSON lines here.")] = None,
    commit: Annotated[str, typer.Option(help="The commit that is measured.")] = "unknown",
    recipe: str = "deepseek_v4",
) -> None:
    ceiling = copy_ceiling()
    facts = {
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "recipe": recipe,
        "copy_terabytes_per_second": round(ceiling * 1e-12, 3),
    }
    table = Table("operator", "tokens x C", "kernel", "us", "floor us", "of ceiling", box=None)
    cases = [(operator, shape) for shape in SHAPES for operator in OPERATORS]
    for operator, (tokens, channels) in track(cases, "measuring", console=Console(stderr=True)):
        for line in measure(operator, Recipe.preset(recipe), tokens, channels, ceiling):
            shown = (f"{line['microseconds']:.1f}", f"{line['floor_microseconds']:.1f}", f"{line['of_ceiling']:.0%}")
            table.add_row(operator, f"{tokens} x {channels}", line["kernel"], *shown)
            if output is not None:
                with output.open("a") as file:
                    file.write(json.dumps(facts | line) + "\n")
    Console(width=120).print(facts, table)


if __name__ == "__main__":
    typer.run(main)
