"""J for Hopper: as exact as the plain form, the same bits however programs share the channels, and where it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import PARAMETERS, assert_accurate, cotangents_of, poisoned_memory, run
from recipes import every_recipe
from torch import Tensor

from mhckit.bench.launches import device_events
from mhckit.kernels import _launcher, _streams_bwd
from mhckit.kernels._hopper_launch import chunk_width, has_hopper_forms
from mhckit.kernels._launch import cdiv
from mhckit.testing import Call, make_call

DEVICE = torch.device("cuda")
RECIPES = every_recipe()
pytestmark = pytest.mark.skipif(not has_hopper_forms(DEVICE), reason="a kernel for Hopper, of one version of Triton")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """The names and grids of the kernels that are launched from now on."""
    launches: list[tuple[str, tuple[int, ...]]] = []

    def observe(kernel: Any, grid: Any, args: Any, constants: Any) -> None:
        launches.append((kernel.__name__, grid))
        _launcher.run_now(kernel, grid, args, constants)

    monkeypatch.setattr(_launcher, "observer", observe)
    return launches


def _call(name: str, tokens: int, channels: int, *, without: tuple[str, ...] = ("f_bias",), **options: Any) -> Call:
    options = {"dtype": torch.bfloat16, "device": DEVICE, **options}
    call = make_call("junction", RECIPES[name], lead=(tokens,), channels=channels, **options)
    return Call("junction", call.recipe, {key: t for key, t in call.tensors.items() if key not in without})


def _grid(launches: list[tuple[str, tuple[int, ...]]]) -> tuple[int, ...] | None:
    """Of the last J, if that was the one for Hopper."""
    name, grid = next(launch for launch in reversed(launches) if launch[0].startswith("streams_bwd"))
    return grid if name == "streams_bwd_hopper_kernel" else None


@pytest.mark.parametrize(("name", "without"), [
    ("deepseek_v4", ("f_bias",)),  # a norm, and a weight folded into phi
    ("deepseek_v4", ("f_bias", "out_norm_weight")),
    ("deepseek_v41", ("f_bias", "out_norm_weight")),  # sums the gradient of the read weights, too
    ("deepseek_v41", ("f_bias",)),
    ("hy_v4", ("f_bias",)),  # keeps every stream as it is
    ("hy_v4", ("f_bias", "out_norm_weight")),
    ("projection", ("f_bias", "norm_weight")),
    ("mhc_lite", ("f_bias",)),  # 32 rows of phi
    ("mhc_lite", ("f_bias", "out_norm_weight")),
])  # fmt: skip
@pytest.mark.parametrize(("tokens", "channels"), [(33, 384), (200, 384), (77, 385)])
def test_every_kind_of_recipe(
    name: str, without: tuple[str, ...], tokens: int, channels: int, launched: list[Any]
) -> None:
    """A group that is hardly there, several programs of which the last has one that is not full, and rows that begin
    anywhere.
    """
    _assert_accurate(
        _call(name, tokens, channels, without=without), launched, used=(name, channels) != ("mhc_lite", 385)
    )


@pytest.mark.parametrize(("tokens", "channels"), [
    (1, 128), (95, 1152), (64, 2176), (1, 129), (33, 130), (70, 132), (65, 255), (66, 367), (95, 1153), (64, 2559),
])  # fmt: skip
def test_sizes(tokens: int, channels: int, launched: list[Any]) -> None:
    """One step of one token, one sum over channels of many steps, and two, of which the second is shorter; the same
    where rows begin anywhere, at every second place, and at every fourth.
    """
    _assert_accurate(_call("deepseek_v4", tokens, channels), launched)


def _assert_accurate(call: Call, launched: list[Any], *, used: bool = True) -> None:
    with poisoned_memory():
        assert_accurate(call)
    assert (_grid(launched) is not None) == used


def _assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in want.items():
        assert not value.isnan().any(), name
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("channels", [2176, 4096, 9088, 2559, 5129])
def test_however_programs_share_the_channels(
    channels: int, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last sum is shorter than the others, but for 4096 channels."""
    call = _call("deepseek_v41", 130, channels, without=("f_bias", "out_norm_weight"))
    width, results = chunk_width(channels), []
    assert cdiv(channels, width) > 1
    for sums in (1, 2, cdiv(channels, width)):
        monkeypatch.setattr(_streams_bwd._hopper, "chunks_span", lambda *_args, sums=sums: sums * width)
        results.append(run(call, "triton"))
        assert _grid(launched) == (3, cdiv(channels, sums * width))
    _assert_same(results[1], results[0])
    _assert_same(results[2], results[0])


