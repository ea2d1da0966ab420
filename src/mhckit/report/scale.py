"""From values to places in a drawing, and the values that are written at an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_MOST_TICKS = 6
_LEAST, _MOST = 1e-300, 1e300  # on a logarithmic axis what is beyond is drawn at the edge, on a linear one not at all
_DECADES_WITH_PARTS = 2  # an axis over fewer powers of ten has 2 and 5 between them as well


@dataclass(frozen=True)
class Scale:
    """An axis from ``low`` to ``high``, drawn from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        low, high, value = (self._flat(each) for each in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else nice_ticks(self.low, self.high)

    def drawable(self, value: float) -> bool:
        return math.isfinite(value) and (value >= 0 if self.log else abs(value) < _MOST)

    def _flat(self, value: float) -> float:
        """Zero has no logarithm: it is drawn at the lower edge."""
        return math.log10(min(max(value, self.low), self.high)) if self.log else value


def linear(
    values: Iterable[float], start: float, end: float, include: Iterable[float] = (), room: float = 0.0
) -> Scale:
    """Around all values that can be drawn, with room on both sides as a part of their range."""
    known = [value for value in (*values, *include) if abs(value) < _MOST] or [0.0, 1.0]
    low, high = min(known), max(known)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-30):
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    margin = room * (high - low)
    return Scale(low - margin, high + margin, start, end)


def logarithmic(values: Iterable[float], start: float, end: float, include: Iterable[float] = ()) -> Scale:
    """Around all values above zero, a fifth of a decade wider."""
    known = [value for value in (*values, *include) if _LEAST < value < _MOST] or [0.1, 10.0]
    return Scale(min(known) / 1.6, max(known) * 1.6, start, end, log=True)


def nice_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / (_MOST_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + index) * step, 12 - math.floor(math.log10(step))) for index in range(count)]


def log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= _DECADES_WITH_PARTS else (1,)
    every = math.ceil((last - first + 1) / _MOST_TICKS)
    found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    return [tick for tick in found if low <= tick <= high]
