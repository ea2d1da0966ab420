"""What surrounds the kernels for Hopper: which launches have such a form, and how their tensors are described and
packed. They themselves run on a GPU (tests/gpu/test_hopper_form.py and test_streams_bwd_on_hopper.py) or an emulated
one (test_emulated.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mhckit.kernels import _descriptors, _launcher, _streams_bwd, _write_project
from mhckit.kernels._descriptors import described, describing, signature_of, tiled_arguments
from mhckit.kernels._gradients import Write
from mhckit.kernels._hopper_launch import (
    HAS_GLUON,
    chunk_width,
    chunks_span,
    fills,
    has_hopper_forms,
    hopper_step,
)
from mhckit.kernels._launch import SUM_WIDTH, phi_layout
from mhckit.kernels._pack import pack_phi

if not HAS_GLUON:
    pytest.skip("kernels for Hopper are written for one version of Triton", allow_module_level=True)
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia import driver
from triton.backends.nvidia.compiler import CUDABackend

from mhckit.kernels import _streams_bwd_eight, _streams_bwd_hopper, _write_project_eight
from mhckit.kernels import _write_project_hopper as hopper

CPU = torch.device("cpu")
KERNEL = hopper.write_project_hopper_kernel
EIGHT = _write_project_eight.write_project_eight_kernel


def _args(
    *, tokens: int = 5, streams: int = 4, channels: int = 256, rows: int = 24, dtype: torch.dtype = torch.bfloat16,
    collapses: bool = True, writes: bool = True, mixes: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    x, f = torch.zeros(tokens, streams, channels, dtype=dtype), torch.zeros(tokens, channels, dtype=dtype)
    phi, weights = torch.zeros(rows, streams * channels), torch.zeros(tokens, streams)
    x_in = torch.zeros_like(f) if collapses else None
    z, squares = torch.zeros(1, tokens, rows), torch.zeros(1, tokens)
    f, y = (f, torch.zeros_like(x)) if writes else (None, None)
    res = torch.zeros(tokens, streams, streams) if mixes else None
    return x, f, None, weights, res, phi, None, weights, y, x_in, z, squares, tokens, channels, channels, rows


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_write_project, _streams_bwd):
        monkeypatch.setattr(module, "has_hopper_forms", lambda device: True)


def test_both_forms_take_the_same_arguments() -> None:
    count = len(_args())
    assert KERNEL.arg_names[:count] == _write_project.write_project_kernel.arg_names[:count]
    assert KERNEL.arg_names[count:] == ["N", "WIDTH", "STEP"]
    assert EIGHT.arg_names == [*KERNEL.arg_names[:count], "CHUNK"]


def test_a_step_is_one_sum() -> None:
    assert hopper.PANELS.value * hopper.PANEL.value == SUM_WIDTH == hopper_step(256)


@pytest.mark.parametrize(("channels", "step"), [(5129, 120), (5130, 120), (5132, 120), (5136, 128)])
def test_a_step_where_rows_begin_anywhere(channels: int, step: int) -> None:
    """It fits into a slot beside the seven places before it, and begins at a 16-byte boundary if the row does."""
    assert hopper_step(channels) == step
    assert step % 8 == 0 and (channels % 8 == 0 or step + 7 < SUM_WIDTH)


@pytest.mark.parametrize(("change", "exists"), [
    ({}, True),
    ({"rows": 8}, True),
    ({"rows": 32}, True),
    ({"rows": 33}, False),
    ({"streams": 2}, False),
    ({"channels": 192}, False),
    ({"channels": 129}, True),
    ({"channels": 130, "rows": 32}, True),
    ({"channels": 127}, False),  # less than a step
    ({"channels": 136}, False),  # aligned, and no whole steps
    ({"dtype": torch.float16}, False),
    ({"writes": False}, False),
])  # fmt: skip
def test_which_launches_have_the_form(on_hopper: None, change: dict[str, Any], exists: bool) -> None:
    args = _args(**change)
    assert (_write_project._hopper_form(args) is not None) == exists
    own = _write_project._form(args)
    forms = _launcher.forms(own.kernel, args, own.constants)
    assert [form.kernel for form in forms] == [own.kernel, *([KERNEL] if exists else [])]


@pytest.mark.parametrize(("change", "exists"), [
    ({}, True),
    ({"rows": 79}, False),  # not those of all coefficients
    ({"channels": 192}, False),
    ({"channels": 257}, False),
    ({"mixes": False}, False),
    ({"streams": 7}, False),
    ({"dtype": torch.float16}, False),
])  # fmt: skip
def test_which_launches_have_the_form_for_eight_streams(
    on_hopper: None, change: dict[str, Any], exists: bool
) -> None:  # fmt: skip
    args = _args(**({"streams": 8, "rows": 80, "mixes": True} | change))
    assert _write_project._has_form_for_eight(args) == exists
    assert _write_project._hopper_form(args) is None


@pytest.mark.parametrize(("tokens", "grid"), [(0, (0, 1)), (1, (1, 4)), (4096, (64, 2)), (8192, (128, 1))])
def test_programs_share_the_channels_of_eight_streams(
    on_hopper: None, tokens: int, grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there are as many sums whatever the number of tokens."""
    launched: list[tuple[Any, tuple[int, ...], int]] = []
    monkeypatch.setattr(
        _write_project_eight, "run", lambda kernel, grid, *args, **_constants: launched.append((kernel, grid, args[13]))
    )
    x, f, _, post, res, phi, *_ = _args(tokens=tokens, streams=8, channels=4096, rows=80, mixes=True)
    _, projection = _write_project.write_project(x, f, None, post, res, phi, None)
    assert launched == [(EIGHT, grid, 4096 // grid[1])]
    assert projection.z.shape == (4, tokens, 80) and projection.squares.shape == (4, tokens)
    assert (projection.together, projection.many) == (1, None)


def test_mixed_dtypes_do_not(on_hopper: None) -> None:
    args = list(_args())
    for position, dtype in ((1, torch.float32), (5, torch.bfloat16), (9, torch.float32)):
        changed = [*args[:position], args[position].to(dtype), *args[position + 1 :]]
        assert _write_project._hopper_form(tuple(changed)) is None


def test_each_form_knows_the_other(on_hopper: None) -> None:
    args = _args()
    form = _write_project._hopper_form(args)
    assert form is not None
    _, other = _launcher.forms(form.kernel, args, form.constants)
    assert other == _write_project._form(args)


def test_where_rows_begin_anywhere_there_is_one_form(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of tokens: the plain form adds up in another order."""
    launched: list[tuple[Any, tuple[int, ...]]] = []
    monkeypatch.setattr(
        _write_project, "run", lambda kernel, grid, *_args, **_constants: launched.append((kernel, grid))
    )
    for tokens, slots in ((0, 2), (1, 6), (64, 6), (4097, 2)):
        x, f, _, post, _, phi, *_ = _args(tokens=tokens, channels=5129)
        _, projection = _write_project.write_project(x, f, None, post, None, phi, None)
        assert launched.pop() == (KERNEL, (-(-tokens // 64), slots))
        assert projection.z.shape == (slots, tokens, 24)
        assert (projection.together, projection.many) == (slots // 2, None)
    form = _write_project._hopper_form(_args(channels=5129))
    assert form is not None and form.constants == {"N": 4, "WIDTH": 2640, "STEP": 120, "num_warps": 8}
    assert _launcher.forms(form.kernel, _args(channels=5129), form.constants) == [form]


def test_not_without_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, has in (((8, 0), False), ((9, 0), True), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert has_hopper_forms(device) == has
    monkeypatch.setattr("mhckit.kernels._hopper_launch.HAS_GLUON", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not has_hopper_forms(device)


@pytest.mark.parametrize(("programs", "full"), [(0, False), (1, False), (92, False), (93, True), (133, True)])
def test_how_many_programs_are_enough(programs: int, full: bool) -> None:
    """Seven of ten of 132 multiprocessors have one."""
    assert fills(programs, CPU) == full


def test_tensors_are_described() -> None:
    args = _args()
    arguments = described(KERNEL, args, {"N": 4})
    names = dict(zip(KERNEL.arg_names, arguments, strict=False))
    shapes = {name: names[name].shape for name in ("x", "f", "phi", "y", "x_in")}
    assert shapes == {"x": [5, 1024], "f": [5, 256], "phi": [24, 1024], "y": [5, 1024], "x_in": [5, 256]}
    assert [name for name, value in names.items() if hasattr(value, "block_shape")] == ["x", "f", "phi", "y", "x_in"]
    assert names["phi"].block_shape == [8, 64] and names["phi"].strides == [1024, 1]
    assert names["y"].base is args[8] and names["y"].block_shape == [32, 64]
    assert described(KERNEL, _args(collapses=False), {"N": 4})[9] is None
    assert described(_write_project.write_project_kernel, args, {"N": 4}) is args
    odd = described(KERNEL, _args(channels=255), {"N": 4})
    names = dict(zip(KERNEL.arg_names, odd, strict=False))
    assert [name for name, value in names.items() if hasattr(value, "block_shape")] == ["phi"], "warps move the rest"
    assert names["phi"].shape == [24, 1020]


def test_a_launch_describes_pointers() -> None:
    """A plan repeats pointers, and a first launch has tensors: Triton's driver gets the same from both."""
    args, launched = _args(), []
    launch = describing(lambda *values: launched.append(values), KERNEL, 2, {"N": 4})
    pointers = tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in args)
    for arguments in (args, pointers):
        launch(1, 1, 1, "stream", "setting", "another", *arguments, 4)
    for values, arguments in zip(launched, (args, pointers), strict=True):
        assert values[:6] == (1, 1, 1, "stream", "setting", "another") and values[-1] == 4
        for position, (shape, _tile) in tiled_arguments[KERNEL.__name__](args, {"N": 4}).items():
            matrix = values[6 + position]
            assert matrix.base.data_ptr() == pointers[position]
            assert (matrix.shape, matrix.strides, matrix.padding) == (shape, (shape[1], 1), "zero")
        assert values[6 + 3] is arguments[3] and values[6 + 12] == 5


def test_a_tensor_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same address and as many tokens; the launch gets what Triton's driver would give it."""
    made = []

    def make(pointer: Any, metadata: dict[str, int]) -> list[Any]:
        made.append((pointer.base.data_ptr(), *pointer.shape))
        return [("map", pointer.base.data_ptr(), *pointer.shape, metadata["number"]), *pointer.shape, *pointer.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    args, launched = _args(), []
    constants = {"N": 4, "WIDTH": 256}
    tiles = tiled_arguments[KERNEL.__name__](args, constants)
    signature = {k: "tensordesc<bf16[32, 64],>" if k in tiles else "i32" for k in range(len(args) + 2)}
    metadata = [{"number": number} for number in range(len(tiles))]
    tritons = driver.wrap_handle_tensordesc(lambda *values: launched.append(values), signature, metadata)
    settings = ("function", False, False, None, None, "packed", None, None, None)
    whole = (1, 1, 1, "stream", *settings)
    described_by_hand = [_descriptors._Pointer(args[k].data_ptr(), tiles[k].shape) if k in tiles else value
                         for k, value in enumerate(args)]  # fmt: skip
    tritons(*whole, *described_by_hand, 4, 256)
    launch = describing(tritons, KERNEL, len(settings), constants)
    pointers = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in args]
    made.clear()
    for _ in range(2):
        launch(*whole, *pointers, 4, 256)
    given = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in launched[0]]
    assert list(launched[1]) == given and launched[1] == launched[2]
    assert len(made) == len(tiles) == 5
    launch(*whole, *pointers[:12], 4, *pointers[13:], 4, 256)
    assert len(made) == 10 and made[-1][1] == 4, "another number of tokens"
    other = torch.zeros_like(args[0])
    launch(*whole, other, *pointers[1:], 4, 256)
    assert len(made) == 11 and made[-1] == (other.data_ptr(), 5, 1024), "another tensor"
    monkeypatch.setattr(_descriptors, "MOST_REMEMBERED", 2)
    launch(*whole, args[8], *pointers[1:], 4, 256)
    launch(*whole, *pointers, 4, 256)
    assert len(made) == 13, "no more are kept, so what was known is made anew"


def test_kernels_without_such_tensors_are_launched_as_they_are() -> None:
    run = lambda *values: None  # noqa: E731
    assert describing(run, _write_project.write_project_kernel, 2, {}) is run


def test_signature() -> None:
    """As Triton writes it for the descriptor of such a tensor."""
    args = _args()
    arguments = described(KERNEL, args, {"N": 4})
    for position, kind in ((0, "bf16"), (5, "fp32"), (9, "bf16")):
        written, *_ = native_specialize_impl(CUDABackend, arguments[position], False, True, True)
        tile = tiled_arguments[KERNEL.__name__](args, {"N": 4})[position].tile
        assert signature_of(kind, tile, args[position].element_size()) == written


BFLOAT = torch.bfloat16


def _layout_for(
    *, streams: int = 4, channels: int = 256, rows: int = 24, dtypes: tuple[torch.dtype | None, ...] = (BFLOAT,) * 4,
    bias: bool = False, mixes: bool = False,
) -> Any:  # fmt: skip
    """How J wants phi for Hopper, or None; dtypes of x, g, dx_in and f, None where there is no gradient."""
    wide, narrow = (5, streams, channels), (5, channels)
    x, g, dx_in, f = (
        None if dtype is None else torch.zeros(shape, dtype=dtype)
        for shape, dtype in zip((wide, wide, narrow, narrow), dtypes, strict=True)
    )
    res = torch.zeros(5, streams, streams) if mixes else None
    write = Write(f, torch.zeros(channels) if bias else None, torch.zeros(5, streams), res)
    return _streams_bwd.hopper_phi_layout(x, g, dx_in, write, rows)


@pytest.mark.parametrize(("change", "exists"), [
    ({}, True),
    ({"rows": 8}, True),
    ({"rows": 0}, False),  # nothing is projected
    ({"rows": 32}, True),
    ({"rows": 33}, False),
    ({"streams": 2}, False),
    ({"channels": 192}, False),
    ({"channels": 255}, True),
    ({"channels": 255, "rows": 16}, True),
    ({"channels": 255, "rows": 20}, False),  # dz is staged eight rows at a time
    ({"channels": 255, "rows": 32}, False),  # what is carried from step to step, and staged, takes their room
    ({"channels": 255, "bias": True}, False),
    ({"channels": 127}, False),
    ({"bias": True}, False),
    ({"dtypes": (BFLOAT, None, BFLOAT, BFLOAT)}, False),
    ({"dtypes": (BFLOAT, BFLOAT, None, BFLOAT)}, False),
    ({"dtypes": (torch.float16,) * 4}, False),
    ({"dtypes": (BFLOAT, BFLOAT, torch.float32, BFLOAT)}, False),
    ({"dtypes": (BFLOAT, BFLOAT, BFLOAT, torch.float32)}, False),
])  # fmt: skip
def test_which_write_backs_have_the_form(on_hopper: None, change: dict[str, Any], exists: bool) -> None:
    layout = _layout_for(**change)
    assert (layout is not None) == exists
    if layout is not None:
        channels = change.get("channels", 256)
        assert layout == _streams_bwd_hopper.phi_layout(change.get("rows", 24), channels)
        assert layout.block == 64 and layout.step == hopper_step(channels)


@pytest.mark.parametrize(("change", "exists"), [
    ({}, True),
    ({"rows": 79}, False),
    ({"rows": 0}, False),
    ({"mixes": False}, False),
    ({"channels": 192}, False),
    ({"channels": 255}, False),
    ({"bias": True}, False),
    ({"dtypes": (BFLOAT, BFLOAT, BFLOAT, torch.float32)}, False),
])  # fmt: skip
def test_which_write_backs_of_eight_streams_have_the_form(
    on_hopper: None, change: dict[str, Any], exists: bool
) -> None:  # fmt: skip
    layout = _layout_for(**({"streams": 8, "rows": 80, "mixes": True} | change))
    assert (layout is not None) == exists
    if layout is not None:
        assert layout == _streams_bwd_eight.phi_layout(change.get("rows", 80)) and layout.together == 8


def test_plain_write_backs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_streams_bwd, "has_hopper_forms", lambda device: False)
    assert _layout_for() is None


