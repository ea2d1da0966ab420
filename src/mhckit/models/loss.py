"""The mean next-token loss from hidden states, with or without the logits of all tokens at once in memory.

    full       logits [T, V] in float32, as torch computes it
    chunked    the same, a chunk of tokens at a time; backward computes each chunk's logits again
    fused      a chunk at a time, gradients included: forward leaves dh and dW, and backward scales them

T tokens; C channels; V words of the vocabulary. A target of IGNORED counts neither in the sum nor in the mean.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Loss = Literal["full", "chunked", "fused"]
IGNORED = -100
CHUNK = 2048


def next_token_loss(h: Tensor, weight: Tensor, targets: Tensor, kind: Loss = "full", chunk: int = CHUNK) -> Tensor:
    """Cross entropy of the logits ``h @ weight.T`` [..., V] with the targets [...]; a float32 scalar."""
    check_loss(kind)
    if targets.shape != h.shape[:-1]:
        raise ValueError(f"targets must be [...] = {tuple(h.shape[:-1])} as h [..., C], got {tuple(targets.shape)}")
    h_TC, targets_T = h.flatten(0, -2), targets.flatten()
    count = (targets_T != IGNORED).sum().clamp(min=1)
    if kind == "full":
        return _sum(h_TC, weight, targets_T) / count
    if kind == "fused":
        return _Fused.apply(h_TC, weight, targets_T, chunk) / count  # type: ignore[no-any-return]
    sums: list[Any] = [
        checkpoint(_sum, h_chunk, weight, targets_chunk, use_reentrant=False)
        for h_chunk, targets_chunk in zip(h_TC.split(chunk), targets_T.split(chunk), strict=True)
    ]
    return torch.stack(sums).sum() / count


def check_loss(kind: str) -> None:
    if kind not in get_args(Loss):
        raise ValueError(f"loss must be one of {', '.join(get_args(Loss))}, got {kind!r}")


def _logits(h: Tensor, weight: Tensor) -> Tensor:
    """Of float32, or float64 for float64 hidden states; the product is taken in the dtype of h."""
    wide = torch.promote_types(h.dtype, torch.float32)
    return functional.linear(h, weight.to(h.dtype)).to(wide)


def _sum(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(_logits(h, weight), targets, ignore_index=IGNORED, reduction="sum")


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        wide = torch.promote_types(h.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=h.device)
        dh, dweight = torch.empty_like(h), torch.zeros_like(weight, dtype=wide)
        narrow = weight.to(h.dtype)
        for begin in range(0, h.shape[0], chunk):
            part, wanted = h[begin : begin + chunk], targets[begin : begin + chunk]
            log_probabilities = functional.log_softmax(functional.linear(part, narrow).to(wide), -1)
            total += functional.nll_loss(log_probabilities, wanted, ignore_index=IGNORED, reduction="sum")
            counted = wanted != IGNORED
            dlogits = log_probabilities.exp_()
            dlogits[torch.arange(len(wanted), device=h.device), wanted.clamp(min=0)] -= 1
            dlogits = (dlogits * counted[:, None]).to(h.dtype)
            dh[begin : begin + chunk] = dlogits @ narrow
            dweight += dlogits.T @ part
        ctx.save_for_backward(dh, dweight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dh, dweight = ctx.saved_tensors
        return (dh * gradient).to(dh.dtype), (dweight * gradient).to(ctx.weight_dtype), None, None
