"""mhckit.native is compiled once, by whoever needs it first, beside everything else; and nobody needs it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mhckit.native import Library, _build

COMPILE = """#!/bin/sh
echo compiled >> {log}
sleep 0.3
while [ "$1" != -o ]; do shift; done
{do}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a compiler makes a file in a third of a second, which is loaded as an empty module."""
    monkeypatch.setattr(_build, "_load", lambda path: ModuleType(path.name))
    _use_compiler(tmp_path, 'echo library > "$2"')
    monkeypatch.setattr(_build, "_compiler", lambda: str(tmp_path / "compiler"))
    return tmp_path / "cache"


def _use_compiler(folder: Path, do: str) -> None:
    script = folder / "compiler"
    script.write_text(COMPILE.format(log=folder / "log", do=do))
    script.chmod(0o755)


def _compilations(folder: Path) -> int:
    log = folder.parent / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def _library(*folders: Path, set_up: Any = lambda module: None) -> Library:
    return Library(folders, Path("/nowhere"), set_up)


def _files(folder: Path) -> set[str]:
    return {path.suffix for path in folder.iterdir()}


def test_nobody_waits_for_it(folder: Path) -> None:
    seen: list[ModuleType] = []
    library = _library(folder, set_up=seen.append)
    start = time.monotonic()
    assert library.module() is None and library.module() is None
    assert time.monotonic() - start < 0.25 and not library.problem
    module = library.module(wait=True)
    assert module is not None and module is library.module() and seen == [module]
    assert _compilations(folder) == 1 and _files(folder) == {".so", ".log"}


def test_it_is_there_when_somebody_looks_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = _library(folder)
    assert library.module() is None
    time.sleep(0.6)
    assert library.module() is not None


def test_the_next_process_loads_it(folder: Path) -> None:
    _library(folder).module(wait=True)
    assert _library(folder).module() is not None
    assert _compilations(folder) == 1


def test_one_compiles_for_all(folder: Path) -> None:
    """Ranks of a job, which begin at once."""
    libraries = [_library(folder) for _ in range(8)]
    threads = [threading.Thread(target=library.module, kwargs={"wait": True}) for library in libraries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(library.module() is not None and not library.problem for library in libraries)
    assert _compilations(folder) == 1


def test_whoever_began_it_may_have_died(folder: Path) -> None:
    folder.mkdir()
    busy = folder / f"mhckit-host-{_build._key()}.busy"
    busy.touch()
    assert _library(folder).module() is None and _compilations(folder) == 0, "somebody is at it"
    os.utime(busy, (0, 0))
    assert _library(folder).module(wait=True) is not None and _compilations(folder) == 1


def test_whoever_is_a_moment_late_does_not_begin_again(folder: Path) -> None:
    """It saw that nobody was at it, and then somebody was."""
    folder.mkdir()
    busy = folder / "host.busy"
    busy.touch()
    _build._begin(folder / "host.so", busy, Path("/nowhere"))
    time.sleep(0.2)
    assert busy.exists() and _compilations(folder) == 0


def test_it_is_of_use_to_the_next_process_if_this_one_ends(folder: Path) -> None:
    code = f"""
from pathlib import Path
from mhckit.native import Library, _build
_build._compiler = lambda: {str(folder.parent / "compiler")!r}
assert Library([Path({str(folder)!r})], Path("/nowhere"), print).module() is None
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
    assert _library(folder).module(wait=True) is not None
    assert _compilations(folder) == 1


def test_what_was_shipped_is_taken(folder: Path, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    _library(shipped).module(wait=True)
    shipped.chmod(0o555)
    assert _library(shipped, folder).module() is not None
    assert _compilations(folder) == 1 and not folder.exists()


def test_an_error_of_the_compiler(folder: Path) -> None:
    _use_compiler(folder.parent, 'echo half > "$2"; echo "error: no such thing" >&2; exit 1')
    library = _library(folder)
    assert library.module(wait=True) is None
    assert library.problem == "error: no such thing"
    assert library.module() is None and _compilations(folder) == 1, "and it is not tried again"
    assert _files(folder) == {".log"}


@pytest.mark.parametrize(("words", "problem"), [("", "the compiler left no message"), ("\\377", "\ufffd")])
def test_a_compiler_that_says_nothing_or_nothing_readable(words: str, problem: str, folder: Path) -> None:
    _use_compiler(folder.parent, f"printf '{words}' >&2; exit 1")
    library = _library(folder)
    assert library.module(wait=True) is None and library.problem == problem


def test_a_compiler_that_takes_too_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits gives up, and whoever comes later finds it."""
    monkeypatch.setattr(_build, "DIED", 0.1)
    library = _library(folder)
    assert library.module(wait=True) is None and "not compiled in" in library.problem
    time.sleep(0.5)
    assert _library(folder).module() is not None


def test_nobody_waits_for_the_output_of_the_compiler(folder: Path) -> None:
    """A pipe that reads what a short process says ends with it."""
    _use_compiler(folder.parent, "sleep 5")
    code = f"""
from pathlib import Path
from mhckit.native import Library, _build
_build._compiler = lambda: {str(folder.parent / "compiler")!r}
Library([Path({str(folder)!r})], Path("/nowhere"), print).module()
import time; print(time.time())
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert time.time() - float(done.stdout) < 4


def test_a_call_does_not_wait_for_a_warm_up_that_does(folder: Path) -> None:
    library = _library(folder)
    waiting = threading.Thread(target=library.module, kwargs={"wait": True})
    waiting.start()
    time.sleep(0.1)
    start = time.monotonic()
    library._next_look = 0.0
    assert library.module() is None and time.monotonic() - start < 0.1
    waiting.join()
    assert library.module() is not None


def test_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "absent")
    monkeypatch.setattr(_build.shutil, "which", lambda name: None)
    library = _library(folder)
    assert library.module(wait=True) is None and "no C++ compiler" in library.problem


def test_a_compiler_with_a_library_of_its_own_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it links would be a second copy of what torch has loaded."""
    script = tmp_path / "static"
    script.write_text("#!/bin/sh\necho libstdc++.so\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert _build._compiler() != str(script)


def test_a_folder_that_cannot_be_written(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").touch()
    library = _library(tmp_path / "file" / "cache")
    assert library.module(wait=True) is None and library.problem


def test_a_library_that_does_not_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> ModuleType:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(_build, "_load", fail)
    library = _library(folder)
    assert library.module(wait=True) is None and library.problem == "undefined symbol"


def test_other_sources_and_versions_are_other_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = _build._key()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    other_torch = _build._key()
    monkeypatch.undo()
    for name in (*_build.SOURCES, "_build.py"):
        (tmp_path / name).write_text((_build.HERE / name).read_text())
    monkeypatch.setattr(_build, "HERE", tmp_path)
    assert _build._key() == key
    (tmp_path / "guard.h").write_text("// changed")
    assert len({key, other_torch, _build._key()}) == 3


def test_every_source_is_counted() -> None:
    sources = {path.name for path in _build.HERE.iterdir() if path.suffix in (".h", ".cpp")}
    assert sources == set(_build.SOURCES)
