"""What a launch is told apart by, and the opt-in search for launch parameters; both without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.language import constexpr
from triton.runtime.jit import JITFunction

from mhckit.kernels import _autotune, _launcher, _native
from mhckit.kernels._descriptors import Tiles
from mhckit.kernels._launch import write_project_launch


def _scale(x, y, T, factor, N: constexpr, STAGES: constexpr):
    """Stands for a kernel; never compiled."""


KERNEL = JITFunction(_scale, do_not_specialize=["T"])
X = torch.ones(3)


def _key(*args: object) -> list[object]:
    return _launcher._kinds(KERNEL, args)


def test_a_launch_is_known_by_what_compilation_depends_on() -> None:
    known = _key(X, None, 5, 2.0, 4)
    assert _key(torch.zeros(7), None, 6, 2.0, 4) == known, "neither values nor the number of tokens matter"
    assert _key(X.bfloat16(), None, 5, 2.0, 4) != known
    assert _key(X, X, 5, 2.0, 4) != known
    assert _key(X, None, 2**31, 2.0, 4) != known, "a count of 64 bits is another type"
    assert _key(X, None, 5, 2.0, 2) != known


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A device on which three steps in flight are fastest and four do not fit; records what was timed."""
    tried: list[int] = []

    def time(kernel, grid, args, constants) -> float:
        tried.append(constants["STAGES"])
        return {1: 5.0, 2: 3.0, 3: 2.0, 4: float("inf")}[constants["STAGES"]]

    monkeypatch.setattr(_autotune, "_time", time)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    return tried


def _tuned(*, N: int = 4, tokens: int = 5) -> dict:
    return _autotune.tuned(KERNEL, (1,), (X, None, tokens, 2.0), {"N": N, "STAGES": 2, "num_warps": 4})


def test_the_fastest_candidate_is_kept_on_disk(timed: list[int], tmp_path: Path) -> None:
    assert _tuned() == {"N": 4, "STAGES": 3, "num_warps": 4}
    assert sorted(timed) == [2, 3, 4], "what was made for loads in flight keeps some"
    timed.clear()
    assert _tuned(tokens=77)["STAGES"] == 3
    assert timed == [], "found before, for any number of tokens"
    assert _tuned(N=8)["STAGES"] == 3 and timed, "another kernel is searched for anew"
    (file,) = (tmp_path / "cache").iterdir()
    assert list(json.loads(file.read_text()).values()) == [3, 3]


def test_a_kernel_without_loads_in_flight_may_get_some(timed: list[int]) -> None:
    _autotune.tuned(KERNEL, (1,), (X, None, 5, 2.0), {"N": 4, "STAGES": 1, "num_warps": 4})
    assert sorted(timed) == [1, 2, 3, 4]


def test_a_damaged_file_is_searched_for_again(timed: list[int], tmp_path: Path) -> None:
    _tuned()
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text("{")
    timed.clear()
    assert _tuned()["STAGES"] == 3 and timed


def test_what_was_shipped_is_not_searched_for(
    timed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tuned()
    monkeypatch.setenv("MHCKIT_KERNELS", str(tmp_path / "cache"))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "other"))
    timed.clear()
    assert _tuned()["STAGES"] == 3 and timed == []
    _tuned(N=8)
    (file,) = (tmp_path / "other").iterdir()
    assert len(json.loads(file.read_text())) == 2, "what is found now is kept here, with what was known"


def test_a_folder_that_cannot_be_written(timed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "file" / "folder"))
    assert _tuned()["STAGES"] == 3


def test_nothing_to_choose_is_left_alone(timed: list[int]) -> None:
    assert _autotune.tuned(KERNEL, (1,), (X,), {"num_warps": 4}) == {"num_warps": 4}
    assert timed == []


def test_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("MHCKIT_AUTOTUNE", raising=False)
    assert not _autotune.is_enabled()
    monkeypatch.setenv("MHCKIT_AUTOTUNE", "1")
    assert _autotune.is_enabled()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not _autotune.is_enabled(), "a graph being captured cannot be timed"


