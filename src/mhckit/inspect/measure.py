r"""From what was observed to the numbers of the report.

    composite   H_l ... H_1             what of the first streams arrives after l sublayers
    gain        largest absolute row sum of H_l ... H_1 forward, column sum of H_L ... H_l backward; 1 for doubly
                stochastic H

T tokens; N streams (O out, I in). float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .measured import QUANTILES, Spread, Sublayer
from .observe import Observed

NEAR_UNIFORM = 0.1  # largest entry of |mean composite - 1/N| that counts as evenly mixed


def sublayers(observed: Sequence[Observed], token: int) -> list[Sublayer]:
    """The numbers of every sublayer; `token` is the one whose H is shown alone."""
    composites = _composites(observed)
    backward = _backward_gains([each.res for each in observed])
    return [
        Sublayer(
            name=each.name,
            mean=each.res.mean(0).tolist(),
            of_token=each.res[token].tolist(),
            composite=composite.mean(0).tolist(),
            pre=_spreads(each.pre),
            post=_spreads(each.post),
            reads=_shares(pre * each.norms),
            writes=_shares(each.post),
            row_error=each.numbers["row_error_max"],
            column_error=each.numbers["column_error_max"],
            error_by_iteration=each.errors,
            gain_forward=float(composite.abs().sum(-1).amax()),
            gain_backward=gain,
            identity_distance=each.numbers["identity_distance"],
            uniform_distance=each.numbers["uniform_distance"],
            similarity=each.similarity,
            nonfinite=each.nonfinite,
        )
        for each, pre, composite, gain in zip(observed, _reading(observed), composites, backward, strict=True)
    ]


def mixing_depth(measured: Sequence[Sublayer]) -> int | None:
    """After how many sublayers the mean composite is near uniform; None if it never is."""
    for depth, sublayer in enumerate(measured, 1):
        entries = [entry for row in sublayer.composite for entry in row]
        if all(abs(entry - 1 / len(sublayer.composite)) <= NEAR_UNIFORM for entry in entries):
            return depth
    return None


def _composites(observed: Sequence[Observed]) -> list[Tensor]:
    """One after the other: `mhckit.health` takes fewer, larger steps, which want N times the memory."""
    products = [observed[0].res]
    for each in observed[1:]:
        products.append(each.res @ products[-1])
    return products


def _backward_gains(res: Sequence[Tensor]) -> list[float]:
    """For each sublayer, from the last one back to it."""
    gains, product = [], None
    for h_TOI in reversed(res):
        product = h_TOI if product is None else product @ h_TOI
        gains.append(float(product.abs().sum(-2).amax()))
    return gains[::-1]


def _reading(observed: Sequence[Observed]) -> list[Tensor]:
    """The weights that each sublayer reads with; a shifted recipe takes those of the sublayer before, then stream 0."""
    first = torch.zeros_like(observed[0].pre)
    first[:, 0] = 1
    before = [first, *(each.pre for each in observed[:-1])]
    return [shifted if each.recipe.shifted else each.pre for each, shifted in zip(observed, before, strict=True)]


def _spreads(values_TN: Tensor) -> list[Spread]:
    quantiles = torch.tensor(QUANTILES, dtype=values_TN.dtype)
    return [Spread(tuple(column)) for column in values_TN.quantile(quantiles, dim=0).T.tolist()]


def _shares(values_TN: Tensor) -> list[float]:
    """All 0 where there is nothing to share."""
    means = values_TN.abs().mean(0)
    return torch.where(means.sum() == 0, means, means / means.sum()).tolist()
