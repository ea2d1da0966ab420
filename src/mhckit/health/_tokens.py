"""Which tokens are looked at, where all would cost too much."""

from __future__ import annotations

import torch
from torch import Tensor


def chosen(count: int, most: int, device: torch.device) -> Tensor:
    """Indices of at most `most` of `count` tokens, evenly spaced.

    Where not all, a prime number of them: then sequences of a batch are met at evenly spaced positions as well, and not
    all at the first one, as 256 of 256 sequences would be (unless their number is a multiple of the prime).
    """
    number = count if count <= most else largest_prime(most)
    return torch.arange(number, device=device) * count // max(number, 1)


def largest_prime(most: int) -> int:
    """The largest prime that is not above `most`; 1 for 1."""
    candidates = range(most, 1, -1)
    return next((n for n in candidates if all(n % d for d in range(2, int(n**0.5) + 1))), 1)
