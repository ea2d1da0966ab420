"""The operators: contracts, references and registration. Imports torch alone; Triton is loaded by name on first use."""

from ._backend import backend, explain
from .activate import activate
from .coefficients import coefficients
from .enter import enter
from .expand import expand
from .head import head
from .junction import junction
from .leave import leave
from .mix import Mix
from .post import post
from .pre import pre
from .project import project
from .sinkhorn import sinkhorn

__all__ = [
    "Mix",
    "activate",
    "backend",
    "coefficients",
    "enter",
    "expand",
    "explain",
    "head",
    "junction",
    "leave",
    "post",
    "pre",
    "project",
    "sinkhorn",
]
