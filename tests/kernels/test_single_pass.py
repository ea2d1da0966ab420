"""A shifted junction without a norm: F1 reads what it writes, and J sums the gradient of the read weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from accuracy import assert_accurate, run

from mhckit import Recipe
from mhckit.kernels import _launch, _launcher
from mhckit.testing import Call, make_call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _call(channels: int = 37, dtype: torch.dtype = torch.bfloat16, *, optional: bool = True, **recipe) -> Call:
    """All options, or none; but never a norm of x_in."""
    call = make_call(
        "junction", Recipe.preset("deepseek_v41", **recipe), lead=(19,), channels=channels, dtype=dtype, device=DEVICE,
        optional=optional,
    )  # fmt: skip
    tensors = {name: tensor for name, tensor in call.tensors.items() if name != "out_norm_weight"}
    return dataclasses.replace(call, tensors=tensors)


@pytest.mark.parametrize(
    ("channels", "dtype", "recipe"),
    [
        (37, torch.bfloat16, {}),
        (136, torch.bfloat16, {}),
        (40, torch.float32, {}),
        (40, torch.float16, {}),
        (37, torch.bfloat16, {"residual": "identity"}),
        (40, torch.bfloat16, {"dynamic": False}),
        (37, torch.bfloat16, {"residual": "identity", "dynamic": False}),
        (40, torch.bfloat16, {"residual": "permutation"}),
        (40, torch.bfloat16, {"streams": 1}),
        (40, torch.bfloat16, {"streams": 3}),
        (40, torch.bfloat16, {"streams": 8}),
    ],
)
def test_accuracy(channels: int, dtype: torch.dtype, recipe: dict) -> None:
    assert_accurate(_call(channels, dtype, **recipe))


def test_without_optional_arguments() -> None:
    assert_accurate(_call(optional=False))


def test_several_slices_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the read weights is then left in slices, as those of post and of the residual map are."""
    channels = 5128
    if DEVICE == "cpu":
        monkeypatch.setattr(_launch, "SLICE_WIDTH", 64)
        channels = 170
    assert_accurate(_call(channels))


def test_x_in_has_the_bits_of_two_passes() -> None:
    """A token's x_in is the same number whichever kernel collapses the streams."""
    call = _call(136)
    got = run(call, "triton")
    y, x_in = got["output 0"], got["output 1"]
    pre = call.tensors["mix_pre"]
    alone = make_call("pre", call.recipe, lead=(19,), channels=136, dtype=torch.bfloat16, device=DEVICE, optional=False)
    alone = dataclasses.replace(alone, tensors=alone.tensors | {"x": y.detach(), "pre": pre})
    assert torch.equal(run(alone, "triton")["output 0"], x_in)


@pytest.mark.parametrize("norm", [True, False])
def test_what_reads_the_streams(norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a norm neither F2 nor B is given the streams, and no launch is added."""
    call = _call(40)
    if norm:
        weight = torch.ones(40, device=DEVICE)
        call = dataclasses.replace(call, tensors=call.tensors | {"out_norm_weight": weight})
    launched: dict[str, dict[str, object]] = {}

    def observe(kernel, grid, args, constants) -> None:
        launched[kernel.__name__] = dict(zip(kernel.arg_names, args, strict=False)) | constants
        _launcher.run_now(kernel, grid, args, constants)

    monkeypatch.setattr(_launcher, "observer", observe)
    run(call, "triton")
    assert len(launched) == 6
    assert (launched["write_project_kernel"]["x_in"] is None) == norm
    assert (launched["streams_bwd_kernel"]["dread_weights"] is None) == norm
    for name in ("read_kernel", "read_bwd_kernel"):
        assert launched[name]["WEIGHTS"] == ("given" if norm else "none")
