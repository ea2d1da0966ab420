"""A package that AOTInductor compiled for the GPU runs the kernels in a process without the source of the model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
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


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler, and there is no g++")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_package_runs_without_the_source(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Toolkits keep the libcuda.so that packages are linked with in a folder of its own."""
    if CUDA_HOME is not None:
        folders = [str(path) for path in Path(CUDA_HOME).glob("lib*/stubs")]
        monkeypatch.setenv("LIBRARY_PATH", ":".join([*folders, os.environ.get("LIBRARY_PATH", "")]).strip(":"))
    check_in_another_process(Network().cuda(), dtype, "cuda", tmp_path)