def test_no_candidate_fits(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_autotune, "_time", lambda *launch: float("inf"))
    with pytest.raises(RuntimeError, match="_scale fits this device with none of"):
        _tuned()


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("rows", [24, 80, 160, 300])
@pytest.mark.parametrize("streams", [2, 4, 8])
def test_fewer_steps_in_flight_where_shared_memory_is_small(streams: int, rows: int, shared: int) -> None:
    options = dict(element_size=2, wide=True)
    launch = write_project_launch(streams, rows, writes=True, shared=shared, **options)
    phi = streams * -(-rows // 32) * 32 * launch.block_c * 4
    assert launch.num_stages == 1 or phi * (launch.num_stages - 1) < shared
    if (streams, rows, shared) == (4, 24, 227 << 10):
        assert launch.num_stages == 3


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> CudaLauncher:
    """Triton's, over a driver that notes what it gets."""
    launcher = CudaLauncher.__new__(CudaLauncher)
    settings = dict(launch_cooperative_grid=False, launch_pdl=True, num_ctas=1)
    scratch = dict(global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1)
    launched: list[tuple[object, ...]] = []
    launcher.__dict__.update(launched=launched, launch=lambda *values: launched.append(values), **settings, **scratch)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    return launcher


def _remembered(launcher: CudaLauncher, blocks_of_a_cluster: int = 1) -> _launcher.Compiled:
    types = {"x": "*fp32", "y": "constexpr", "T": "i32", "factor": "fp32", "N": "constexpr", "STAGES": "constexpr"}
    compiled = SimpleNamespace(
        run=launcher,
        function=77,
        packed_metadata=(4, blocks_of_a_cluster, 512),
        src=SimpleNamespace(signature=types),
        metadata=SimpleNamespace(tensordesc_meta=None),
    )
    return _launcher._remember(KERNEL, compiled, (X, None, 5, 2.0), {"STAGES": 2, "N": 4, "num_warps": 4})


@pytest.mark.parametrize("knows", [True, False])
def test_a_launch_reaches_the_driver_as_through_tritons_launcher(
    knows: bool, launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launcher, "KNOWS_LAUNCHES", knows)
    _launcher.repeat([(_remembered(launcher), (2, 3, 1), (X, None, 5, 2.0))])
    launcher(2, 3, 1, 5, 77, (4, 1, 512), None, None, None, X, None, 5, 2.0, 4, 2)
    straight, through = launcher.launched
    assert len(straight) == 19
    assert all(got is wanted or got == wanted for got, wanted in zip(straight, through, strict=True))


def test_tritons_launcher_is_left_out_where_it_does_nothing(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It allocates scratch memory for kernels that need it; that of another version may do more."""
    monkeypatch.setattr(_launcher, "KNOWS_LAUNCHES", True)
    assert _remembered(launcher).run is launcher.launch
    for size in ("global_scratch_size", "profile_scratch_size"):
        monkeypatch.setattr(launcher, size, 16)
        assert _remembered(launcher).run is launcher
        monkeypatch.setattr(launcher, size, 0)
    monkeypatch.setattr(_launcher, "KNOWS_LAUNCHES", False)
    assert _remembered(launcher).run is launcher


def test_a_kernel_as_the_driver_takes_it(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launcher, "KNOWS_LAUNCHES", True)
    kernel = _remembered(launcher)
    assert kernel.binary is not None
    assert (kernel.binary.function, kernel.binary.settings) == (77, (128, 512, True))
    launch = _launcher.Recorded(kernel, (2, 3, 1), (X, None, -1, 2.0))
    handed = _native.parameters(launch, [0, 1, 2, 3], 1)
    assert handed == (("pointer", 0), ("constant", 2**32 - 1), ("constant", 0x40000000)), "neither None nor constants"
    of_nothing = _launcher.Recorded(kernel, (2, 3, 1), (X[:0], None, -1, 2.0))
    assert _native.parameters(of_nothing, [1, 2, 3, 4], 1) == (("constant", 0), *handed[1:]), "no memory, no pointer"


def test_launches_that_only_triton_makes(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launcher, "KNOWS_LAUNCHES", True)
    assert _remembered(launcher, blocks_of_a_cluster=2).binary is None
    monkeypatch.setattr(launcher, "launch_cooperative_grid", True)
    assert _remembered(launcher).binary is None
    monkeypatch.setattr(_launcher, "KNOWS_LAUNCHES", False)
    other = _remembered(launcher)
    assert other.binary is None and _native.parameters(_launcher.Recorded(other, (1, 1, 1), ()), [], 0) is None


def test_tensors_described_for_the_copy_engine() -> None:
    """A shape and strides follow each description, as Triton hands them over."""
    known = {"elem_type": 10, "swizzle": 3, "elem_size": 2, "block_size": [32, 64]}
    types = ("tensordesc<bf16[32, 64],...>", "i32")
    binary = _launcher.Binary(1, (32, 0, False), types, (known,), lambda args: {0: Tiles((7, 256), (32, 64))})
    launch = _launcher.Recorded(_launcher.Compiled(print, (), (), binary), (1, 1, 1), (X, 7))
    described = ("map", 0, 9, 3, 2, (7, 256), (32, 64))
    sizes = [("constant", value) for value in (7, 256, 256, 1)]
    assert _native.parameters(launch, [0, 1], 1) == (described, *sizes, ("constant", 7))


def test_an_observer_takes_the_place_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(launches=[])
    monkeypatch.setattr(_launcher, "observer", lambda *launch: seen.launches.append(launch))
    _launcher.run(KERNEL, (2, 3), X, None, 5, 2.0, N=4, STAGES=2)
    assert seen.launches == [(KERNEL, (2, 3), (X, None, 5, 2.0), {"N": 4, "STAGES": 2})]
