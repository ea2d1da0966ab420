"""Sums over channels have the same bits whether one program adds them up or F2 does, for many programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from accuracy import assert_accurate
from recipes import every_recipe

import mhckit
from mhckit.kernels import _hopper_launch, _launch, _launcher, _read, _write_project
from mhckit.kernels._hopper_launch import hopper_slice_width, hopper_step, write_project_span
from mhckit.kernels._launch import slice_width
from mhckit.kernels._partial_sums import CHAIN, LEVELS, channels_of_part
from mhckit.testing import Call, make_call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = every_recipe()
FORMS = {"few tokens": True, "many tokens": False}
# Small, because the interpreter is slow; a chain is 8 sums.
SUM, SLICE = 64, 1280


@pytest.fixture
def small_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are made anew each time: a repeated call would repeat the form of the first."""
    for module in (_launch, _hopper_launch, _write_project):
        monkeypatch.setattr(module, "SUM_WIDTH", SUM)
    monkeypatch.setattr(_launch, "SLICE_WIDTH", SLICE)
    monkeypatch.setattr(_launcher, "observer", _launcher.run_now)


with_small_sums = pytest.mark.usefixtures("small_sums")


def _call(operator: str, name: str, channels: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    return make_call(operator, RECIPES[name], lead=(5,), channels=channels, dtype=dtype, device=DEVICE, optional=False)


def _outputs(call: Call, few: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, ...]:
    monkeypatch.setattr(_write_project, "leaves_idle", lambda programs, device: few)
    with torch.no_grad(), mhckit.backend("triton"):
        return call()


@with_small_sums
@pytest.mark.parametrize(
    ("operator", "name", "channels", "dtype"),
    [
        ("junction", "deepseek_v4", SUM + 24, torch.bfloat16),  # two sums
        ("junction", "deepseek_v41", 8 * SUM, torch.bfloat16),  # a whole chain
        ("junction", "mhc_lite", 8 * SUM + 24, torch.bfloat16),  # two chains, the second of one sum
        ("junction", "deepseek_v4", 3 * SUM + 8, torch.float32),
        ("junction", "deepseek_v4", 3 * SUM + 8, torch.float16),
        ("enter", "paper", 16 * SUM + 5, torch.bfloat16),  # three chains: a pair without a second
        ("head", "deepseek_v4", 32 * SUM + 24, torch.bfloat16),  # five: two pairs, and a chain without a second
        ("enter", "hy_v4", 2 * SLICE + 37, torch.bfloat16),  # two slices, of which the second is shorter
        ("coefficients", "deepseek_v4", 8 * SUM + 5, torch.bfloat16),
    ],
)
def test_the_forms_agree(
    operator: str, name: str, channels: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = _call(operator, name, channels, dtype)
    spread, alone = (_outputs(call, few, monkeypatch) for few in (True, False))
    for got, want in zip(spread, alone, strict=True):
        assert not want.isnan().any()
        assert torch.equal(got, want)


@with_small_sums
@pytest.mark.parametrize(("name", "channels", "span", "slots"), [
    ("deepseek_v4", 16 * SUM, 8 * SUM, 2),  # of a chain each
    ("deepseek_v41", 17 * SUM, 16 * SUM, 2),  # of two chains, and of a sum
    ("mhc_lite", 17 * SUM + 8, 8 * SUM, 3),  # a pair without a second
    ("deepseek_v4", 32 * SUM, 8 * SUM, 4),
    ("deepseek_v4", 38 * SUM, 16 * SUM, 3),  # the third without a second, as its chain is
    ("deepseek_v4", 38 * SUM, 32 * SUM, 2),  # of four chains, and of one
    ("deepseek_v4", 48 * SUM, 8 * SUM, 6),  # two slices of three chains
])  # fmt: skip
def test_parts_of_a_slice_agree_with_all_of_it(
    name: str, channels: int, span: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are those of programs on Hopper, added up here by the plain form."""
    call = _call("junction", name, channels)
    whole = _outputs(call, False, monkeypatch)
    launched: list[tuple[int, ...]] = []

    def observe(kernel: Any, grid: tuple[int, ...], args: Any, constants: Any) -> None:
        launched.append(grid)
        _launcher.run_now(kernel, grid, args, constants)

    monkeypatch.setattr(_launcher, "observer", observe)
    monkeypatch.setattr(_write_project, "_hopper", SimpleNamespace())
    monkeypatch.setattr(_write_project, "_hopper_form", _write_project._form)
    monkeypatch.setattr(_write_project, "fills", lambda programs, device: programs == slots)
    monkeypatch.setattr(_write_project, "write_project_span", lambda channels, programs, device: span)
    for few in (False, True):
        for got, want in zip(_outputs(call, few, monkeypatch), whole, strict=True):
            assert not want.isnan().any()
            assert torch.equal(got, want)
    assert [grid[1] for grid in launched if len(grid) == 2] == [slots, slots]
    launched.clear()
    monkeypatch.setattr(_write_project, "fills", lambda programs, device: programs > slots)
    _outputs(call, True, monkeypatch)
    assert launched[0][1] == -(-channels // SUM), "as with too few tokens even for parts"


@pytest.mark.parametrize(("tokens", "channels", "span"), [
    (8192, 4096, 4096),  # 128 programs for 132 multiprocessors
    (4096, 4096, 2048),  # 64, so in halves
    (2048, 4096, 1024),
    (12288, 4096, 2048),  # 1.5 waves are 3 of halves
    (4224, 2048, 1024),
    (6144, 2560, 2560),  # 96 programs: their larger parts would be no shorter than two waves of smaller ones
    (2048, 5000, 2048),  # 40 sums: a part of 4 chains and one of the fifth are no shorter
    (4096, 7168, 3584),  # two slices that are no multiple of a chain
    (2048, 7168, 2048),
    (1024, 7168, 1024),
    (2048, 6144, 2048),
    (4096, 5248, 2688),  # two slices of 2688 and 2560 channels
    (1024, 5248, 1024),
    (640, 6272, 2048),  # of 25 sums and of 24: four parts of 8 sums, and three
    (4000, 4992, 4096),
    (1, 128, 128),
    (0, 4096, 4096),
    (4097, 5129, 2640),  # steps of 120 channels, where rows begin anywhere
    (2048, 5129, 1920),
    (512, 4100, 1920),  # 35 steps: chains would be five parts
    (1, 129, 240),
])  # fmt: skip
def test_how_much_of_a_slice_a_program_takes(tokens: int, channels: int, span: int) -> None:
    assert write_project_span(channels, -(-tokens // 64), torch.device("cpu")) == span
    width = hopper_slice_width(channels)
    last = channels - (-(-channels // width) - 1) * width
    parts = -(-width // span)
    assert -(-last // span) == parts <= 4, "as many parts of every slice"
    assert _write_project._slots(channels, width, span) == -(-channels // width) * parts


@with_small_sums
@pytest.mark.parametrize("few", FORMS.values(), ids=list(FORMS))
def test_each_form_is_accurate(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two slices with three chains each."""
    monkeypatch.setattr(_write_project, "leaves_idle", lambda programs, device: few)
    assert_accurate(_call("coefficients", "deepseek_v4", 2 * SLICE + 24))


@with_small_sums
@pytest.mark.parametrize("few", FORMS.values(), ids=list(FORMS))
def test_slots(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot for each slice of channels, or for each sum."""
    monkeypatch.setattr(_write_project, "leaves_idle", lambda programs, device: few)
    call = _call("project", "paper", 2 * SLICE)
    x, phi = call.tensors["x"], call.tensors["phi"]
    projection = _write_project.project_partials(x, phi, None)
    sums = 2 * SLICE // SUM
    assert projection.z.shape[0] == (sums if few else 2)
    assert projection.together == (sums // 2 if few else 1)
    assert projection.many is few
    assert _write_project.project_partials(x, phi, None, many=False).z.shape[0] == 2


@with_small_sums
@pytest.mark.parametrize(("streams", "channels", "dtype", "ends_early"), [
    (4, 3 * SUM, torch.bfloat16, True),
    (4, 3 * SUM + 5, torch.bfloat16, False),
    (4, 3 * SUM + 5, torch.float32, True),
    (5, 3 * SUM, torch.bfloat16, False),
])  # fmt: skip
def test_where_sums_end_early(
    streams: int, channels: int, dtype: torch.dtype, ends_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where a program that writes has no registers for sums that are not added up."""
    monkeypatch.setattr(_write_project, "leaves_idle", lambda programs, device: True)
    recipe = RECIPES["deepseek_v4"].replace(streams=streams)
    call = make_call("junction", recipe, lead=(5,), channels=channels, dtype=dtype, device=DEVICE, optional=False)
    x, f, phi, post = (call.tensors[name] for name in ("x", "f", "phi", "mix_post"))
    _, projection = _write_project.write_project(x, f, None, post, None, phi, None)
    assert (projection.many, projection.z.shape[0]) == ((True, -(-channels // SUM)) if ends_early else (None, 1))
    assert _write_project.project_partials(x, phi, None).many is True, "without writing it has"


@with_small_sums
def test_one_sum_has_one_form() -> None:
    call = _call("project", "paper", SUM)
    projection = _write_project.project_partials(call.tensors["x"], call.tensors["phi"], None)
    assert projection.many is None
    assert projection.z.shape[0] == 1


@pytest.mark.parametrize("step", [None, 120])
@pytest.mark.parametrize("channels", [1, 37, 2559, 2560, 5119, 5120, 7168, 12288, 16384, 100_000])
def test_a_slice_is_no_longer_than_its_pairs(channels: int, step: int | None) -> None:
    width, step = slice_width(channels, step), step or _launch.SUM_WIDTH
    assert width % step == 0 and width >= min(channels, _launch.SLICE_WIDTH)
    assert width <= ((1 << LEVELS.value) - 1) * CHAIN.value * step


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("many", [True, False])
def test_forms(many: bool, early: bool) -> None:
    """What is compiled beside a launch is what the launch of the other form looks up: the order of options counts."""

    def constants(many: bool) -> dict[str, object]:
        return {"MANY": many, "EARLY": early, **({"launch_pdl": many} if early else {}), "num_warps": 4}

    forms = _launcher.forms(_read.read_kernel, (), constants(many))
    assert [form.kernel for form in forms] == [_read.read_kernel, _read.read_kernel]
    assert [list(form.constants.items()) for form in forms] == [list(constants(m).items()) for m in (many, not many)]


def test_kernels_of_one_form() -> None:
    alone = {"MANY": None, "EARLY": False}
    assert _launcher.forms(_read.read_kernel, (), alone) == [(_read.read_kernel, alone)]


@triton.jit
def _parts_kernel(result, span, WIDTH: tl.constexpr, C: tl.constexpr, MOST_PARTS: tl.constexpr):
    split = tl.program_id(1)
    bounds = channels_of_part(split, span, WIDTH, C, MOST_PARTS)
    tl.store(result + 2 * split, bounds[0])
    tl.store(result + 2 * split + 1, bounds[1])


@pytest.mark.parametrize("channels", [128, 129, 1281, 2560, 4096, 5129, 5248, 6144, 7168, 9999, 12288, 20480])
def test_programs_share_all_channels(channels: int) -> None:
    """Each once, in order, whatever the parts of a slice, and in whole steps."""
    step, width = hopper_step(channels), hopper_slice_width(channels)
    for programs in range(1, 160, 3):
        span = write_project_span(channels, programs, torch.device("cpu"))
        slots = _write_project._slots(channels, width, span)
        bounds = torch.full((slots, 2), -1, dtype=torch.int32, device=DEVICE)
        _parts_kernel[(1, slots)](bounds, span, width, channels, _hopper_launch.MAX_PARTS)
        begins, ends = bounds.T.tolist()
        assert begins == [0, *ends[:-1]] and ends[-1] == channels
        assert all(0 < end - begin <= span for begin, end in bounds.tolist())
        assert all(begin % step == 0 for begin in begins)
        assert span % 16 == 0, "or another kernel would be compiled for it"
        assert set(range(0, channels, width)) <= set(begins), "a slice begins where a part does"
