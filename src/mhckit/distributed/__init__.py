"""mhckit across processes: DTensors sharded over tokens, and Streams at the boundaries of a pipeline.

Importing this package changes nothing and needs no torch.distributed; `register_sharding` does both. DDP and FSDP2 need
nothing from here: modules and Streams pass through them as they are.
"""

from .pipeline import pack_streams, unpack_streams
from .sharding import reduce_gradients, register_sharding

__all__ = ["pack_streams", "reduce_gradients", "register_sharding", "unpack_streams"]
