"""What compute-sanitizer watches: every operator once, on sizes that divide no tile. Run by test_sanitizer.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "kernels")]
from accuracy import run
from recipes import every_recipe

from mhckit.kernels import _launch, _write_project
from mhckit.testing import OPERATORS, Call, make_call

_launch.SLICE_WIDTH = 32  # several slices of few channels
torch.use_deterministic_algorithms(True)  # fills what is uninitialised with NaN
RECIPES = every_recipe()
for operator in OPERATORS:
    others = ("mhc_lite", "projection") if operator in ("junction", "enter", "sinkhorn") else ()
    for name in ("deepseek_v4", *others):
        for dtype in (torch.bfloat16, torch.float32):
            call = make_call(operator, RECIPES[name], lead=(19,), channels=69, dtype=dtype, device="cuda")
            results = run(call, "triton")
            assert not any(value.isnan().any() for value in results.values())
_launch.SLICE_WIDTH = 256
_write_project.fills = lambda programs, device: True  # F1's form for Hopper, where there is one
_write_project.leaves_idle = lambda programs, device: False
# Of 24 and of 32 rows; J has its form for Hopper where there is no bias, and other sums with a norm.
for name, without in (("deepseek_v41", "out_norm_weight"), ("deepseek_v4", ""), ("mhc_lite", "")):
    call = make_call("junction", RECIPES[name], lead=(99,), channels=640, dtype=torch.bfloat16, device="cuda")
    tensors = {key: tensor for key, tensor in call.tensors.items() if key not in ("f_bias", without)}
    results = run(Call("junction", call.recipe, tensors), "triton")
    assert not any(value.isnan().any() for value in results.values())
torch.cuda.synchronize()
print("every operator ran")
