r"""What the coefficients of a chain of sublayers say about it.

    y_l = H_l y_{l-1} + ...                 so what was in the streams at the start arrives as  H_L ... H_1
    row sums of |H_L ... H_1|               how much a forward signal can grow            (1 for doubly stochastic H)
    column sums                             how much a gradient can grow on its way back

The product tends to the uniform matrix 1/N: streams that are mixed often become alike. The identity is sqrt(N-1) away
from it, in the Frobenius norm, in which all distances here are measured.

L sublayers; T tokens; N streams (O out, I in); C channels. float32 throughout (float64 for float64 coefficients), and
products as sums, which neither TF32 nor autocast rounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mhckit.ops import Mix

from ._tokens import chosen

Numbers = dict[str, Tensor]


def measure(mixes: Sequence[Mix], last_x: Tensor, tokens: int) -> tuple[Numbers, Numbers]:
    """Numbers per sublayer, [L] each, and numbers of the whole model, 0-dim.

    Neighbours with equally many tokens and streams form one chain; of several chains (an encoder and a decoder) the
    whole model has the largest gain, the smallest distance and the smallest depth.
    """
    device = mixes[0].pre.device
    chains = [list(chain) for _, chain in itertools.groupby(mixes, key=lambda mix: mix.pre.shape)]
    measured = [_measure_chain(*_stacked(chain, tokens, device)) for chain in chains]
    per_sublayer = {name: torch.cat([numbers[name] for numbers, _ in measured]) for name in measured[0][0]}
    per_sublayer["nonfinite_coefficients"] = torch.stack([_count_nonfinite(mix).to(device) for mix in mixes])
    of_chains = {name: torch.stack([whole[name] for _, whole in measured]) for name in measured[0][1]}
    whole = {name: values.amax() if "gain" in name else values.amin() for name, values in of_chains.items()}
    whole["stream_cosine"] = stream_cosine(last_x, tokens).to(device)
    return per_sublayer, whole


def _measure_chain(pre_LTN: Tensor, post_LTN: Tensor, res_LTOI: Tensor) -> tuple[Numbers, Numbers]:
    streams = res_LTOI.shape[-1]
    identity = torch.eye(streams, dtype=res_LTOI.dtype, device=res_LTOI.device)
    uniform = torch.full_like(identity, 1 / streams)
    prefixes, suffixes = products_from_first(res_LTOI), products_to_last(res_LTOI)
    survived = _distance(prefixes, uniform) > _distance(identity, uniform) / 2
    per_sublayer = {
        "row_error_max": _largest(res_LTOI.sum(-1) - 1),
        "column_error_max": _largest(res_LTOI.sum(-2) - 1),
        "identity_distance": _distance(res_LTOI, identity).mean(-1),
        "uniform_distance": _distance(res_LTOI, uniform).mean(-1),
        "prefix_gain_forward": _forward_gain(prefixes),
        "suffix_gain_backward": _backward_gain(suffixes),
    }
    for name, values in (("pre", pre_LTN), ("post", post_LTN)):
        per_sublayer[f"{name}_min"] = values.amin((1, 2))
        per_sublayer[f"{name}_mean"] = values.mean((1, 2))
        per_sublayer[f"{name}_max"] = values.amax((1, 2))
    whole = {
        "composite_gain_forward": _forward_gain(prefixes[-1:])[0],
        "composite_gain_backward": _backward_gain(prefixes[-1:])[0],
        "composite_uniform_distance": _distance(prefixes[-1], uniform).mean(),
        "mixing_depth": survived.to(res_LTOI.dtype).mean(-1).sum(),
    }
    return per_sublayer, whole


def products_from_first(res_LTOI: Tensor) -> Tensor:
    """H_l ... H_1 for every l, in log2(L) steps."""
    products, covered = res_LTOI, 1
    while covered < len(res_LTOI):
        products = torch.cat([products[:covered], _times(products[covered:], products[:-covered])])
        covered *= 2
    return products


def products_to_last(res_LTOI: Tensor) -> Tensor:
    """H_L ... H_l for every l."""
    products, covered = res_LTOI, 1
    while covered < len(res_LTOI):
        products = torch.cat([_times(products[covered:], products[:-covered]), products[-covered:]])
        covered *= 2
    return products


def _times(left: Tensor, right: Tensor) -> Tensor:
    return (left.unsqueeze(-1) * right.unsqueeze(-3)).sum(-2)


def _forward_gain(h_LTOI: Tensor) -> Tensor:
    return _largest(h_LTOI.abs().sum(-1))


def _backward_gain(h_LTOI: Tensor) -> Tensor:
    return _largest(h_LTOI.abs().sum(-2))


def _largest(values_LTN: Tensor) -> Tensor:
    return values_LTN.abs().amax((1, 2))


def _distance(h: Tensor, target: Tensor) -> Tensor:
    return (h - target).square().sum((-2, -1)).sqrt()


def stream_cosine(x: Tensor, tokens: int) -> Tensor:
    """Mean cosine of the angles between two different streams; 1 where there is but one."""
    x_TNC = _sampled(x, 2, chosen(math.prod(x.shape[:-2]), tokens, x.device))
    streams = x_TNC.shape[1]
    if streams == 1:
        return torch.ones((), device=x_TNC.device)
    wide = x_TNC.to(torch.promote_types(x_TNC.dtype, torch.float32))
    directions = torch.nn.functional.normalize(wide, dim=-1)
    # The squared length of the sum holds each pair twice, and each stream with itself.
    return ((directions.sum(1).square().sum(-1) - streams) / (streams * (streams - 1))).mean()


def _stacked(chain: list[Mix], tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """pre, post [L, T, N] and res [L, T, N, N] of the sampled tokens; no map is the identity."""
    *lead, streams = chain[0].pre.shape
    index = chosen(math.prod(lead), tokens, device)
    identity = torch.eye(streams, dtype=chain[0].pre.dtype, device=device).expand(len(index), -1, -1)
    pre = [_sampled(mix.pre, 1, index) for mix in chain]
    post = [_sampled(mix.post, 1, index) for mix in chain]
    res = [identity if mix.res is None else _sampled(mix.res, 2, index) for mix in chain]
    return torch.stack(pre), torch.stack(post), torch.stack(res)


def _sampled(values: Tensor, trailing: int, index: Tensor) -> Tensor:
    """Some tokens of [..., (trailing dimensions)], as one dimension, where the index is."""
    flat = values.reshape(-1, *values.shape[values.ndim - trailing :])
    return flat.index_select(0, index.to(flat.device)).to(index.device)


def _count_nonfinite(mix: Mix) -> Tensor:
    """Over all tokens: one that is missed would be the one that was looked for."""
    return torch.stack([part.isfinite().logical_not().sum() for part in mix if part is not None]).sum()
