"""Health of the models of transformers, once mhckit computes their hyper-connections."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs transformers, which `make` installs")

from tiny import tiny, token_ids

from mhckit.health import Health
from mhckit.integrations.transformers import apply


@pytest.mark.parametrize(("family", "sublayers"), [("deepseek_v4", 8), ("hy_v4", 6)])
def test_patched_models(family: str, sublayers: int) -> None:
    model = tiny(family)
    with pytest.raises(ValueError, match=r"mhckit\.integrations\.transformers\.apply"):
        Health(model)
    health = Health(apply(model))
    ids = token_ids()
    with health.sample():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert len(health.names) == sublayers and health.names[0].endswith("layers.0.attn_hc")
    metrics = health.metrics()
    assert metrics["health/phi_grad_norm"] > 0 and metrics["health/bias_grad_norm"] > 0
    # [in, out] with the sums over in normalised last: rows of H, [out, in].
    assert metrics["health/composite_gain_forward"] == pytest.approx(1, abs=1e-4)
    assert 1 <= metrics["health/composite_gain_backward"] < 1.1
    assert ("health/scale_res" in metrics) == (family == "deepseek_v4")
