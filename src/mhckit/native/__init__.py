"""The host's share of an eager call, in C++: recognising it, allocating, launching, and autograd's graph.

Python works out what a call of a kind does, once (kernels/_plan.py, ops/_calls.py); this repeats it. It is compiled on
the machine it runs on, as Triton's own launchers are, by the first process that could use it, beside what that process
does; until then, and wherever it cannot be compiled, the same is done in Python.

    plan.h      what a call allocates and launches
    guard.h     whether a tensor is like an earlier one
    call.h      the kinds of calls of an operator, and a node of autograd's graph for each call
    module.cpp  Python's view of these
"""

from ._build import Library

__all__ = ["Library"]