@pytest.mark.parametrize("rows", [1, 20, 24])
@pytest.mark.parametrize(("for_hopper", "channels", "blocks"), [
    (True, 256, 4),
    (True, 241, 6),  # steps of 120 channels, in blocks that have room for 128
    (False, 192, 6),
    (False, 241, 8),
])  # fmt: skip
def test_phi_is_packed(rows: int, for_hopper: bool, channels: int, blocks: int) -> None:
    """Of eight neighbouring channels of a thread, the pairs it holds of each eight columns of a dot."""
    streams, device = 3, "cuda" if torch.cuda.is_available() else "cpu"
    layout = _streams_bwd_hopper.phi_layout(rows, channels) if for_hopper else phi_layout(streams, channels, rows)
    torch.manual_seed(rows)
    phi = torch.randn(rows, streams * channels, device=device)
    parts = pack_phi(phi, None, streams, layout)
    assert parts.shape == (streams * blocks, layout.rows, layout.block) and layout.blocks(channels) == blocks
    high = phi.bfloat16()
    low = (phi - high.float()).bfloat16()
    below = rows if layout.dense else 32
    want = torch.zeros_like(parts)
    for column in range(streams * channels):
        stream, channel = divmod(column, channels)
        step, within = divmod(channel, layout.step)
        block, c = divmod(within, layout.block)
        block += stream * blocks + step * -(-layout.step // layout.block)
        packed = c // 32 * 32 + c % 8 // 2 * 8 + c % 32 // 8 * 2 + c % 2
        want[block, :rows, packed] = high[:, column]
        want[block, below : below + rows, packed] = low[:, column]
    assert torch.equal(parts, want)


@pytest.mark.parametrize("rows", [3, 80])
def test_phi_of_eight_streams_is_packed(rows: int) -> None:
    """Eight channels of all streams side by side."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layout, channels = _streams_bwd_eight.phi_layout(rows), 128
    torch.manual_seed(rows)
    phi, weight = torch.randn(rows, 8 * channels, device=device), torch.randn(8 * channels, device=device)
    parts = pack_phi(phi, weight, 8, layout)
    assert parts.shape == (channels // 8, layout.rows, 64)
    high = (phi * weight).bfloat16()
    low = (phi * weight - high.float()).bfloat16()
    low_of_product = (phi.double() * weight.double() - high.double()).float().bfloat16()

    def packed(part: torch.Tensor) -> torch.Tensor:
        return part.view(rows, 8, channels // 8, 8).permute(2, 0, 1, 3).reshape(channels // 8, rows, 64)

    assert torch.equal(parts[:, :rows], packed(high))
    found = parts[:, rows : 2 * rows]
    # A GPU multiplies and subtracts in one instruction, an interpreter in two.
    assert ((found == packed(low)) | (found == packed(low_of_product))).all()
    assert (parts[:, 2 * rows :] == 0).all()


def _described(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments by name, and the shapes of matrices and tiles of those that are described."""
    names = dict(zip(kernel.arg_names, described(kernel, args, constants), strict=False))
    of_matrices = {name: value for name, value in names.items() if hasattr(value, "block_shape")}
    return names, {name: (value.shape, value.block_shape) for name, value in of_matrices.items()}


def test_tensors_of_eight_streams_are_described() -> None:
    args = _args(streams=8, rows=80, mixes=True)
    _, tiles = _described(EIGHT, args, {})
    wide, narrow = ([5, 2048], [64, 32]), ([5, 256], [64, 32])
    assert tiles == {"x": wide, "f": narrow, "phi": ([80, 2048], [16, 32]), "y": wide, "x_in": narrow}
    kernel = _streams_bwd_eight.streams_bwd_eight_kernel
    x, f = args[0], args[1]
    packed = torch.zeros(32, 160, 64, dtype=BFLOAT)
    args = (x, f, *[None] * 6, packed, x, f, None, None, x, f, None, 5, 256, 256, 80)
    names, tiles = _described(kernel, args, {})
    wide, narrow = ([40, 256], [256, 32]), ([5, 256], [64, 32])
    assert tiles == {
        "g": wide, "dx_in": narrow, "phi_parts": ([32 * 160, 64], [16, 64]), "x": wide, "f": narrow, "dx": wide,
        "df": narrow,
    }  # fmt: skip
    assert names["g"].layout.swizzle_byte_width == 64 and names["phi_parts"].layout.swizzle_byte_width == 128


def test_tensors_of_a_write_back_are_described() -> None:
    kernel = _streams_bwd_hopper.streams_bwd_hopper_kernel
    T, N, C, P = 5, 4, 256, 20
    x, f = torch.zeros(T, N, C, dtype=BFLOAT), torch.zeros(T, C, dtype=BFLOAT)
    packed = torch.zeros(N * C // 64, 48, 64, dtype=BFLOAT)
    args = (x, f, *[None] * 6, packed, x, f, None, None, x, f, None, T, C, C, P)
    _, tiles = _described(kernel, args, {"N": N})
    wide, narrow = ([5, 1024], [32, 64]), ([5, 256], [32, 64])
    assert tiles == {
        "g": wide, "dx_in": narrow, "phi_parts": ([16 * 48, 64], [16, 64]), "x": wide, "f": narrow, "dx": wide,
        "df": narrow,
    }  # fmt: skip
    args = (*args[:18], 255, P)
    _, tiles = _described(kernel, args, {"N": N})
    assert tiles == {"phi_parts": ([N * 6 * 48, 64], [16, 64])}, "warps move the rest"


@pytest.mark.parametrize(("tokens", "channels", "width", "span"), [
    (8192, 4096, 1024, 4096),  # 128 programs for 132 multiprocessors
    (4096, 4096, 1024, 2048),
    (2048, 4096, 1024, 1024),
    (1, 4096, 1024, 1024),
    (0, 4096, 1024, 4096),
    (10240, 4096, 1024, 1024),  # 1.2 waves are 4.8 of quarters
    (16384, 2560, 1280, 2560),
    (4096, 7168, 1792, 3584),
    (2048, 12288, 1536, 3072),
    (1024, 12288, 1536, 1536),
    (5, 1920, 1920, 1920),
    (5, 128, 128, 128),
    (33, 4224, 1152, 1152),  # the last sum is shorter
    (4097, 5129, 1320, 2640),  # steps of 120 channels, where rows begin anywhere
    (1, 129, 240, 240),
])  # fmt: skip
def test_how_many_channels_a_program_of_the_write_back_takes(tokens: int, channels: int, width: int, span: int) -> None:
    assert chunk_width(channels) == width and width % hopper_step(channels) == 0
    assert chunks_span(channels, -(-tokens // 64), CPU) == span
    assert span % width == 0, "a sum is not shared"
