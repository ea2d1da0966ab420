"""Patched models of transformers on the GPU, where the kernels run: against the unpatched model, on the same device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tiny import FAMILIES, WITHOUT_CHOICES, logits_and_gradients, tiny, token_ids

from mhckit.integrations.transformers import apply
from mhckit.testing import relative_error

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("across_layers", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family: str, across_layers: bool) -> None:
    model, ids = tiny(family, **WITHOUT_CHOICES).cuda(), token_ids().cuda()
    logits, gradients = logits_and_gradients(model, ids)
    patched_logits, patched = logits_and_gradients(apply(model, across_layers=across_layers), ids)
    assert relative_error(patched_logits, logits) < 1e-4
    for name, gradient in gradients.items():
        assert relative_error(patched[name], gradient) < 1e-3, name


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_training_lowers_the_loss(family: str) -> None:
    model = apply(tiny(family, own_initialisation=True).cuda().bfloat16()).train()
    ids = token_ids(batch=4).cuda()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
