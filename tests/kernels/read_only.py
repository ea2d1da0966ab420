"""Folders that nobody may write into, not even root, and how to tell that nobody did."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Without CAP_DAC_OVERRIDE, which PR_CAPBSET_DROP takes from whatever is executed next, root obeys modes.
_OBEDIENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def make_read_only(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555)


def python(*arguments: Any) -> list[str]:
    """A command that runs Python with these arguments, in a process that cannot write into such folders."""
    return [sys.executable, "-c", _OBEDIENT, *map(str, arguments)]


def snapshot(folder: Path) -> dict[Path, int]:
    """Everything inside, and when it last changed."""
    return {path: path.stat().st_mtime_ns for path in (*folder.rglob("*"), folder)}
