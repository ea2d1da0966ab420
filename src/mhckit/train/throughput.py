"""How fast a step could be: FLOPs per token, and those that the device does per second."""

from __future__ import annotations

import torch

from mhckit.models import ModelConfig

# Dense bfloat16 FLOP/s of tensor cores, from the vendors' data sheets; the first name that is part of the device's.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Of forward and backward: 6 per weight that multiplies, and attention over half of the positions on average.

    Hyper-connections and recomputation count for nothing: they are what utilisation is lost to.
    """
    lookups = 0 if model.tied else model.vocab_size * model.dim
    return 6 * (model.parameters() - lookups) + 6 * model.layers * model.dim * seq_len


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """None where it is not known, or not that of the tensor cores' bfloat16."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)
