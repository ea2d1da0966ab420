"""Every parameter of the modules in mhckit.compat is known to `param_groups`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

import mhckit
from mhckit.compat.liger import LigerMHC
from mhckit.compat.megatron import HyperConnectionModule
from mhckit.compat.mhc_cu import MHCLayer
from mhckit.compat.mhc_triton import HyperConnection

_CONFIG = SimpleNamespace(
    mhc_num_residual_streams=4,
    hidden_size=8,
    mhc_sinkhorn_iterations=5,
    mhc_init_gating_factor=0.01,
    sequence_parallel=False,
)
MODULES = {
    "liger": LigerMHC(nn.Identity(), hc=4, c=8),
    "megatron": HyperConnectionModule(_CONFIG, 1),
    "mhc_cu": MHCLayer(8),
    "mhc_cu, static": MHCLayer(8, use_dynamic_h=False),
    "mhc_triton": HyperConnection(8),
    "mhc_triton, separate": HyperConnection(8, use_fused_weights=False),
    "mhc_triton, static": HyperConnection(8, dynamic=False),
}


@pytest.mark.parametrize("name", MODULES)
def test_projections_decay_and_nothing_else(name: str) -> None:
    module = MODULES[name]
    groups = {group["name"]: group["params"] for group in mhckit.param_groups(nn.Sequential(module, nn.Linear(3, 3)))}
    assert [parameter.shape for parameter in groups["other"]] == [(3, 3)]
    width = 4 * 8
    assert all(width in parameter.shape for parameter in groups.get("mhc", []))
    assert not any(width in parameter.shape for parameter in groups["mhc_no_decay"])
    count = sum(len(groups.get(kind, [])) for kind in ("mhc", "mhc_no_decay"))
    assert count == len(list(module.parameters()))
