"""A Recipe as the kernels see it: one compile-time constant per fact they branch on.

The sizes, the kinds and the epsilons are read inside kernels as ``MATH.streams``, ``MATH.residual == "sinkhorn"`` and
so on, and cost nothing at run time. Triton tells compiled kernels apart, on disk too, by the repr of their constants:
it names every value, the derived ones as well, and is worked out once. Within a process there is one Math per recipe,
compared by identity: launches look kernels up by it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from mhckit.recipe import Recipe

from ._launch import packed_dz_width, power_of_2

# Iterations of Sinkhorn before which the backward keeps the matrix in registers. They are unrolled: more take longer to
# compile and more registers, fewer are run again more often.
SEGMENT_ITERATIONS = 4
# The same where a kernel does nothing else, and nothing hides the time that it takes, for up to 4 streams; more, and
# logarithms, take more registers.
LONG_SEGMENT_ITERATIONS, LONG_SEGMENT_LOG_ITERATIONS = 20, 10


@dataclass(frozen=True, repr=False, eq=False)
class Math:
    """Attributes that are not a Recipe's own: the ``padded_*`` sizes are the powers of two that Triton wants, and
    ``part_columns`` is the width of a token's packed dz (see `_pack`).

    pre: "sigmoid", "normalized", "free", or "given" where there are no coefficients.
    post: "sigmoid", "free" or "none" (a head has no write weights).
    residual: the recipe's residual map, "none", or "logits": the logits themselves are wanted.
    transposed: the matrix is stored [in, out].
    log_space: Sinkhorn runs on log R. A softmax takes the place of the first row step; with `first_cols` the column
    step that belongs to it is done beside the `iterations` that follow, in `segments` of `segment_iterations`: at most
    `longest_segment`, or what is usual if that is 0.
    """

    streams: int
    pre: str
    post: str
    residual: str
    logits: int
    dynamic: bool = True
    init: str = "exp"
    rows_first: bool = False
    log_space: bool = True
    first_cols: bool = False
    iterations: int = 1
    eps: float = 0.0
    eps_mode: str = "none"
    transposed: bool = False
    norm_eps: float = 1e-6
    norm_eps_inside: bool = True
    pre_eps: float = 0.0
    normalized_pre_eps: float = 0.0
    post_scale: float = 1.0
    post_eps: float = 0.0
    round_mix: bool = False
    longest_segment: int = 0

    def __post_init__(self) -> None:
        segment = min(max(self.iterations, 1), self.longest_segment or SEGMENT_ITERATIONS)
        rows = 0 if self.pre == "given" else self.streams * (1 if self.post == "none" else 2) + self.logits
        derived = dict(
            padded_streams=power_of_2(self.streams),
            padded_logits=power_of_2(max(self.logits, 1)),
            flat=self.residual in ("permutation", "logits"),
            rows=rows,
            part_columns=packed_dz_width(rows),
            segment_iterations=segment,
            segments=-(-self.iterations // segment),
            log_eps=math.log(self.eps) if self.eps else -math.inf,
        )
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_repr", f"Math({', '.join(f'{k}={v}' for k, v in vars(self).items())})")

    def __repr__(self) -> str:
        return self._repr


@functools.cache
def with_long_segments(math: Math) -> Math:
    """For the backward of the residual map in a kernel that does not wait for the streams meanwhile."""
    longest = LONG_SEGMENT_LOG_ITERATIONS if math.log_space else LONG_SEGMENT_ITERATIONS
    return dataclasses.replace(math, longest_segment=longest * 4 // max(4, math.padded_streams))


@functools.lru_cache(maxsize=1024)
def math_of(recipe: Recipe, *, residual: str | None = None) -> Math:
    """The coefficients of a recipe; with ``residual="logits"`` without the residual map."""
    free, logits_only = recipe.residual == "free", residual == "logits"
    residual = "logits" if logits_only and recipe.residual_logits else recipe.residual
    softmax = recipe.init == "softmax"
    return Math(
        streams=recipe.streams,
        pre="free" if free else "normalized" if recipe.normalized_pre else "sigmoid",
        post="free" if free else "sigmoid",
        residual=residual,
        logits=recipe.residual_logits,
        dynamic=recipe.dynamic,
        init=recipe.init,
        rows_first=recipe.order == "rows",
        log_space=recipe.init in ("exp", "exp_minus_max"),
        first_cols=softmax,
        iterations=recipe.iterations - softmax,
        eps=recipe.eps,
        eps_mode=recipe.eps_mode,
        transposed=recipe.stored == "in_out",
        norm_eps=recipe.norm_eps,
        norm_eps_inside=recipe.norm_eps_position == "inside",
        pre_eps=recipe.pre_eps,
        normalized_pre_eps=recipe.normalized_pre_eps,
        post_scale=recipe.post_scale,
        post_eps=recipe.post_eps,
        round_mix=recipe.round_mix and not logits_only,
    )


@functools.lru_cache(maxsize=1024)
def math_of_head(recipe: Recipe) -> Math:
    """A learned head: read weights alone, always through a sigmoid and never normalised."""
    return Math(
        streams=recipe.streams,
        pre="sigmoid",
        post="none",
        residual="none",
        logits=0,
        norm_eps=recipe.norm_eps,
        norm_eps_inside=recipe.norm_eps_position == "inside",
        pre_eps=recipe.pre_eps,
    )


@functools.lru_cache(maxsize=64)
def math_of_streams(streams: int) -> Math:
    """No coefficients at all: given weights collapse the streams."""
    return Math(streams=streams, pre="given", post="none", residual="none", logits=0)