@pytest.mark.parametrize("channels", [1280, 1281])
def test_many_programs_and_many_times(channels: int) -> None:
    """Waves of programs, the last one partly there; warps that wait for each other never mix up two steps."""
    call = _call("deepseek_v4", 20_001, channels, draw_on=DEVICE)
    want = run(call, "triton")
    with torch.no_grad():
        outputs = call()
    kernels = [event.name for event in device_events(lambda: run(call, "triton", cotangents_of(outputs)))]
    assert "streams_bwd_hopper_kernel" in kernels
    for _ in range(20):
        _assert_same(run(call, "triton"), want)


@pytest.mark.parametrize(("name", "without"), [
    ("deepseek_v4", ("f_bias",)),
    ("deepseek_v41", ("f_bias", "out_norm_weight")),
])  # fmt: skip
@pytest.mark.parametrize("channels", [2048, 2049])
def test_a_token_alone_and_in_a_batch(name: str, without: tuple[str, ...], channels: int, launched: list[Any]) -> None:
    """A program for each sum of a token's channels, and one for all of them."""
    tokens = 64 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    call = _call(name, tokens, channels, without=without, draw_on=DEVICE)
    cotangents = cotangents_of(call())
    batch = run(call, "triton", cotangents)
    assert _grid(launched) == (cdiv(tokens, 64), 1)
    for token in (0, 31, 32, 63, 64, tokens - 1):
        here = slice(token, token + 1)
        one = Call("junction", call.recipe, {k: t if k in PARAMETERS else t[here] for k, t in call.tensors.items()})
        alone = run(one, "triton", [cotangent[here] for cotangent in cotangents])
        assert _grid(launched) == (1, 2)
        for key, value in alone.items():
            if key.removeprefix("d") not in PARAMETERS:
                assert torch.equal(value[0], batch[key][token]), (key, token)


@pytest.mark.parametrize("channels", [256, 257])
def test_what_is_not_a_number_stays_with_its_token(channels: int, launched: list[Any]) -> None:
    call = _call("deepseek_v4", 70, channels, without=("f_bias", "out_norm_weight"))
    whole = run(call, "triton")
    assert _grid(launched) is not None
    call.tensors["f"][40, 7] = torch.nan
    broken = run(call, "triton")
    for name in ("dx", "df", "dmix_post", "dmix_res"):
        others = torch.arange(70, device=DEVICE) != 40
        assert torch.equal(broken[name][others], whole[name][others]) and broken[name][40].isnan().any(), name


@pytest.mark.parametrize(("name", "options", "used"), [
    ("deepseek_v4", {}, True),
    ("deepseek_v41", {}, True),
    ("hy_v4", {}, True),
    ("mhc_lite", {}, True),
    ("deepseek_v4", {"without": ()}, False),  # a bias of f
    ("deepseek_v4", {"channels": 192}, False),
    ("deepseek_v4", {"channels": 257}, True),
    ("mhc_lite", {"channels": 257}, False),  # 32 rows of phi have no room
    ("deepseek_v4", {"channels": 127}, False),
    ("deepseek_v4", {"dtype": torch.float16}, False),
    ("deepseek_v4", {"dtype": torch.float32}, False),
])  # fmt: skip
def test_where_it_is_used(name: str, options: dict[str, Any], used: bool, launched: list[Any]) -> None:
    options = {"channels": 256, **options}
    run(_call(name, 5, **options), "triton")
    assert (_grid(launched) is not None) == used


@pytest.mark.parametrize("kept", [(0,), (1,)])
def test_not_without_both_gradients(kept: tuple[int, ...], launched: list[Any]) -> None:
    """Of the streams, and of what was read."""
    call = _call("deepseek_v4", 5, 256).requires_grad()
    outputs = [call()[k] for k in kept]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    assert _grid(launched) is None


def test_no_tokens(launched: list[Any]) -> None:
    results = run(_call("deepseek_v4", 0, 256), "triton")
    assert _grid(launched) == (0, 1)
    assert results["dx"].shape == (0, 4, 256) and (results["dphi"] == 0).all()
