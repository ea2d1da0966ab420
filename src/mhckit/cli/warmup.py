"""`mhckit warmup`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .errors import need_a_gpu
from .root import app, examples
from .screen import watcher


class Dtype(str, Enum):
    """Of the streams."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def _recipes(incomplete: str) -> list[str]:
    from mhckit import Recipe

    return [name for name in Recipe.presets() if name.startswith(incomplete)]


@app.command(
    short_help="Compile kernels ahead, into a folder that can be shipped.",
    epilog=examples(
        "mhckit warmup --dim 4096 --recipe deepseek_v4",
        "mhckit warmup --dim 4096 --recipe deepseek_v4 --norm --inference --cache kernels",
    ),
)
def warmup(
    dim: Annotated[int, typer.Option(help="C, the width of the model.", min=1, show_default=False)],
    recipe: Annotated[str, typer.Option(help="The math: a preset of Recipe.", autocompletion=_recipes)] = "paper",
    streams: Annotated[
        int | None, typer.Option(help="N, how many streams.", min=1, show_default="the preset's")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the streams.")] = Dtype.bfloat16,
    norm: Annotated[bool, typer.Option("--norm", help="Reads end with an RMSNorm, as with norm=True.")] = False,
    inference: Annotated[bool, typer.Option("--inference", help="Forward alone.")] = False,
    recompute: Annotated[bool, typer.Option("--recompute", help="What mhckit.recompute launches, too.")] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for everything that is compiled.", show_default="Triton's own")
    ] = None,
) -> None:
    """Compile the kernels of any model of a width, side by side, or load them from disk. Needs a CUDA GPU.

    For a model in Python, `mhckit.warmup(model)` does the same. With --cache, everything that a process with such a
    model needs lies in one folder: set TRITON_CACHE_DIR to it, and nothing is compiled again.
    """
    need_a_gpu("mhckit warmup")
    import torch

    import mhckit
    from mhckit.doctor.triton_here import knobs

    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        knobs().cache.dir = str(cache.resolve())
    chosen = mhckit.Recipe.preset(recipe, **({} if streams is None else {"streams": streams}))
    with watcher().status("compiling"):
        warmed = mhckit.warmup(
            dim, chosen, dtype=getattr(torch, dtype.value), norm=norm, training=not inference, recompute=recompute
        )
    print(warmed)
    if cache is not None:
        print(cache)
