"""Warm-up: the kernels of a model, compiled before its first step or request."""

from __future__ import annotations

import importlib
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from mhckit.ops import _backend
from mhckit.ops._check import DTYPES, check_dtype
from mhckit.recipe import Recipe

from ._base import HyperModule
from ._chains import Chain, Kinds, find_chains, is_connection_or_head, run_chain
from .hyper_connection import HyperConnection
from .hyper_head import HyperHead


class Warmup(NamedTuple):
    """What a warm-up did. Kernels that were neither compiled nor loaded were there already."""

    kernels: int
    compiled: int
    loaded: int
    seconds: float

    def __str__(self) -> str:
        if not self.kernels:
            return "nothing to compile: the torch reference, or Triton's interpreter, runs"
        parts = f"{self.compiled} compiled, {self.loaded} loaded from disk"
        return f"{self.kernels} kernels in {self.seconds:.1f} s: {parts}"


_NOTHING = Warmup(0, 0, 0, 0.0)


def warmup(
    model: nn.Module | int,
    recipe: Recipe | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    norm: bool = False,
    sublayer_dtype: torch.dtype | None = None,
    f_bias_dtype: torch.dtype | None = None,
    training: bool = True,
    recompute: bool = False,
    device: torch.device | str | None = None,
    workers: int | None = None,
) -> Warmup:
    """Compile the kernels that a model will launch, many at a time, or load them from Triton's cache on disk.

        mhckit.warmup(model)                                            its HyperConnections and HyperHeads
        mhckit.warmup(4096, "deepseek_v4", dtype=torch.bfloat16)        any model of that width

    The first step or request then compiles nothing, whatever its number of tokens. Nothing is launched, and no
    parameter, gradient or random generator changes.

    Args:
        model: a model that reads Streams with HyperConnections, mhckit's own or those of a patched model of
            transformers; or C, the width of one.
        recipe: the math, "paper" by default; for a width alone, as a model brings its own.
        dtype: of the streams; by default that of the first parameter which is no connection's, bfloat16 for a width.
        norm: as in HyperConnection; for a width alone.
        sublayer_dtype: of what sublayers return, where they read another, as under autocast.
        f_bias_dtype: of the biases given to ``Streams.write``, where there are any.
        training: backward, too.
        recompute: what `mhckit.recompute` launches, too.
        device: a CUDA device; by default the model's, or the current one.
        workers: threads that compile, by default one per core, up to 8.

    Returns:
        How many kernels there are, how many of them were compiled or loaded, and in how many seconds; ``str`` makes a
        sentence of it. No kernels where none will run: with the reference, or with Triton's interpreter.
    """
    start = time.perf_counter()
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers must be a positive int, got {workers!r}")
    model = _as_model(model, recipe, norm)
    kinds = Kinds(
        _dtype_of_streams(model, dtype),
        None if sublayer_dtype is None else check_dtype("sublayer_dtype", sublayer_dtype, sublayer_dtype),
        None if f_bias_dtype is None else check_dtype("f_bias_dtype", f_bias_dtype, f_bias_dtype),
        training,
        recompute,
    )
    chains = find_chains(model)
    if not chains:
        raise ValueError("warmup found no HyperConnection in the model: give it the width and the recipe")
    if all(_runs_the_reference(chain) for chain in chains) or _is_interpreted():
        return _NOTHING
    counts = []
    for target, on_it in _by_device(chains, device).items():
        compiler = _compiler(target)
        launches = [launch for chain in on_it for launch in compiler.recorded(partial(run_chain, chain, kinds, target))]
        counts.append(compiler.compile_launches(launches, target, workers))
    kernels, compiled, loaded = map(sum, zip(*counts, strict=True))
    return Warmup(kernels, compiled, loaded, time.perf_counter() - start)


def _as_model(model: nn.Module | int, recipe: Recipe | str | None, norm: bool) -> nn.Module:
    if not isinstance(model, nn.Module):
        recipe = "paper" if recipe is None else recipe
        return nn.ModuleList(
            [HyperConnection(model, recipe, norm=norm, device="meta"), HyperHead(model, recipe, device="meta")]
        )
    if recipe is not None or norm:
        raise ValueError("recipe and norm go with a width: the connections of a model have their own")
    return model


def _dtype_of_streams(model: nn.Module, dtype: torch.dtype | None) -> torch.dtype:
    others = (
        parameter.dtype
        for module in model.modules()
        if not is_connection_or_head(module)
        for parameter in module.parameters(recurse=False)
        if parameter.dtype in DTYPES
    )
    return check_dtype("dtype", dtype, next(others, torch.bfloat16))


def _runs_the_reference(chain: Chain) -> bool:
    own = chain.connection.backend if isinstance(chain.connection, HyperModule) else None
    return (own or _backend._active) == "reference"


def _is_interpreted() -> bool:
    """Whether Triton was told to interpret kernels, and so never compiles them."""
    try:
        return bool(importlib.import_module("triton").knobs.runtime.interpret)
    except ImportError:
        return False


def _compiler(device: torch.device) -> Any:
    """What compiles, loaded like the kernels themselves: by name, when it is needed; raises where these cannot run."""
    try:
        importlib.import_module("mhckit.kernels._runtime").check(device)
        return importlib.import_module("mhckit.kernels._warmup")
    except ImportError as error:
        raise RuntimeError(
            f"the Triton kernels cannot be loaded: {error}; install Triton, or use mhckit.backend('reference')"
        ) from error


def _by_device(chains: list[Chain], device: torch.device | str | None) -> dict[torch.device, list[Chain]]:
    """Chains on the devices that they will run on: one that is not on a GPU yet, on the current one."""
    wanted = None if device is None else torch.device(device)
    if wanted is not None and wanted.type != "cuda":
        raise ValueError(f"device must be a CUDA device, for which kernels are compiled, got {str(wanted)!r}")
    if not torch.cuda.is_available():
        raise RuntimeError(
            "warmup compiles kernels for a CUDA GPU, and torch.cuda.is_available() is False; "
            "the torch reference, which runs elsewhere, needs no warm-up"
        )
    found: dict[torch.device, list[Chain]] = {}
    for chain in chains:
        target = chain.device if wanted is None else wanted
        if target.type != "cuda" or target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
        found.setdefault(target, []).append(chain)
    return found
