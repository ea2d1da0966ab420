"""A decoding step of a patched DeepSeek-V4 in a CUDA graph, token by token against the model without one.

What transformers lets a graph hold, and what not: tests/integrations/decoding.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

pytest.importorskip("transformers")

from decoding import COMPRESSED, SLIDING, WINDOW, PiecesOfAStep, WholeStep, decoded, decoding_model
from transformers import StaticCache

import mhckit
from mhckit.integrations.transformers import apply
from mhckit.testing import relative_error

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of mhckit's kernels that are compiled from now on."""
    names: list[str] = []
    original = JITFunction._do_compile

    def compile_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.__name__)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "_do_compile", compile_and_note)
    return names


def _assert_alike(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    for token, (replayed, logits) in enumerate(zip(got, want, strict=True)):
        assert relative_error(replayed, logits) < tolerance, token


@pytest.mark.parametrize("across_layers", [False, True])
def test_a_whole_step_with_a_static_cache(across_layers: bool, compiled: list[str]) -> None:
    model = decoding_model(**SLIDING).cuda()
    unpatched = decoded(model)
    mhckit.warmup(apply(model, across_layers=across_layers), training=False)
    compiled.clear()
    replayed = WholeStep(model).decoded()
    assert compiled == [], "after the warm-up nothing is left to compile"
    _assert_alike(replayed, decoded(model, StaticCache(model.config, max_cache_len=WINDOW)), 1e-5)
    _assert_alike(replayed, unpatched, 1e-4)


def test_pieces_between_attentions_of_every_kind(compiled: list[str]) -> None:
    model = decoding_model(**COMPRESSED).cuda()
    unpatched = decoded(model)
    mhckit.warmup(apply(model), training=False)
    compiled.clear()
    replayed = PiecesOfAStep(model).decoded()
    assert compiled == [], "after the warm-up nothing is left to compile"
    _assert_alike(replayed, decoded(model), 1e-5)
    _assert_alike(replayed, unpatched, 1e-4)
