"""Modules: parameters, initialisation and the Streams that travel between them. All math is in mhckit.ops."""

from .hyper_connection import HyperConnection
from .hyper_head import HyperHead
from .mhc import MHC
from .streams import Streams

__all__ = ["MHC", "HyperConnection", "HyperHead", "Streams"]
