"""F1 and J on Hopper for eight streams: accuracy, the same bits however the work is shared, and where they are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import PARAMETERS, assert_accurate, cotangents_of, poisoned_memory, run
from recipes import every_recipe
from torch import Tensor

from mhckit.kernels import _launcher, _streams_bwd, _write_project
from mhckit.kernels._hopper_launch import chunk_width, has_hopper_forms
from mhckit.kernels._launch import cdiv
from mhckit.testing import Call, make_call

DEVICE = torch.device("cuda")
RECIPES = every_recipe()
F1, J = "write_project_eight_kernel", "streams_bwd_eight_kernel"
pytestmark = pytest.mark.skipif(not has_hopper_forms(DEVICE), reason="kernels for Hopper, of one version of Triton")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, ...]]:
    """The last grid of each kernel that is launched from now on."""
    grids: dict[str, tuple[int, ...]] = {}

    def observe(kernel: Any, grid: tuple[int, ...], args: Any, constants: Any) -> None:
        grids[kernel.__name__] = grid
        _launcher.run_now(kernel, grid, args, constants)

    monkeypatch.setattr(_launcher, "observer", observe)
    return grids


def _call(name: str, tokens: int, channels: int, *, without: tuple[str, ...] = ("f_bias",), **options: Any) -> Call:
    options = {"dtype": torch.bfloat16, "device": DEVICE, **options}
    call = make_call("junction", RECIPES[name].replace(streams=8), lead=(tokens,), channels=channels, **options)
    return Call("junction", call.recipe, {key: t for key, t in call.tensors.items() if key not in without})


def _assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in want.items():
        assert not value.isnan().any(), name
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(("name", "without"), [
    ("deepseek_v4", ("f_bias",)),  # a norm, and a weight folded into phi
    ("deepseek_v4", ("f_bias", "out_norm_weight")),
    ("deepseek_v41", ("f_bias",)),
    ("deepseek_v41", ("f_bias", "out_norm_weight")),  # sums the gradient of the read weights, too
    ("projection", ("f_bias", "norm_weight")),
    ("paper", ("f_bias", "out_norm_weight")),
])  # fmt: skip
@pytest.mark.parametrize(("tokens", "channels"), [(33, 384), (200, 384)])
def test_every_kind_of_recipe(
    name: str, without: tuple[str, ...], tokens: int, channels: int, launched: dict[str, tuple[int, ...]]
) -> None:
    """Half a program, and several of which the last is not full."""
    with poisoned_memory():
        assert_accurate(_call(name, tokens, channels, without=without))
    assert {F1, J} <= launched.keys()


@pytest.mark.parametrize(("tokens", "channels"), [(1, 128), (95, 1152), (64, 2176), (130, 4096), (7, 7168)])
def test_sizes(tokens: int, channels: int, launched: dict[str, tuple[int, ...]]) -> None:
    """One token, sums over channels that end early and on time, one slice and several."""
    with poisoned_memory():
        assert_accurate(_call("deepseek_v4", tokens, channels))
    assert launched[F1] == launched[J] == (cdiv(tokens, 64), cdiv(channels, chunk_width(channels)))


@pytest.mark.parametrize(("name", "options", "forms"), [
    ("deepseek_v4", {}, {F1, J}),
    ("deepseek_v4", {"without": ()}, {F1}),  # a bias of f
    ("deepseek_v4", {"channels": 192}, set()),
    ("deepseek_v4", {"dtype": torch.float16}, set()),
    ("hy_v4", {}, set()),  # keeps every stream as it is
])  # fmt: skip
def test_where_they_are_used(
    name: str, options: dict[str, Any], forms: set[str], launched: dict[str, tuple[int, ...]]
) -> None:
    with poisoned_memory():
        assert_accurate(_call(name, 5, **{"channels": 256, **options}))
    assert {F1, J} & launched.keys() == forms


@pytest.mark.parametrize("channels", [2176, 4096, 9088])
def test_however_programs_share_the_channels(
    channels: int, launched: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last sum is shorter than the others, but for 4096 channels."""
    call = _call("deepseek_v41", 130, channels, without=("f_bias", "out_norm_weight"))
    width, results = chunk_width(channels), []
    for sums in (1, 2, cdiv(channels, width)):
        for module in (_streams_bwd._eight, _write_project._eight):
            monkeypatch.setattr(module, "chunks_span", lambda *_args, sums=sums: sums * width)
        results.append(run(call, "triton"))
        assert launched[F1] == launched[J] == (3, cdiv(channels, sums * width))
    _assert_same(results[1], results[0])
    _assert_same(results[2], results[0])


def test_a_token_alone_and_in_a_batch() -> None:
    call = _call("deepseek_v4", 8192, 2048, draw_on=DEVICE)
    cotangents = cotangents_of(call())
    batch = run(call, "triton", cotangents)
    for token in (0, 7, 8, 63, 64, 8191):
        here = slice(token, token + 1)
        one = Call("junction", call.recipe, {k: t if k in PARAMETERS else t[here] for k, t in call.tensors.items()})
        for key, value in run(one, "triton", [cotangent[here] for cotangent in cotangents]).items():
            if key.removeprefix("d") not in PARAMETERS:
                assert torch.equal(value[0], batch[key][token]), (key, token)


def test_many_programs_and_many_times() -> None:
    """Waves of programs, the last one partly there; warps that wait for each other never mix up two steps."""
    call = _call("deepseek_v4", 20_001, 1280, draw_on=DEVICE)
    want = run(call, "triton")
    for _ in range(20):
        _assert_same(run(call, "triton"), want)


def test_what_is_not_a_number_stays_with_its_token() -> None:
    call = _call("deepseek_v4", 70, 256, without=("f_bias", "out_norm_weight"))
    whole = run(call, "triton")
    call.tensors["f"][40, 7] = torch.nan
    broken = run(call, "triton")
    others = torch.arange(70, device=DEVICE) != 40
    for name in ("dx", "df", "dmix_post", "dmix_res"):
        assert torch.equal(broken[name][others], whole[name][others]) and broken[name][40].isnan().any(), name


def test_no_tokens(launched: dict[str, tuple[int, ...]]) -> None:
    results = run(_call("deepseek_v4", 0, 256), "triton")
    assert launched[F1] == (0, 1) and launched[J] == (0, 1)
    assert results["dx"].shape == (0, 8, 256) and (results["dphi"] == 0).all()
