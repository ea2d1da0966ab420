"""What compute-sanitizer watches, on sizes that divide no tile: every operator once, or the kernels for Hopper. Run by
test_sanitizer.py with the name of either.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "kernels")]
from accuracy import run
from recipes import every_recipe

from mhckit.kernels import _launch, _write_project
from mhckit.testing import OPERATORS, Call, make_call

RECIPES = every_recipe()


def every_operator() -> Iterator[Call]:
    """Tokens are a multiple of 8: rows that begin anywhere are loaded in 16 bytes or in words, and end there then."""
    _launch.SLICE_WIDTH = 32  # several slices of few channels
    for operator in OPERATORS:
        others = ("mhc_lite", "projection") if operator in ("junction", "enter", "sinkhorn") else ()
        for name in ("deepseek_v4", *others):
            for dtype in (torch.bfloat16, torch.float32):
                yield make_call(operator, RECIPES[name], lead=(24,), channels=69, dtype=dtype, device="cuda")
    yield make_call("head", RECIPES["deepseek_v4"], lead=(24,), channels=261, dtype=torch.bfloat16, device="cuda")


def forms_for_hopper() -> Iterator[Call]:
    """Of 24 and of 32 rows, and of eight streams; J has its form where there is no bias, and other sums with a norm.
    Rows that begin anywhere are loaded 16 bytes at a time, and end there if tokens are a multiple of 8.
    """
    _launch.SLICE_WIDTH = 256
    _write_project.fills = lambda programs, device: True
    _write_project.leaves_idle = lambda programs, device: False
    for name, streams, without, tokens, channels in (
        ("deepseek_v41", 4, "out_norm_weight", 99, 640),
        ("deepseek_v4", 4, "", 99, 640),
        ("mhc_lite", 4, "", 99, 640),
        ("deepseek_v41", 4, "out_norm_weight", 104, 641),
        ("mhc_lite", 4, "", 104, 644),
        ("deepseek_v41", 8, "out_norm_weight", 99, 640),
        ("deepseek_v4", 8, "", 99, 640),
    ):
        recipe, options = RECIPES[name].replace(streams=streams), dict(dtype=torch.bfloat16, device="cuda")
        call = make_call("junction", recipe, lead=(tokens,), channels=channels, **options)
        tensors = {key: tensor for key, tensor in call.tensors.items() if key not in ("f_bias", without)}
        yield Call("junction", recipe, tensors)


torch.use_deterministic_algorithms(True)  # fills what is uninitialised with NaN
for call in {"every_operator": every_operator, "forms_for_hopper": forms_for_hopper}[sys.argv[1]]():
    results = run(call, "triton")
    tokens = {name: value.isnan().nonzero()[:, :1].unique().tolist() for name, value in results.items()}
    assert not any(tokens.values()), f"NaN in {call.operator}, at these tokens or rows: {tokens}"
torch.cuda.synchronize()
print("all of it ran")
