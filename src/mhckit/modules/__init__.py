"""Modules: parameters, initialisation and the Streams that travel between them. All math is in mhckit.ops."""

from .hyper_connection import HyperConnection
from .hyper_head import HyperHead
from .mhc import MHC
from .param_groups import param_groups
from .recompute import recompute
from .streams import Streams
from .upcycle import upcycle
from .warmup import warmup

__all__ = ["MHC", "HyperConnection", "HyperHead", "Streams", "param_groups", "recompute", "upcycle", "warmup"]
