"""What is installed, set and chosen: each finding as it should be, and red for what it looks for."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

import mhckit
from mhckit.bench.results import read_lines
from mhckit.doctor import gpu as gpu_module
from mhckit.doctor import settings, triton_here, versions
from mhckit.doctor.gpu import GIB, Gpu, gpu_finding
from mhckit.doctor.paths import INTERPRETER, KERNELS, RAISES, REFERENCE, path_finding, path_findings
from mhckit.doctor.triton_here import Triton, installed_triton, major_and_minor
from mhckit.doctor.versions import (
    compiler_finding,
    extras_finding,
    host_code_finding,
    torch_finding,
    triton_finding,
)
from mhckit.testing import OPERATORS

ROOT = Path(__file__).parents[2]
GPU = Gpu("Sample GPU", (9, 0), free=100 * GIB, total=140 * GIB)
GOOD, OLD, NONE = Triton("3.6.0", "", True), Triton("3.2.0", "", False), Triton("", "ImportError: no", False)
STREAMS = torch.empty(1, 4, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.5.1", "failed"), ("2.6.0", "ok"), ("2.11.0+cu130", "ok"), ("2.13.0a0+git1", "ok"), ("2.14.0", "warning")],
)
def test_versions_of_torch(version: str, status: str) -> None:
    finding = torch_finding(version)
    assert finding.status == status and version in finding.seen
    assert bool(finding.advice) == (status != "ok")


def test_bounds_are_those_of_the_project() -> None:
    """The oldest in pyproject.toml; the newest tested in constraints.txt, the other where results were measured."""
    project, constraints = (ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text()
    assert f'"torch>={".".join(map(str, versions.OLDEST_TORCH))}"' in project
    assert f'"transformers>={".".join(map(str, versions.OLDEST_TRANSFORMERS))}"' in project
    (in_ci,) = re.findall(r"^torch==(.*)$", constraints, re.MULTILINE)
    measured = read_lines(ROOT / "benchmarks/results/junction.jsonl")[-1]["torch"]
    assert {major_and_minor(in_ci), major_and_minor(measured)} == set(versions.TESTED_TORCH)


@pytest.mark.parametrize(
    ("triton", "gpu", "status"),
    [
        (GOOD, GPU, "ok"),
        (GOOD, None, "ok"),
        (OLD, GPU, "failed"),
        (OLD, None, "warning"),
        (NONE, GPU, "failed"),
        (NONE, None, "skipped"),
    ],
)
def test_triton(triton: Triton, gpu: Gpu | None, status: str) -> None:
    finding = triton_finding(triton, gpu)
    assert finding.status == status
    assert ("install torch 2.10" in finding.advice) == (status in ("failed", "warning"))


def test_triton_as_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    assert installed_triton() == Triton(triton.__version__, "", True)
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert installed_triton() == Triton("3.5.1", "", False)
    assert not triton_here.is_interpreted()
    monkeypatch.setitem(sys.modules, "triton", None)
    version, problem, usable = installed_triton()
    assert not version and "triton" in problem and not usable


def test_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build = types.SimpleNamespace(cc=None)
    monkeypatch.setattr(versions, "knobs", lambda: types.SimpleNamespace(build=build))
    monkeypatch.setattr(versions.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", {"gcc": "/bin/gcc", "mycc": "/bin/mycc"}.get)
    assert compiler_finding(GOOD, None).status == compiler_finding(NONE, GPU).status == "skipped"
    without_headers = compiler_finding(GOOD, GPU)
    assert without_headers.status == "warning" and "python3-dev" in without_headers.advice
    (tmp_path / "Python.h").touch()
    assert (compiler_finding(GOOD, GPU).status, compiler_finding(GOOD, GPU).seen) == ("ok", "/bin/gcc")
    build.cc = "mycc"
    assert compiler_finding(GOOD, GPU).seen == "/bin/mycc"
    build.cc = "absent"
    assert compiler_finding(GOOD, GPU).status == "failed" and "CC is absent" in compiler_finding(GOOD, GPU).seen
    build.cc = None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compiler_finding(GOOD, GPU).status == "failed" and "install gcc" in compiler_finding(GOOD, GPU).advice


class _Library:
    problem = "no C++ compiler\nat all"
    compiled: object = None

    def module(self, *, wait: bool) -> object:
        assert wait
        return self.compiled


def test_host_code(monkeypatch: pytest.MonkeyPatch) -> None:
    native, library = importlib.import_module("mhckit.kernels._native"), _Library()
    monkeypatch.setattr(native, "library", lambda: library)
    monkeypatch.setattr(native, "KNOWS_LAUNCHES", True)
    assert host_code_finding(GOOD, None).status == host_code_finding(NONE, GPU).status == "skipped"
    without = host_code_finding(GOOD, GPU)
    assert (without.status, without.seen) == (
        "warning",
        "does not compile: no C++ compiler",
    ) and "g++" in without.advice
    library.compiled = object()
    assert (host_code_finding(GOOD, GPU).status, host_code_finding(GOOD, GPU).seen) == ("ok", "compiled")
    monkeypatch.setenv("MHCKIT_NATIVE", "0")
    assert host_code_finding(GOOD, GPU).status == "ok" and "in Python" in host_code_finding(GOOD, GPU).seen


def test_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict.fromkeys(versions.EXTRAS, "9.0")

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    assert extras_finding().status == "ok" and not extras_finding().advice
    found["transformers"] = "5.16.2"
    assert extras_finding().status == "warning" and "5.17" in extras_finding().advice
    del found["transformers"], found["tokenizers"]
    finding = extras_finding()
    assert finding.status == "ok" and finding.seen.endswith("; no transformers, tokenizers")
    assert "pip install 'mhckit[train,transformers]'" in finding.advice


def test_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_finding(GPU).status == "ok"
    assert gpu_finding(GPU).seen == "Sample GPU, compute capability 9.0, 100 of 140 GiB free"
    full = gpu_finding(Gpu("Sample GPU", (9, 0), free=GIB, total=140 * GIB, count=8))
    assert full.status == "warning" and "1 of 140 GiB free" in full.seen and "one of 8" in full.seen
    assert gpu_finding(Gpu("MI300", (9, 4), 100 * GIB, 190 * GIB, amd=True)).status == "warning"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert gpu_finding(None).status == "skipped"
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr(gpu_module.torch.version, "cuda", None)
    assert "build of torch with CUDA" in gpu_finding(None).advice
    monkeypatch.setattr(gpu_module.torch.version, "cuda", "13.0")
    assert gpu_finding(None).status == "warning" and gpu_finding(None).advice.endswith("CUDA 13.0")


@pytest.mark.parametrize(
    ("interpreted", "tunes", "gpu", "status"),
    [
        (False, False, GPU, "ok"),
        (False, False, None, "ok"),
        (True, False, None, "warning"),
        (True, False, GPU, "failed"),
        (False, True, GPU, "warning"),
        (False, True, None, "ok"),
    ],
)
def test_settings(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool, tunes: bool, gpu: Gpu | None, status: str
) -> None:
    autotune = types.SimpleNamespace(is_enabled=lambda: tunes)
    monkeypatch.setitem(sys.modules, "mhckit.kernels._autotune", autotune)
    monkeypatch.setattr(settings, "is_interpreted", lambda: interpreted)
    finding = settings.settings_finding(GOOD, gpu)
    assert finding.status == status
    assert ("TRITON_INTERPRET is set" in finding.seen) == interpreted
    assert ("MHCKIT_AUTOTUNE is set" in finding.seen) == (tunes and gpu is not None)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)


@pytest.mark.usefixtures("interpreted")
def test_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = path_finding("CPU tensors", STREAMS)
    assert finding.status == "ok" and finding.values == dict.fromkeys(OPERATORS, REFERENCE)
    assert finding.seen == "torch reference for all 11 operators: backend is 'auto' and x is bfloat16 on cpu"
    with mhckit.backend("triton"):
        assert path_finding("CPU tensors", STREAMS).values == dict.fromkeys(OPERATORS, INTERPRETER)
        monkeypatch.setattr("mhckit.doctor.paths.is_interpreted", lambda: False)
        assert path_finding("CPU tensors", STREAMS).values == dict.fromkeys(OPERATORS, KERNELS)
        assert path_finding("CPU tensors", STREAMS.double()).values == dict.fromkeys(OPERATORS, RAISES)


def test_a_path_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mhckit.kernels._runtime", None)
    with mhckit.backend("triton"):
        finding = path_finding("CUDA tensors", STREAMS)
    assert finding.status == "failed" and finding.values == dict.fromkeys(OPERATORS, RAISES)
    assert "mhckit.kernels._runtime" in finding.seen and "mhckit.backend('reference')" in finding.advice


def test_paths_without_a_gpu() -> None:
    cuda, cpu = path_findings(None)
    assert (cuda.name, cuda.status, cpu.name, cpu.status) == ("CUDA tensors", "skipped", "CPU tensors", "ok")
