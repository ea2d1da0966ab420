"""Where commands print: results on stdout, what is only for somebody who watches on stderr."""

from __future__ import annotations

import shutil

from rich.console import Console

# In a pipe or a file nothing needs to be cut or wrapped; tables take the width they need, and no more.
_UNLIMITED = 10_000


def screen(at_least: int = 0) -> Console:
    """For results: as wide as the terminal, or as COLUMNS says; a wide table may ask for more, and is not cut then."""
    columns = shutil.get_terminal_size((_UNLIMITED, 24)).columns
    return _console(max(columns, at_least), stderr=False)


def watcher() -> Console:
    """For progress: stderr, and silent unless it is a terminal."""
    return _console(None, stderr=True)


def is_plain() -> bool:
    """Whether NO_COLOR is set. rich still makes text bold then, and moves the cursor; here it means plain text."""
    return Console().no_color


def _console(width: int | None, stderr: bool) -> Console:
    return Console(width=width, stderr=stderr, force_terminal=False if is_plain() else None)
