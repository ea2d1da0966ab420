"""Mix: the coefficients of one sublayer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Mix(NamedTuple):
    """The coefficients of one sublayer, per token, in float32 (float64 for float64 streams).

    pre [..., N] reads, post [..., N] writes, res [..., N_out, N_in] mixes the streams; res is None for identity.
    """

    pre: Tensor
    post: Tensor
    res: Tensor | None
