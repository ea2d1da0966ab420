r"""Leave: the last write-back of a chain, with no sublayer after it.

    y = res x + post (f + b)

It is `post` with the coefficients taken from a Mix, and runs as that operator.
"""

from __future__ import annotations

from torch import Tensor

from mhckit.recipe import Recipe

from ._check import Checked, check_mix, check_streams
from .mix import Mix
from .post import post

_checked = Checked()


def leave(x: Tensor, f: Tensor, mix: Mix, *, recipe: Recipe, f_bias: Tensor | None = None) -> Tensor:
    """Write the last sublayer's output into the streams.

    Args:
        x: the streams the sublayer read from [..., N, C].
        f: the sublayer's output [..., C].
        mix: the sublayer's Mix, from the last ``junction`` (or ``enter``).
        recipe: the math.
        f_bias: [C], the sublayer's last bias, added to f on the way.

    Returns:
        y [..., N, C], which ``head`` collapses.
    """
    given = (x, *(mix if type(mix) is Mix else (mix,)))
    if not _checked.passed(given, recipe):
        check_streams(x, recipe)
        mix = check_mix(mix, x, recipe)
        _checked.remember(given, recipe)
    return post(x, f, mix.post, mix.res, f_bias=f_bias)
