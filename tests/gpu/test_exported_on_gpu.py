"""A package that AOTInductor compiled for the GPU runs the kernels in a process without the source of the model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor
from exporting import DIM, EXPORTED_WITH, Network, check_in_another_process, exported, inputs
from torch.utils.cpp_extension import CUDA_HOME


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_program_for_every_number_of_tokens(dtype: torch.dtype) -> None:
    """The same kernels in the same order: the same bits."""
    network = Network().cuda()
    program = exported(network, torch.randn(*EXPORTED_WITH, DIM, dtype=dtype, device="cuda"))
    called = [node for node in program.graph.nodes if "mhckit" in str(node.target)]
    assert called and all(node.args[-1] == "triton" for node in called)
    for h in inputs(dtype, "cuda"):
        with torch.no_grad():
            assert torch.equal(program.module()(h), network(h)), tuple(h.shape)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A C++ compiler whose libraries can be loaded beside torch.

    One that links its own standard library into them makes packages that crash as they are loaded, in the regular
    expression that AOTInductor reads a device's name with.
    """
    configured = inductor.cpp.cxx[-1]
    for command in filter(None, (shutil.which(configured), shutil.which("g++"))):
        if _makes_libraries_for_torch(command, tmp_path):
            monkeypatch.setattr(inductor.cpp, "cxx", (None, command))
            return
    pytest.skip(f"AOTInductor needs a C++ compiler with torch's standard library; neither {configured} nor g++ is one")


def _makes_libraries_for_torch(command: str, folder: Path) -> bool:
    source, library = folder / "device.cpp", folder / "device.so"
    found = 'extern "C" bool found() { return std::regex_search("cuda:0", std::regex("[a-z]+:([0-9]+)")); }'
    source.write_text(f"#include <regex>\n{found}\n")
    built = subprocess.run([command, "-std=c++17", "-fPIC", "-shared", "-o", library, source])
    loaded = "import sys, ctypes, torch; sys.exit(not ctypes.CDLL(sys.argv[1]).found())"
    return built.returncode == 0 and subprocess.run([sys.executable, "-c", loaded, library]).returncode == 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_package_runs_without_the_source(
    dtype: torch.dtype, compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Toolkits keep the libcuda.so that packages are linked with in a folder of its own."""
    if CUDA_HOME is not None:
        folders = [str(path) for path in Path(CUDA_HOME).glob("lib*/stubs")]
        monkeypatch.setenv("LIBRARY_PATH", ":".join([*folders, os.environ.get("LIBRARY_PATH", "")]).strip(":"))
    check_in_another_process(Network().cuda(), dtype, "cuda", tmp_path)
