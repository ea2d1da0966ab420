"""Kernels as they are compiled for Hopper, run on an emulated GPU (`emulator`). test_emulated.py runs these commands;
`make emulate ARGS="accuracy junction deepseek_v41 --tokens 70 --channels 257 --without f_bias"` runs one by itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.pop("TRITON_INTERPRET", None)  # compile, even where tests interpret
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tools")]

import torch
import triton
import typer
from accuracy import PARAMETERS, assert_accurate, assert_nan_stays_in_its_token, cotangents_of, poisoned_memory, run
from emulator import gpu as emulator_gpu
from emulator.gpu import emulated
from emulator.ptx import parse
from recipes import every_recipe
from torch import Tensor

from mhckit import Recipe
from mhckit.kernels import _hopper_dz, _hopper_rows, _hopper_staged, _parameters_bwd, _write_project
from mhckit.kernels import _streams_bwd_eight as _eight_bwd
from mhckit.kernels import _streams_bwd_hopper as _hopper_bwd
from mhckit.kernels import _write_project_eight as _eight_fwd
from mhckit.kernels import _write_project_hopper as _hopper_fwd
from mhckit.kernels._hopper_launch import hopper_step
from mhckit.kernels._launch import cdiv, slice_width
from mhckit.testing import Call, make_call

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
RECIPES = every_recipe()
F1, J = _hopper_fwd.write_project_hopper_kernel.__name__, _hopper_bwd.streams_bwd_hopper_kernel.__name__
EIGHT_J = _eight_bwd.streams_bwd_eight_kernel.__name__


def unfenced(function: Any) -> Any:
    """The same but for its fences."""
    function._unsafe_update_src(function.src.replace("fence_async_shared()", "pass"))
    return function


def unmet(kernel: str) -> Callable[[str], Any]:
    """PTX to instructions, but for a kernel's barriers at which the warps of a group meet before one of them arrives
    elsewhere for all.
    """
    between = r"(?:(?!.*(?:shared|bar\.)).*\n)*?"
    meeting = rf"\tbar\.sync .*\n({between}\t@%p\d+ mbarrier\.arrive\.shared::cta)"

    def parse_without(text: str) -> Any:
        if f".entry {kernel}" in text:
            text, count = re.subn(meeting, r"\1", text)
            assert count > 0
        return parse(text)

    return parse_without


@triton.jit
def no_end(ASYNCHRONOUS):
    pass


@triton.jit
def nothing_cleared(stream_slots, row_slots, step, begin, C, N, STEP, SLOTS):
    pass


@triton.jit
def nothing_carried(tile, carried, ROWS, STEP):
    pass


@triton.jit
def no_ends(pieces, ends, first, C, N, TILES):
    pass


@triton.jit
def rows_in_order(r):
    return r // 2


@triton.jit
def as_it_was(a):
    return a


# What can be broken: where, by what it is replaced or how it is changed, in which operator and with how many channels.
BREAKS: dict[str, tuple[Any, str, Any, str, int]] = {
    "fence of y in F1": (_hopper_fwd, "_write", unfenced, "junction", 257),
    "fence of phi in F1": (_hopper_fwd, "_split_phi", unfenced, "junction", 257),
    "fence of barriers in F1": (_hopper_fwd, "write_project_hopper_kernel", unfenced, "junction", 257),
    "fence of J": (_hopper_bwd, "_compute", unfenced, "junction", 256),
    "fence of F1 for eight streams": (_eight_fwd, "_write", unfenced, "junction", 128),
    "fence of J for eight streams": (_eight_bwd, "_compute", unfenced, "junction", 128),
    "meetings of groups in F1": (emulator_gpu, "parse", unmet(F1), "junction", 257),
    "meetings of groups in J": (emulator_gpu, "parse", unmet(J), "junction", 257),
    "meetings of groups in J for eight streams": (emulator_gpu, "parse", unmet(EIGHT_J), "junction", 128),
    "matrices of J for eight streams": (_eight_bwd, "transposed", as_it_was, "junction", 128),
    "rows of dz in J": (_hopper_dz, "token_of_row", rows_in_order, "junction", 256),
    "rows of staged dz in J": (_hopper_staged, "token_of_dz_row", rows_in_order, "junction", 257),
    "ends of rows in F1": (_hopper_fwd, "clear_ends", nothing_cleared, "junction", 257),
    "ends of rows in J": (_hopper_bwd, "clear_ends", nothing_cleared, "junction", 257),
    "ends of steps in F1": (_hopper_rows, "_carry", nothing_carried, "junction", 257),
    "ends of phi in F1": (_hopper_fwd, "keep_ends", no_ends, "junction", 257),
    "ends of dots in F1": (_write_project, "end_dots", no_end, "coefficients", 256),
    "ends of dots in P": (_parameters_bwd, "end_dots", no_end, "junction", 256),
}


def call_of(operator: str, recipe: Recipe, tokens: int, channels: int, without: str, dtype: str = "bfloat16") -> Call:
    options: dict[str, Any] = dict(lead=(tokens,), channels=channels, dtype=getattr(torch, dtype), device="cpu")
    call, absent = make_call(operator, recipe, **options), without.split(",")
    return Call(operator, recipe, {name: tensor for name, tensor in call.tensors.items() if name not in absent})


@app.command()
def accuracy(
    operator: str,
    recipe: str,
    tokens: int = 70,
    channels: int = 257,
    without: Annotated[str, typer.Option(help="Optional arguments to leave out, separated by commas.")] = "",
    dtype: str = "bfloat16",
    streams: int = 4,
    many: Annotated[bool, typer.Option(help="F1 in the form that it has with many tokens.")] = False,
    seed: Annotated[int, typer.Option(help="Of the order in which warps take turns.")] = 0,
) -> None:
    """Outputs and gradients against the reference in float64; prints which kernels ran."""
    call = call_of(operator, RECIPES[recipe].replace(streams=streams), tokens, channels, without, dtype)
    if many:
        _write_project.fills = lambda programs, device: True
    with emulated(seed) as gpu, poisoned_memory():
        assert_accurate(call)
    print("\n".join(gpu.names))


@app.command()
def forms(tokens: int, channels: int, rows: int = 24) -> None:
    """F1 in its form for Hopper beside plain F1: the same bits of everything."""
    torch.manual_seed(tokens + channels)
    x, f = torch.randn(tokens, 4, channels).bfloat16(), torch.randn(tokens, channels).bfloat16()
    post, res, weights = torch.randn(tokens, 4), torch.randn(tokens, 4, 4), torch.randn(tokens, 4)
    phi = torch.randn(rows, 4 * channels) / 64
    _write_project.leaves_idle = lambda programs, device: False
    _write_project.write_project_span = lambda channels, programs, device: slice_width(channels)
    results: list[list[Tensor]] = []
    for hopper in (True, False):
        _write_project.fills = lambda programs, device, answer=hopper: answer
        with emulated() as gpu, poisoned_memory():
            collapse = _write_project.Collapse(weights, torch.empty_like(f))
            y, sums = _write_project.write_project(x, f, None, post, res, phi, None, collapse)
        assert gpu.names == [F1 if hopper else "write_project_kernel"]
        results.append([y, sums.z, sums.squares, collapse.x_in])
    for name, here, there in zip(("y", "z", "squares", "x_in"), *results, strict=True):
        assert not here.isnan().any(), name
        assert torch.equal(here, there), name


@app.command()
def shares(channels: int, streams: int = 4) -> None:
    """J has the same bits however programs share the channels, of which here each step has a sum of its own; with
    eight streams F1, too.
    """
    recipe = RECIPES["deepseek_v41"].replace(streams=streams)
    call = call_of("junction", recipe, 70, channels, "f_bias,out_norm_weight")
    width, results = hopper_step(channels), []
    forms = (_eight_fwd, _eight_bwd) if streams == 8 else (_hopper_bwd,)
    for form in forms:
        form.chunk_width = lambda channels: width
    for sums in (cdiv(channels, width), 2, 1):
        for form in forms:
            form.chunks_span = lambda *_args, sums=sums: sums * width
        with emulated() as gpu, poisoned_memory():
            results.append(run(call, "triton"))
        assert (EIGHT_J if streams == 8 else J) in gpu.names
    for name, value in results[0].items():
        assert not value.isnan().any(), name
        assert all(torch.equal(value, other[name]) for other in results[1:]), name


@app.command()
def alone(channels: int, streams: int = 4) -> None:
    """A token has the bits that it has in a batch, in both directions."""
    call = call_of("junction", RECIPES["deepseek_v4"].replace(streams=streams), 66, channels, "f_bias")
    with emulated() as gpu, poisoned_memory():
        cotangents = cotangents_of(call())
        batch = run(call, "triton", cotangents)
        for token in (0, 37, 65):
            here = slice(token, token + 1)
            one = Call("junction", call.recipe, {k: t if k in PARAMETERS else t[here] for k, t in call.tensors.items()})
            for name, value in run(one, "triton", [cotangent[here] for cotangent in cotangents]).items():
                if name.removeprefix("d") not in PARAMETERS:
                    assert torch.equal(value[0], batch[name][token]), (name, token)
    print("\n".join(gpu.names))


@app.command()
def strange(channels: int, streams: int = 4) -> None:
    """What is NaN in one token leaves the others as they are, in both directions."""
    call = call_of("junction", RECIPES["deepseek_v4"].replace(streams=streams), 35, channels, "f_bias")
    _write_project.fills = lambda programs, device: True
    with emulated() as gpu, poisoned_memory():
        assert_nan_stays_in_its_token(call, 16)
    print("\n".join(gpu.names))


@app.command()
def broken(what: Annotated[str, typer.Argument(help=", ".join(BREAKS))]) -> None:
    """A kernel that is broken on purpose; fails as it should."""
    module, name, change, operator, channels = BREAKS[what]
    setattr(module, name, change(getattr(module, name)) if change is unfenced else change)
    streams = 8 if "eight streams" in what else 4
    accuracy(operator, "deepseek_v4", 70, channels, "f_bias", streams=streams)


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
