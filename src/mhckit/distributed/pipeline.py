"""Streams at a boundary between two stages of a pipeline: as few plain tensors as can be, and back.

    first stage     return pack_streams(streams, recipe)
    next stage      def forward(self, *tensors): streams = unpack_streams(tensors, recipe)

A stage of torch.distributed.pipelining hands on a tuple of tensors, and every one of them must get a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mhckit.modules import Streams
from mhckit.ops import Mix
from mhckit.recipe import Recipe


def pack_streams(streams: Streams, recipe: Recipe) -> tuple[Tensor, ...]:
    """What the next stage needs of Streams that nobody is reading from: at their start, or after ``write``.

    Most recipes send one tensor, the streams [..., N, C] with what waited written: less than its parts, but an operator
    of its own, so that the gradient of the streams is rounded to their dtype here, as nowhere else in a chain. A
    shifted recipe reads with the pre of the sublayer before, and sends the parts: x, pre, post, res (unless identity)
    and f, to which a waiting f_bias has been added, rounded to the dtype of f. At its start there is x alone.
    """
    if not recipe.shifted or streams.mix is None:
        return (streams.tensor,)
    if streams.f is None:
        raise ValueError("these streams were read and nothing was written: call streams.write(f) before packing them")
    # The bias is a parameter: handed to another stage itself, it would get its gradient on a way of its own.
    f = streams.f if streams.f_bias is None else (streams.f + streams.f_bias).to(streams.f.dtype)
    return tuple(part for part in (streams.x, *streams.mix, f) if part is not None)


def unpack_streams(tensors: Sequence[Tensor], recipe: Recipe) -> Streams:
    """Streams from what `pack_streams` returned under the same recipe."""
    if len(tensors) == 1:
        return Streams(tensors[0])
    parts = 4 if recipe.residual == "identity" else 5
    if not recipe.shifted or len(tensors) != parts:
        wanted = f"1 or {parts} tensors" if recipe.shifted else "1 tensor"
        raise ValueError(f"tensors must be what pack_streams returned, {wanted} for this recipe, got {len(tensors)}")
    x, pre, post, *res, f = tensors
    return Streams(x, Mix(pre, post, res[0] if res else None)).write(f)
