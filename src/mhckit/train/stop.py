"""Wishes to stop: Ctrl-C, a scheduler's SIGTERM, and the clock. The loop grants them between steps."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any


class StopWish:
    """While entered, the first SIGINT or SIGTERM is a wish; the second one acts as ever."""

    def __init__(self, max_minutes: float | None) -> None:
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._before: dict[signal.Signals, Any] = {}
        self.reason: str | None = None

    def __enter__(self) -> StopWish:
        if threading.current_thread() is threading.main_thread():  # no other one may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._wish)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def __bool__(self) -> bool:
        if self.reason is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.reason = "the time is up"
        return self.reason is not None

    def _wish(self, number: int, _frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
