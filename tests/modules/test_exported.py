"""One exported program for every number of tokens, and packages that run without the source of the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from exporting import DIM, EXPORTED_WITH, RUN_WITH, Network, check_in_another_process, exported, inputs

from mhckit.models import LanguageModel, ModelConfig


def test_one_program_for_every_number_of_tokens() -> None:
    network = Network()
    program = exported(network, torch.randn(*EXPORTED_WITH, DIM))
    called = {str(node.target) for node in program.graph.nodes if "mhckit" in str(node.target)}
    assert called == {f"mhckit.{name}_fwd.default" for name in ("expand", "enter", "junction", "post", "head")}
    for h in inputs(torch.float32, "cpu"):
        torch.testing.assert_close(program.module()(h), network(h), rtol=0, atol=0)


def test_a_language_model(tmp_path: Path) -> None:
    """Saved and loaded, too: a recipe is a string in the program."""
    model = LanguageModel(ModelConfig(vocab_size=64, dim=32, layers=2, heads=2, hidden=64, residual="deepseek_v41"))
    program = exported(model, torch.zeros(EXPORTED_WITH, dtype=torch.long))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for shape in RUN_WITH[:-1]:
        tokens = torch.randint(64, shape)
        torch.testing.assert_close(loaded(tokens), model(tokens))


def test_no_operator_takes_what_packages_hand_on_as_something_else() -> None:
    """Before torch 2.12 they give an operator another dtype, layout or memory format than it was compiled with."""
    schemas = [str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("mhckit::")]
    assert len(schemas) > 15
    for schema in schemas:
        assert not any(kind in schema for kind in ("ScalarType", "Layout", "MemoryFormat")), schema


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler, and there is no g++")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_package_runs_without_the_source(tmp_path: Path) -> None:
    check_in_another_process(Network(), torch.float32, "cpu", tmp_path)
