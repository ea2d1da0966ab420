"""Seeded inputs and error bounds, shared by the tests and the benchmarks."""

from .inputs import OPERATORS, Call, make_call
from .tolerance import assert_as_accurate, relative_error

__all__ = ["OPERATORS", "Call", "assert_as_accurate", "make_call", "relative_error"]
