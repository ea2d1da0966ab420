"""Triton as it is installed here, without needing it."""

from __future__ import annotations

import importlib
import re
from typing import Any, NamedTuple

from .findings import in_a_line


class Triton(NamedTuple):
    """Its version, "" where it cannot be imported, and then why; whether mhckit's kernels can be made with it."""

    version: str
    problem: str
    usable: bool


def installed_triton() -> Triton:
    try:
        version: str = importlib.import_module("triton").__version__
        oldest = importlib.import_module("mhckit.kernels._runtime").OLDEST_TRITON
    except Exception as error:  # a broken installation may raise anything
        return Triton("", in_a_line(error), usable=False)
    return Triton(version, "", usable=major_and_minor(version) >= oldest)


def major_and_minor(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def knobs() -> Any:
    """Triton's settings, read from the environment; a Triton that is usable has them."""
    return importlib.import_module("triton").knobs


def is_interpreted() -> bool:
    """Whether TRITON_INTERPRET makes kernels run as Python."""
    return installed_triton().usable and bool(knobs().runtime.interpret)
