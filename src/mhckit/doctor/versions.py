"""What is installed: versions that are too old, or newer than any that was tested; and what Triton compiles with."""

from __future__ import annotations

import importlib
import platform
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

import torch

import mhckit

from .findings import Finding
from .gpu import Gpu
from .triton_here import Triton, knobs, major_and_minor

OLDEST_TORCH = (2, 6)
TESTED_TORCH = ((2, 11), (2, 13))
OLDEST_TRANSFORMERS = (5, 17)
# What each optional library is for, as an extra of mhckit.
EXTRAS = {
    "transformers": "transformers",
    "matplotlib": "viz",
    "pyyaml": "train",
    "safetensors": "train",
    "tensorboard": "train",
    "tokenizers": "train",
}


def mhckit_finding() -> Finding:
    seen = f"{mhckit.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return Finding("mhckit", "ok", seen, values={"version": mhckit.__version__, "python": platform.python_version()})


def torch_finding(version: str = torch.__version__) -> Finding:
    numbers, values = major_and_minor(version), {"version": str(version)}
    tested = " and ".join(map(_dotted, TESTED_TORCH))
    if numbers < OLDEST_TORCH:
        return Finding("torch", "failed", version, f"install torch {_dotted(OLDEST_TORCH)} or newer", values)
    if numbers > TESTED_TORCH[-1]:
        advice = f"newer than what was tested ({tested}): go by the self-test"
        return Finding("torch", "warning", version, advice, values)
    return Finding("torch", "ok", f"{version} (tested: {tested})", values=values)


def triton_finding(triton: Triton, gpu: Gpu | None) -> Finding:
    """Without a GPU nothing needs it."""
    values = {"version": triton.version or None}
    advice = "install torch 2.10 or newer, which brings Triton 3.6, or use mhckit.backend('reference')"
    if not triton.version:
        seen = f"not to be imported: {triton.problem}"
        return Finding("Triton", "skipped", seen, values=values) if gpu is None else _failed("Triton", seen, advice)
    if not triton.usable:
        seen = f"{triton.version}, too old for the kernels"
        return Finding("Triton", "warning", seen, advice, values) if gpu is None else _failed("Triton", seen, advice)
    return Finding("Triton", "ok", triton.version, values=values)


def compiler_finding(triton: Triton, gpu: Gpu | None) -> Finding:
    """Triton builds a small C extension for each kernel, with the compiler of CC, gcc or clang and Python's headers."""
    if gpu is None or not triton.usable:
        return Finding("C compiler", "skipped", "needed by Triton on a GPU alone")
    wanted: str | None = knobs().build.cc
    found = shutil.which(wanted) if wanted else shutil.which("gcc") or shutil.which("clang")
    if found is None:
        seen = f"CC is {wanted}, which is no program" if wanted else "neither gcc nor clang"
        return _failed("C compiler", seen, "install gcc, or set CC to a C compiler: Triton needs one")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        advice = "install Python's headers (python3-dev): Triton compiles with them"
        return Finding("C compiler", "warning", f"{found}, but there is no Python.h", advice)
    return Finding("C compiler", "ok", found)


def host_code_finding(triton: Triton, gpu: Gpu | None) -> Finding:
    """C++ for the host's share of eager calls, compiled once; without it Python does the same in twice the time."""
    if gpu is None or not triton.usable:
        return Finding("host code", "skipped", "C++ for eager calls, on a GPU alone")
    native = importlib.import_module("mhckit.kernels._native")
    if not native.is_wanted(torch.device("cuda")):
        return Finding("host code", "ok", "not used here: eager calls are made in Python")
    library = native.library()
    if library.module(wait=True) is not None:
        return Finding("host code", "ok", "compiled")
    seen = f"does not compile: {(library.problem.splitlines() or [''])[0]}"
    advice = "install g++, or set CXX to a C++ compiler; until then eager calls take the host twice as long"
    return Finding("host code", "warning", seen, advice)


def extras_finding() -> Finding:
    """For information: mhckit itself needs none of them."""
    found = {name: _version(name) for name in EXTRAS}
    absent = [name for name, version in found.items() if version is None]
    parts = [f"{name} {version}" for name, version in found.items() if version is not None]
    seen = ", ".join(parts) + ("; " if parts and absent else "") + (f"no {', '.join(absent)}" if absent else "")
    if found["transformers"] is not None and major_and_minor(found["transformers"]) < OLDEST_TRANSFORMERS:
        advice = f"mhckit.integrations needs transformers {_dotted(OLDEST_TRANSFORMERS)} or newer"
        return Finding("extras", "warning", seen, advice, found)
    wanted = ",".join(sorted({EXTRAS[name] for name in absent}))
    return Finding("extras", "ok", seen, f"for those: pip install 'mhckit[{wanted}]'" if absent else "", found)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _failed(name: str, seen: str, advice: str) -> Finding:
    return Finding(name, "failed", seen, advice)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
