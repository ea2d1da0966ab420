"""Decoding steps of a patched model replayed on the same memory. Without a GPU something else stands for the graph:
tests/gpu/test_decoding_on_gpu.py has the graph itself.
"""

from __future__ import annotations

import pytest
import torch
from captured import captured
from decoding import COMPRESSED, SLIDING, WINDOW, PiecesOfAStep, WholeStep, decoded, decoding_model
from transformers import DynamicCache, StaticCache

from mhckit.integrations.transformers import apply
from mhckit.testing import relative_error

CPU = torch.device("cpu")


@pytest.mark.parametrize("across_layers", [False, True])
def test_a_static_cache_and_replays_give_what_a_dynamic_one_gives(across_layers: bool) -> None:
    model = decoding_model(**SLIDING)
    want = decoded(model)
    apply(model, across_layers=across_layers)
    assert relative_error(decoded(model, StaticCache(model.config, max_cache_len=WINDOW)), want) < 1e-5
    got = WholeStep(model).decoded()
    for token, (replayed, logits) in enumerate(zip(got, want, strict=True)):
        assert relative_error(replayed, logits) < 1e-5, token


def test_pieces_between_attentions_of_every_kind() -> None:
    model = decoding_model(**COMPRESSED)
    assert {*model.config.layer_types} == {"heavily_compressed_attention", "compressed_sparse_attention"}
    want = decoded(model)
    for token, (replayed, logits) in enumerate(zip(PiecesOfAStep(apply(model)).decoded(), want, strict=True)):
        assert relative_error(replayed, logits) < 1e-5, token


def test_compressed_attention_has_no_static_cache() -> None:
    """As docs/inference.md says of transformers. Should this fail, a whole step may be capturable."""
    model = apply(decoding_model(**COMPRESSED))
    with pytest.raises(KeyError, match="compressed"):
        StaticCache(model.config, max_cache_len=WINDOW)
    layer = DynamicCache(config=model.config).layers[0]
    assert not layer.is_compileable


def test_a_full_window_cannot_be_captured() -> None:
    """Nor is this mhckit's doing: then a sliding layer of the cache makes a tensor from the host's values."""
    whole = WholeStep(apply(decoding_model(**SLIDING)))
    whole.decoded()
    for layer in whole.cache.layers:
        layer.cumulative_length_int = WINDOW
    with torch.no_grad(), pytest.raises(RuntimeError, match="lift_fresh: not possible"):
        captured(whole.step, whole.rewind, CPU)


def test_what_the_host_takes_part_in_is_not_captured() -> None:
    """Experts one by one, and by what stands for a graph."""
    model = apply(decoding_model(**SLIDING))
    model.set_experts_implementation("eager")
    with pytest.raises(RuntimeError, match="not possible while a step is captured"):
        WholeStep(model).decoded()
    value, length = torch.ones(3), [1.0]

    def step() -> torch.Tensor:
        length[0] += 1
        return value * length[0]

    result, replay = captured(step, lambda: None, CPU)
    value.fill_(2)
    replay()
    assert result.tolist() == [4, 4, 4] and length == [2], "values are read anew, the host's part is as it was"
