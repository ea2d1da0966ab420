"""Streams: the residual of a model with hyper-connections, with the last write-back deferred."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import GetAttrKey, register_pytree_node

from mhckit.ops import Mix, enter, expand, junction, post
from mhckit.ops._check import check_optional, check_shape


@dataclass(frozen=True, eq=False)
class Streams:
    """N parallel residual streams and, until the next read, the sublayer output that waits to be written into them.

        streams = Streams.expand(h, 4)
        h, streams = attn_hc(streams)           # HyperConnection reads; fuses whatever is pending
        streams = streams.write(attn(h))        # deferred: nothing runs yet
        h, streams = mlp_hc(streams)            # writes attn's output, reads mlp's input: one junction
        ...
        h = head(streams)

    Immutable, and a pytree: it passes through torch.compile, checkpointing, FSDP2 and deepcopy as its tensors do. One
    chain of reads and writes follows one recipe.

    FSDP2's mixed precision casts the floating inputs and all parameters of a wrapped block. Give such blocks
    ``MixedPrecisionPolicy(cast_forward_inputs=False)``, or the float32 mix arrives rounded; and wrap each connection
    with a policy of its own without a ``param_dtype``, or its parameters do.

    Attributes:
        x: the streams [..., N, C] that the last sublayer read from.
        mix: coefficients of that sublayer; None before the first read.
        f: its output [..., C], waiting; None if nothing waits.
        f_bias: [C], added to f when it is written.
    """

    x: Tensor
    mix: Mix | None = None
    f: Tensor | None = None
    f_bias: Tensor | None = None

    @classmethod
    def expand(cls, h: Tensor, n: int) -> Streams:
        """Start n streams as copies of h [..., C]."""
        return cls(expand(h, n))

    def write(self, f: Tensor, f_bias: Tensor | None = None) -> Streams:
        """Hand over the output [..., C] of the sublayer that read last; it is written at the next use."""
        if self.mix is None:
            raise ValueError("nothing has been read from these streams: call a HyperConnection before write()")
        if self.f is not None:
            raise ValueError("a sublayer output is already waiting: each read takes exactly one write()")
        *lead, _, channels = self.x.shape
        check_shape("f", f, "[..., C]", (*lead, channels), like=self.x)
        check_optional("f_bias", f_bias, "[C]", (channels,), like=self.x)
        return Streams(self.x, self.mix, f, f_bias)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Streams:
        """On another device, dtypes as they are; what places a model's layers on several devices calls it."""
        tensors, names = _flatten(self)
        return _unflatten([tensor.to(device, non_blocking=non_blocking) for tensor in tensors], names)

    @property
    def tensor(self) -> Tensor:
        """The streams [..., N, C] with nothing pending: what waits is written now.

        A shifted recipe reads with the mix of the sublayer before: pass the Streams on, not this tensor.
        """
        if self.mix is None:
            return self.x
        if self.f is None:
            raise ValueError("these streams were read and nothing was written: use what streams.write(f) returned")
        return post(self.x, self.f, self.mix.post, self.mix.res, f_bias=self.f_bias)


def read_streams(streams: Streams, *parameters: Any, **options: Any) -> tuple[Tensor, Streams]:
    """What a sublayer reads, [..., C], and the streams to write its output to: `enter`, or, where an output waits,
    `junction`. parameters and options are theirs.
    """
    return _read_uncompiled(streams, parameters, options) if _observed else _read(streams, parameters, options)


def _read(streams: Streams, parameters: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, Streams]:
    if streams.mix is None:
        x, h, mix = enter(streams.x, *parameters, **options)
    elif streams.f is None:
        raise ValueError("these streams were read and nothing was written: call streams.write(f) between reads")
    else:
        x, h, mix = junction(streams.x, streams.f, streams.mix, *parameters, f_bias=streams.f_bias, **options)
    return h, Streams(x, mix)


# Called after each read with the streams before, what was read, the streams after, and the options. A plain global
# tells whether there is one, process-wide: torch.compile reads and guards it, and leaves such reads uncompiled.
Observer = Callable[[Streams, Tensor, Streams, dict[str, Any]], None]
_observer: Observer | None = None
_observed: bool = False


def observe(observer: Observer | None) -> Observer | None:
    """Have every read observed from now on; returns the observer until now."""
    global _observer, _observed
    outer, _observer = _observer, observer
    _observed = observer is not None
    return outer


def _read_for_recompute(
    streams: Streams, parameters: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor, Streams]:
    h, after = _read(streams, parameters, options)
    observer = _observer
    if observer is not None:  # another thread may have taken it away meanwhile
        observer(streams, h, after, options)
    return h, after


_read_uncompiled: Any = _disable_dynamo(_read_for_recompute)  # torch.compiler.disable would load Dynamo on import


def as_streams(streams: Streams | Tensor) -> Streams:
    if isinstance(streams, Tensor):
        return Streams(streams)
    if not isinstance(streams, Streams):
        raise TypeError(f"streams must be mhckit.Streams or a tensor [..., N, C], got {type(streams).__name__}")
    return streams


# No name begins with another one: torch.export substitutes them in its guards as plain text.
_FIELDS = ("x", "pre", "post", "res", "f", "bias")


def _flatten(streams: Streams) -> tuple[list[Tensor], tuple[str, ...]]:
    """The tensors that are there, and their names."""
    mix = (None, None, None) if streams.mix is None else streams.mix
    named = zip(_FIELDS, (streams.x, *mix, streams.f, streams.f_bias), strict=True)
    present = {name: tensor for name, tensor in named if tensor is not None}
    return list(present.values()), tuple(present)


def _flatten_with_keys(streams: Streams) -> tuple[list[tuple[Any, Tensor]], tuple[str, ...]]:
    tensors, names = _flatten(streams)
    return [(GetAttrKey(name), tensor) for name, tensor in zip(names, tensors, strict=True)], names


def _unflatten(tensors: Any, names: Any) -> Streams:
    given = dict(zip(names, tensors, strict=True))
    mix = Mix(given["pre"], given["post"], given.get("res")) if "pre" in given else None
    return Streams(given["x"], mix, given.get("f"), given.get("bias"))


register_pytree_node(
    Streams,
    _flatten,
    _unflatten,
    serialized_type_name="mhckit.Streams",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
