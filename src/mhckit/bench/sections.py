"""The parts of the benchmark that can be asked for one by one."""

from __future__ import annotations

from enum import Enum


class Section(str, Enum):
    KERNELS = "kernels"
    JUNCTION = "junction"
    RECIPES = "recipes"
    DECODE = "decode"
    BASELINES = "baselines"
    HOST = "host"
    COLD = "cold"


QUICK_SECTIONS = (Section.KERNELS, Section.JUNCTION, Section.HOST)


def chosen_sections(only: Section | None, quick: bool) -> tuple[Section, ...]:
    """The one asked for, else all; to be quick, those that compile little."""
    if only is not None:
        return (only,)
    return QUICK_SECTIONS if quick else tuple(Section)
