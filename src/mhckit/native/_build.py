"""Compiling the C++ of this folder, once per machine and version, and loading it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
SOURCES = ("module.cpp", "call.h", "guard.h", "plan.h")
NAME = "_mhckit_native"
# Seconds: between looks for what is being compiled, and after which whoever compiles it must have died.
LOOK_EVERY, DIED = 0.5, 120.0

# "$0" is the library, "$1" the file that says it is being compiled, the rest a compiler and what to give it. What is
# compiled lies under its name only when it is complete, and is of use even if the process that wanted it has ended.
_COMPILE = """
out="$0" busy="$1"; shift
( "$@" -o "$busy.$$" 2> "$out.log" && mv -f "$busy.$$" "$out"; rm -f "$busy.$$" "$busy" ) > /dev/null 2>&1 &
"""


class Library:
    """The compiled C++: in one of some folders, or compiled into the last of them; set_up gets it when it is loaded."""

    def __init__(self, folders: Sequence[Path], cuda_include: Path, set_up: Callable[[ModuleType], None]) -> None:
        self.problem = ""  # why there is none
        self._folders = folders
        self._cuda_include = cuda_include
        self._set_up = set_up
        self._module: ModuleType | None = None
        self._lock = threading.Lock()
        self._begun = False
        self._next_look = 0.0

    def module(self, *, wait: bool = False) -> ModuleType | None:
        """None while it is being compiled, which the first call begins, and where it cannot be; wait: until it is."""
        if self._module is not None or self.problem or (not wait and time.monotonic() < self._next_look):
            return self._module
        if self._lock.acquire(blocking=wait):
            try:
                self._look()
                while wait and self._module is None and not self.problem:
                    time.sleep(0.1)
                    self._look()
            except Exception as error:  # whatever it is, Python does the same
                self.problem = str(error) or type(error).__name__
            finally:
                self._next_look = time.monotonic() + LOOK_EVERY
                self._lock.release()
        return self._module

    def _look(self) -> None:
        paths = [folder / f"mhckit-host-{_key()}.so" for folder in self._folders]
        busy = paths[-1].with_suffix(".busy")
        age = _age(busy)
        path = next((path for path in paths if path.exists()), None)  # looked for last: it is there before busy is gone
        if path is not None:
            module = _load(path)
            self._set_up(module)
            self._module = module
        elif self._begun and age is None:
            self.problem = _last_words(paths[-1])
        elif self._begun and age is not None and age > DIED:
            self.problem = f"it was not compiled in {DIED:.0f} s"
        elif not self._begun:
            if age is None or age > DIED:
                _begin(paths[-1], busy, self._cuda_include)
            self._begun = True  # by this process or another


def _key() -> str:
    """Of everything that a compiled library depends on."""
    facts = [torch.__version__, str(torch._C._GLIBCXX_USE_CXX11_ABI), str(sysconfig.get_config_var("SOABI"))]
    texts = [(HERE / name).read_text() for name in (*SOURCES, Path(__file__).name)]
    return hashlib.sha256("\0".join([*facts, *texts]).encode()).hexdigest()[:16]


def _load(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _age(file: Path) -> float | None:
    """In seconds; None of one that is not there."""
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return None


def _begin(path: Path, busy: Path, cuda_include: Path) -> None:
    """Compile in a process of its own, which nobody waits for."""
    compiler = _compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    if (_age(busy) or 0) > DIED:
        with contextlib.suppress(FileNotFoundError):  # one process takes it away, however many saw it
            busy.rename(f"{busy}.{os.getpid()}")
    try:
        busy.touch(exist_ok=False)
    except FileExistsError:  # another process was faster
        return
    torch_root = Path(torch.__file__).parent
    includes = [torch_root / "include", torch_root / "include/torch/csrc/api/include", cuda_include]
    command = [
        compiler,
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{folder}" for folder in (*includes, sysconfig.get_paths()["include"])),
        str(HERE / SOURCES[0]),
        f"-L{torch_root / 'lib'}",
        *("-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    shell = ["sh", "-c", _COMPILE, str(path), str(busy), *command]
    subprocess.run(shell, stdin=subprocess.DEVNULL, start_new_session=True, check=True)


def _compiler() -> str:
    """One that links the C++ library which torch has loaded, not a copy of its own."""
    for name in (os.environ.get("CXX"), "g++", "/usr/bin/g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path is not None:
            asked = subprocess.run([path, "-print-file-name=libstdc++.so"], capture_output=True)
            if Path(os.fsdecode(asked.stdout).strip()).is_absolute():
                return path
    raise FileNotFoundError("no C++ compiler with a shared libstdc++; CXX can name one")


def _last_words(path: Path) -> str:
    log = Path(f"{path}.log")
    words = log.read_text(errors="replace")[:2000].strip() if log.exists() else ""
    return words or "the compiler left no message"
