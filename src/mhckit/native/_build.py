"""Compiling the C++ of this folder, once per machine and version, and loading it."""

from __future__ import annotations

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
( "$@" -o "$busy.$$" 2> "$out.log" && mv -f "$busy.$$" "$out"; rm -f "$busy" ) > /dev/null &
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
        with self._lock:
            try:
                self._look()
                while wait and self._module is None and not self.problem:
                    time.sleep(0.1)
                    self._look()
            except (OSError, AttributeError, ImportError, subprocess.SubprocessError) as error:
                self.problem = str(error)
            self._next_look = time.monotonic() + LOOK_EVERY
        return self._module

    def _look(self) -> None:
        paths = [folder / f"mhckit-host-{_key()}.so" for folder in self._folders]
        busy = paths[-1].with_suffix(".busy")
        is_busy = _age(busy) < DIED
        path = next((path for path in paths if path.exists()), None)  # looked for last: it is there before busy is gone
        if path is not None:
            module = _load(path)
            self._set_up(module)
            self._module = module
        elif self._begun and not is_busy:
            self.problem = _last_words(paths[-1])
        elif not self._begun:
            if not is_busy:
                _begin(paths[-1], busy, self._cuda_include)
            self._begun = True  # by this process or another


def _key() -> str:
    """Of everything that a compiled library depends on."""
    facts = [torch.__version__, str(torch._C._GLIBCXX_USE_CXX11_ABI), str(sysconfig.get_config_var("SOABI"))]
    texts = [(HERE / name).read_text() for name in SOURCES]
    return hashlib.sha256("\0".join([*facts, *texts]).encode()).hexdigest()[:16]


def _load(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _age(file: Path) -> float:
    """In seconds; one that is not there is as old as can be."""
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _begin(path: Path, busy: Path, cuda_include: Path) -> None:
    """Compile in a process of its own, which nobody waits for."""
    compiler = _compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    if _age(busy) >= DIED:
        busy.unlink(missing_ok=True)
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
    subprocess.run(["sh", "-c", _COMPILE, str(path), str(busy), *command], stdin=subprocess.DEVNULL, check=True)


def _compiler() -> str:
    """One that links the C++ library which torch has loaded, not a copy of its own."""
    for name in (os.environ.get("CXX"), "g++", "/usr/bin/g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path is not None:
            found = subprocess.run([path, "-print-file-name=libstdc++.so"], capture_output=True, text=True).stdout
            if Path(found.strip()).is_absolute():
                return path
    raise FileNotFoundError("no C++ compiler with a shared libstdc++; CXX can name one")


def _last_words(path: Path) -> str:
    log = Path(f"{path}.log")
    return log.read_text()[:2000].strip() if log.exists() else "the compiler left no message"
