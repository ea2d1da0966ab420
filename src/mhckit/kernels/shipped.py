"""Compiled kernels from a folder that was shipped: before Triton's own cache on disk, and beside it.

    MHCKIT_KERNELS=/opt/kernels TRITON_CACHE_MANAGER=mhckit.kernels.shipped:ShippedCache

The folder is one that served as TRITON_CACHE_DIR while kernels were compiled. Named there again, it must be where it
was, because Triton writes absolute paths into it, and what it lacks can only be compiled if it can be written. Here it
may lie anywhere and be read-only: what it lacks is compiled as ever, into Triton's own folder.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from triton.runtime.cache import CacheManager, FileCacheManager


def folder() -> Path | None:
    """Where the kernels are that were shipped, if any."""
    name = os.environ.get("MHCKIT_KERNELS")
    return Path(name) if name else None


class ShippedCache(CacheManager):
    """The files of one kernel, or of a launcher: those that were shipped, else Triton's."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        shipped = folder()
        if shipped is None:
            raise ValueError("TRITON_CACHE_MANAGER names mhckit's ShippedCache: MHCKIT_KERNELS must name its folder")
        if not shipped.is_dir():
            raise ValueError(f"MHCKIT_KERNELS must name a folder with compiled kernels, got {str(shipped)!r}")
        self._shipped = shipped / key
        self._make_own = functools.partial(FileCacheManager, key, override=override, dump=dump)

    @functools.cached_property
    def _own(self) -> FileCacheManager:
        """Made when it is needed: it makes a folder, and perhaps nothing can be written here."""
        return self._make_own()

    def get_file(self, filename: str) -> str | None:
        shipped = self._shipped / filename
        return str(shipped) if shipped.exists() else self._own.get_file(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Files by their names, wherever the paths beside them lead; Triton's own where one is missing or damaged."""
        try:
            names = json.loads((self._shipped / f"__grp__{filename}").read_text())["child_paths"]
        except (FileNotFoundError, json.JSONDecodeError):
            return self._own.get_group(filename)
        files = {name: self._shipped / name for name in names}
        if not all(path.exists() for path in files.values()):
            return self._own.get_group(filename)
        return {name: str(path) for name, path in files.items()}

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        return self._own.put(data, filename, binary)

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        return self._own.put_group(filename, group)
