"""F1 for many tokens on Hopper beside F1 in plain Triton: the same bits, whatever is left out, and where it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import assert_nan_stays_in_its_token, run
from recipes import every_recipe
from torch import Tensor

from mhckit.bench.launches import device_events
from mhckit.kernels import _launch, _launcher, _write_project
from mhckit.kernels._hopper_launch import has_hopper_forms, hopper_slice_width
from mhckit.kernels._launch import slice_width
from mhckit.testing import Call, make_call

DEVICE = torch.device("cuda")
RECIPES = every_recipe()
pytestmark = pytest.mark.skipif(not has_hopper_forms(DEVICE), reason="a kernel for Hopper, of one version of Triton")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched from now on."""
    names: list[str] = []

    def observe(kernel: Any, grid: Any, args: Any, constants: Any) -> None:
        names.append(kernel.__name__)
        _launcher.run_now(kernel, grid, args, constants)

    monkeypatch.setattr(_launcher, "observer", observe)
    return names


@pytest.fixture
def in_form(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> Callable[..., list[Tensor]]:
    """What F1 writes, in one form or the other, with any number of tokens."""

    def write_project(hopper: bool, inputs: dict[str, Tensor | None], weights: Tensor | None) -> list[Tensor]:
        monkeypatch.setattr(_write_project, "fills", lambda programs, device: hopper)
        monkeypatch.setattr(_write_project, "leaves_idle", lambda programs, device: False)
        monkeypatch.setattr(
            _write_project, "write_project_span", lambda channels, programs, device: slice_width(channels)
        )
        x_in = None if weights is None else torch.full_like(inputs["f"], torch.nan)
        collapse = _write_project.Collapse(weights, x_in)
        y, projection = _write_project.write_project(**inputs, collapse=collapse)
        assert launched[-1] == ("write_project_hopper_kernel" if hopper else "write_project_kernel")
        return [y, projection.z, projection.squares, *(() if x_in is None else (x_in,))]

    return write_project


@pytest.fixture
def in_either_form(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> Callable[..., list[list[Tensor]]]:
    """What F1 writes on Hopper and in plain Triton, with its sums over all channels, where rows begin anywhere."""
    on_hopper = _write_project._hopper_form

    def write_project(inputs: dict[str, Tensor | None], weights: Tensor | None) -> list[list[Tensor]]:
        results = []
        for form, name in ((on_hopper, "write_project_hopper_kernel"), (lambda args: None, "write_project_kernel")):
            monkeypatch.setattr(_write_project, "_hopper_form", form)
            x_in = None if weights is None else torch.full_like(inputs["f"], torch.nan)
            y, projection = _write_project.write_project(**inputs, collapse=_write_project.Collapse(weights, x_in))
            assert launched[-1] == name
            sums = [projection.z.sum(0), projection.squares.sum(0)]
            results.append([y, *sums, *(() if x_in is None else (x_in,))])
        return results

    return write_project


def _inputs(tokens: int, channels: int, rows: int = 24, *, mixes: bool = True, optional: bool = False):
    torch.manual_seed(tokens + channels + rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE)

    inputs = dict(
        x=normal(tokens, 4, channels).bfloat16(),
        f=normal(tokens, channels).bfloat16(),
        f_bias=normal(channels) if optional else None,
        post=normal(tokens, 4),
        res=normal(tokens, 4, 4) if mixes else None,
        phi=normal(rows, 4 * channels) / 64,
        norm_weight=normal(4 * channels).bfloat16() if optional else None,
    )
    return inputs, normal(tokens, 4)


def _assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for name, here, there in zip(("y", "z", "squares", "x_in"), got, want, strict=False):
        assert not here.isnan().any(), name
        assert torch.equal(here, there), name


def _assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    (y, *sums), (plain_y, *plain_sums) = got, want
    _assert_same([y, *got[3:]], [plain_y, *want[3:]])
    for here, there in zip(sums[:2], plain_sums[:2], strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4 * there.abs().max().item())


@pytest.mark.parametrize("channels", [128, 384, 1024, 1152, 2560, 5120, 7168, 9088])
@pytest.mark.parametrize("tokens", [1, 31, 33, 64, 95, 200])
def test_sizes(tokens: int, channels: int, in_form: Callable[..., list[Tensor]]) -> None:
    """One sum and many, chains that end early and on time, one slice and several; tokens that fill no group."""
    inputs, weights = _inputs(tokens, channels)
    _assert_same(in_form(True, inputs, weights), in_form(False, inputs, weights))


@pytest.mark.parametrize("rows", [1, 8, 9, 20, 24, 25, 32])
@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("collapses", [True, False])
def test_options(rows: int, mixes: bool, optional: bool, collapses: bool, in_form: Callable[..., list[Tensor]]) -> None:
    inputs, weights = _inputs(130, 640, rows, mixes=mixes, optional=optional)
    weights = weights if collapses else None
    _assert_same(in_form(True, inputs, weights), in_form(False, inputs, weights))


@pytest.mark.parametrize("channels", [129, 130, 132, 255, 1001, 2559, 5129])
@pytest.mark.parametrize("tokens", [1, 31, 33, 64, 95, 200])
def test_rows_that_begin_anywhere(
    tokens: int, channels: int, in_either_form: Callable[..., list[list[Tensor]]]
) -> None:
    """The same bits of what is written; of the sums, which end elsewhere, about the same."""
    _assert_close(*in_either_form(*_inputs(tokens, channels)))


@pytest.mark.parametrize("rows", [1, 24, 25, 32])
@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("collapses", [True, False])
def test_options_where_rows_begin_anywhere(
    rows: int, mixes: bool, optional: bool, collapses: bool, in_either_form: Callable[..., list[list[Tensor]]]
) -> None:
    inputs, weights = _inputs(130, 641, rows, mixes=mixes, optional=optional)
    _assert_close(*in_either_form(inputs, weights if collapses else None))


def test_rows_that_begin_anywhere_many_times(in_either_form: Callable[..., list[list[Tensor]]]) -> None:
    inputs, weights = _inputs(20_001, 1281)
    first, plain = in_either_form(inputs, weights)
    _assert_close(first, plain)
    for _ in range(20):
        _assert_same(in_either_form(inputs, weights)[0], first)


@pytest.mark.parametrize("channels", [2559, 5129])
def test_parts_of_rows_that_begin_anywhere(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits however many programs share a slice."""
    drawn = dict(dtype=torch.bfloat16, device=DEVICE, draw_on=DEVICE)
    call = make_call("junction", RECIPES["deepseek_v4"], lead=(130,), channels=channels, **drawn)
    width, results = hopper_slice_width(channels), []
    monkeypatch.setattr(_launcher, "observer", _launcher.run_now)  # a repeated call would have the first one's parts
    for span in (width, 1920, 960):
        monkeypatch.setattr(_write_project, "write_project_span", lambda *_args, span=span: span)
        with torch.no_grad():
            results.append(call())
    for other in results[1:]:
        for here, there in zip(other, results[0], strict=True):
            assert not there.isnan().any() and torch.equal(here, there)


def test_many_programs_and_many_times(in_form: Callable[..., list[Tensor]]) -> None:
    """Waves of programs, the last one partly there; warps that wait for each other never mix up two steps."""
    inputs, weights = _inputs(20_001, 1280)
    want = in_form(False, inputs, weights)
    for _ in range(20):
        _assert_same(in_form(True, inputs, weights), want)


def test_pieces_of_phi_in_turn(in_form: Callable[..., list[Tensor]]) -> None:
    """32 rows leave room for three pieces, of which one waits for the multiplications of the step before."""
    inputs, weights = _inputs(20_001, 1280, 32)
    want = in_form(False, inputs, weights)
    for _ in range(10):
        _assert_same(in_form(True, inputs, weights), want)


def test_no_tokens(launched: list[str]) -> None:
    call = make_call("junction", RECIPES["deepseek_v4"], lead=(0,), channels=4096, dtype=torch.bfloat16, device=DEVICE)
    assert all(result.isfinite().all() for result in run(call, "triton").values())


def test_what_is_not_a_number_stays_with_its_token(in_form: Callable[..., list[Tensor]]) -> None:
    inputs, weights = _inputs(70, 256)
    inputs["x"][3, 1, 200] = torch.inf
    inputs["f"][40, 7] = torch.nan
    got, want = in_form(True, inputs, weights), in_form(False, inputs, weights)
    for here, there in zip(got, want, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0, equal_nan=True)


def _names(call: Any, launched: list[str]) -> list[str]:
    launched.clear()
    with torch.no_grad():
        call()
    return list(launched)


@pytest.mark.parametrize(("name", "dtype", "channels", "hopper"), [
    ("deepseek_v4", torch.bfloat16, 256, True),
    ("deepseek_v41", torch.bfloat16, 256, True),
    ("hy_v4", torch.bfloat16, 256, True),
    ("mhc_lite", torch.bfloat16, 256, True),
    ("deepseek_v4", torch.bfloat16, 192, False),
    ("deepseek_v4", torch.float16, 256, False),
    ("deepseek_v4", torch.float32, 256, False),
    ("deepseek_v4", torch.float16, 257, False),
])  # fmt: skip
def test_where_it_is_used(name: str, dtype: torch.dtype, channels: int, hopper: bool, launched: list[str]) -> None:
    multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for tokens, enough in ((64 * multiprocessors, True), (64 * multiprocessors // 2, False)):
        call = make_call("junction", RECIPES[name], lead=(tokens,), channels=channels, dtype=dtype, device=DEVICE)
        expected = "write_project_hopper_kernel" if hopper and enough else "write_project_kernel"
        assert _names(call, launched)[0] == expected


@pytest.mark.parametrize(("waves", "channels", "slots"), [
    (1.5, 4096, 2),  # so many programs per multiprocessor: three waves of halves
    (1.25, 4096, 4),
    (1.25, 2560, 3),
    (0.63, 6144, 6),  # three for each of two slices
    (0.25, 4096, 4),
    (0.25, 7168, 4),  # parts of 2048 and 1536 channels
])  # fmt: skip
def test_parts_of_a_slice(
    waves: float, channels: int, slots: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as without parts, and as with a program for every sum."""
    tokens = 64 * int(torch.cuda.get_device_properties(DEVICE).multi_processor_count * waves)
    seen: list[int] = []
    write_project_span = _write_project.write_project_span
    drawn = dict(dtype=torch.bfloat16, device=DEVICE, draw_on=DEVICE)
    call = make_call("junction", RECIPES["deepseek_v4"], lead=(tokens,), channels=channels, **drawn)

    def spy(*args: Any) -> int:
        span = write_project_span(*args)
        seen.append(_write_project._slots(channels, slice_width(channels), span))
        return span

    monkeypatch.setattr(_write_project, "write_project_span", spy)
    with torch.no_grad():
        in_parts = call()
        assert seen == [slots] and launched[0] == "write_project_hopper_kernel"
        monkeypatch.setattr(
            _write_project, "write_project_span", lambda channels, programs, device: slice_width(channels)
        )
        monkeypatch.setattr(_write_project, "fills", lambda programs, device: True)
        whole = call()
        monkeypatch.setattr(_write_project, "fills", lambda programs, device: False)
        monkeypatch.setattr(_write_project, "leaves_idle", lambda programs, device: True)
        spread = call()
    for name, here, there, elsewhere in zip(("x", "y", "pre", "post", "res"), in_parts, whole, spread, strict=False):
        assert not here.isnan().any(), name
        assert torch.equal(here, there) and torch.equal(here, elsewhere), name


def test_calls_are_repeated_and_captured() -> None:
    """As plans launch it, with pointers, and in a CUDA graph: as through Triton, on tensors of another call."""
    tokens = 64 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    options = dict(lead=(tokens,), channels=384, dtype=torch.bfloat16, device=DEVICE)
    first, other = (make_call("junction", RECIPES["deepseek_v41"], seed=seed, **options) for seed in (1, 2))
    run(first, "triton")
    repeated = run(other, "triton")
    with torch.no_grad():
        assert "write_project_hopper_kernel" in [event.name for event in device_events(other)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_write_project, "fills", lambda programs, device: False)
        patch.setattr(_launcher, "observer", _launcher.run_now)
        want = run(other, "triton")
    for name, value in want.items():
        assert torch.equal(value, repeated[name]), name
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = other()
    graph.replay()
    for value, result in zip(captured, other(), strict=True):
        assert torch.equal(value, result)


def test_a_new_number_of_tokens_compiles_nothing() -> None:
    """Both forms are compiled at the first launch of either."""
    options = dict(channels=896, dtype=torch.bfloat16, device=DEVICE)
    kernels = [_write_project.write_project_kernel, _write_project._hopper.write_project_hopper_kernel]

    def compiled() -> list[int]:
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    before = compiled()
    make_call("junction", RECIPES["deepseek_v4"], lead=(5,), **options)()
    after = compiled()
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1]
    for tokens in (64 * _launch.multiprocessors_of(DEVICE), 77):
        make_call("junction", RECIPES["deepseek_v4"], lead=(tokens,), **options)()
    assert compiled() == after


@pytest.mark.parametrize("channels", [256, 257, 5129, 5130])
def test_nan_stays_in_its_token(channels: int, launched: list[str]) -> None:
    """Where rows begin anywhere, a step's last places hold what follows its channels: the next token's row."""
    options = dict(lead=(70,), channels=channels, dtype=torch.bfloat16, device=DEVICE)
    call = make_call("junction", RECIPES["deepseek_v4"], **options)
    tensors = {name: tensor for name, tensor in call.tensors.items() if name != "f_bias"}
    assert_nan_stays_in_its_token(Call("junction", call.recipe, tensors), 40)
    assert "streams_bwd_hopper_kernel" in launched
    assert channels % 8 == 0 or "write_project_hopper_kernel" in launched
