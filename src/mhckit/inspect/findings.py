"""What the numbers mean, in plain language: each check says what is wrong, or that all is well.

Distances to the identity and to the uniform matrix are given as parts of the distance between these two, sqrt(N - 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from mhckit.recipe import Recipe

from .measured import Finding, Spread, Sublayer

FROZEN = 0.02  # part of the way from the identity to uniform; a new model of mhckit is at 0.07
UNIFORM = 0.05  # part of the way back
SUMS_NOTE, SUMS_WRONG = 1e-2, 1e-1  # row and column sums off
GAIN_NOTE, GAIN_WRONG = 1.6, 4.0  # the mHC paper saw 1.6 in a 27B model with mHC, and 3000 without
UNUSED = 0.01  # share of a stream in what any sublayer reads or writes
SATURATED = 0.01  # part of the range of a sigmoid that counts as its end, where hardly any gradient is left
ALIKE = 0.99  # cosine between streams
NOT_FINITE = "a value that is NaN or infinite"
SHOWN_NAMES = 3

Level = Literal["wrong", "note"]
Sublayers = Sequence[Sublayer]


def find(sublayers: Sublayers, recipe: Recipe, loss: float | None) -> list[Finding]:
    """What is wrong first, then notes, then what is well. Of sublayers with values that are no numbers, only that."""
    broken = list(_nonfinite(sublayers, loss))
    sound = [each for each in sublayers if not each.nonfinite and _all_finite(each)]
    found = list(broken)
    if sound:
        for check in _checks(recipe):
            found += check(sound, recipe)
    if broken:
        found = [finding for finding in found if finding.level != "good"]
    else:
        found.append(Finding("good", "", "Every value is finite.", NOT_FINITE))
    return sorted(found, key=lambda finding: ("wrong", "note", "good").index(finding.level))


def _checks(recipe: Recipe) -> list[Callable[[Sublayers, Recipe], Iterator[Finding]]]:
    """Those that a recipe can fail: one stream has nothing to mix, and some maps promise nothing."""
    checks: list[Callable[[Sublayers, Recipe], Iterator[Finding]]] = []
    mixes = recipe.residual != "identity" and recipe.streams > 1
    if mixes:
        checks += [_mixing]
    if mixes and recipe.residual != "free":
        checks += [_sums]
    if mixes:
        checks += [_gain]
    if recipe.streams > 1:
        checks += [_unused, _alike]
    if recipe.streams > 1 and recipe.residual != "free":
        checks += [_saturation]
    return checks


def _nonfinite(sublayers: Sublayers, loss: float | None) -> Iterator[Finding]:
    bad = [each for each in sublayers if each.nonfinite]
    if bad:
        count = sum(each.nonfinite for each in bad)
        yield Finding(
            "wrong",
            bad[0].name,
            f"{count} values are NaN or infinite, first in {bad[0].name} and in {len(bad)} of {len(sublayers)} "
            "sublayers: look at the weights of the first one and at what it reads.",
            NOT_FINITE,
        )
    overflown = [] if bad else [each for each in sublayers if not _all_finite(each)]
    if overflown:
        where = f"in {overflown[0].name} and in {len(overflown)} of {len(sublayers)} sublayers"
        text = f"Coefficients are finite, and so large that what is computed from them is not, {where}."
        yield Finding("wrong", overflown[0].name, text, NOT_FINITE)
    if loss is not None and not math.isfinite(loss):
        yield Finding("wrong", "", f"The loss is {loss}.", NOT_FINITE)


def _mixing(sublayers: Sublayers, recipe: Recipe) -> Iterator[Finding]:
    whole = math.sqrt(recipe.streams - 1)
    frozen = [(each, each.identity_distance / whole) for each in sublayers if each.identity_distance < FROZEN * whole]
    uniform = [(each, each.uniform_distance / whole) for each in sublayers if each.uniform_distance < UNIFORM * whole]
    yield from _grouped(
        "note",
        frozen,
        len(sublayers),
        lambda worst: f"Mixing is frozen at the identity (distance {worst:.2g}): each stream keeps to itself.",
        f"H closer to the identity than {FROZEN} of its distance to uniform",
        most=False,
    )
    yield from _grouped(
        "wrong",
        uniform,
        len(sublayers),
        lambda worst: f"Mixing is uniform (distance {worst:.2g}): all streams become their mean, as if there were one.",
        f"H closer to uniform than {UNIFORM} of its distance to the identity",
        most=False,
    )
    if not frozen and not uniform:
        nearest = min(min(each.identity_distance, each.uniform_distance) for each in sublayers) / whole
        text = f"Every H mixes the streams and none makes them one: the nearest to an extreme is {nearest:.2g} away."
        yield Finding("good", "", text, f"{FROZEN} from the identity, {UNIFORM} from uniform")


def _sums(sublayers: Sublayers, recipe: Recipe) -> Iterator[Finding]:
    found = False
    for side in ("row", "column"):
        errors = [(each, each.row_error if side == "row" else each.column_error) for each in sublayers]
        for level, low, high in (("wrong", SUMS_WRONG, math.inf), ("note", SUMS_NOTE, SUMS_WRONG)):
            off = [(each, error) for each, error in errors if low < error <= high]
            found |= bool(off)
            yield from _grouped(
                level, off, len(sublayers), _sum_text(side, recipe), f"{side} sums off by more than {low:g}"
            )
    if not found:
        worst = max(max(each.row_error, each.column_error) for each in sublayers)
        text = f"H is doubly stochastic: rows and columns sum to 1 within {worst:.1g}."
        yield Finding("good", "", text, f"sums off by more than {SUMS_NOTE:g}")


def _sum_text(side: str, recipe: Recipe) -> Callable[[float], str]:
    # What starts from |L| does not mind their size, but how much larger one is than another.
    what = "too unequal" if recipe.init == "abs" else "too large"
    iterations = f"{recipe.iterations} iteration{'s' if recipe.iterations != 1 else ''}"
    why = f": logits {what} for {iterations}" if recipe.residual == "sinkhorn" else ""
    return lambda worst: f"{side.capitalize()} sums are off by {worst:.2g}{why}."


def _gain(sublayers: Sublayers, _recipe: Recipe) -> Iterator[Finding]:
    largest = {
        "forward": max(sublayers, key=lambda each: each.gain_forward),
        "backward": max(sublayers, key=lambda each: each.gain_backward),
    }
    found = False
    for direction, sublayer in largest.items():
        gain = sublayer.gain_forward if direction == "forward" else sublayer.gain_backward
        if gain > GAIN_NOTE:
            found = True
            wrong = gain > GAIN_WRONG
            what = (
                "a signal may grow on its way to"
                if direction == "forward"
                else "a gradient may grow on its way back to"
            )
            text = f"The composite gain {direction} reaches {gain:.3g}: {what} {sublayer.name}."
            limit = GAIN_WRONG if wrong else GAIN_NOTE
            yield Finding("wrong" if wrong else "note", sublayer.name, text, f"composite gain above {limit:g}")
    if not found:
        most = max(largest["forward"].gain_forward, largest["backward"].gain_backward)
        yield Finding("good", "", f"The composite gain stays at {most:.3g}.", f"composite gain above {GAIN_NOTE:g}")


def _unused(sublayers: Sublayers, recipe: Recipe) -> Iterator[Finding]:
    found = False
    for verb, shares in (
        ("read", [each.reads for each in sublayers]),
        ("written", [each.writes for each in sublayers]),
    ):
        for stream in range(recipe.streams):
            most = max(share[stream] for share in shares)
            if most < UNUSED:
                found = True
                text = f"Stream {stream} is never {verb}: its share is {most:.2g} at most, in any sublayer."
                yield Finding("wrong", "", text, f"a share below {UNUSED:g} in every sublayer")
    if not found:
        text = "Every stream is read by some sublayer, and written by some."
        yield Finding("good", "", text, f"a share below {UNUSED:g} in every sublayer")


def _saturation(sublayers: Sublayers, recipe: Recipe) -> Iterator[Finding]:
    found = False
    kinds = [("post", recipe.post_eps, recipe.post_scale)]
    if not recipe.normalized_pre:
        kinds.insert(0, ("pre", recipe.pre_eps, 1.0))
    for kind, low, width in kinds:
        counts = []
        for each in sublayers:
            spreads = each.pre if kind == "pre" else each.post
            counts.append((each, sum(_is_saturated(spread, low, width) for spread in spreads)))
        for level, chosen in (
            ("wrong", [(each, count) for each, count in counts if count == recipe.streams]),
            ("note", [(each, count) for each, count in counts if 0 < count < recipe.streams]),
        ):
            found |= bool(chosen)
            yield from _grouped(
                level,
                chosen,
                len(sublayers),
                lambda worst, kind=kind: (
                    f"{kind} is saturated for {worst:g} of {recipe.streams} streams: "
                    "it stands at an end of its range for almost every token, and can hardly learn."
                ),
                f"{kind} within {SATURATED:g} of an end of its range for 95% of the tokens",
            )
    if not found:
        text = f"{' and '.join(kind for kind, *_ in kinds)} can learn: none stands at an end of its range."
        yield Finding("good", "", text, f"within {SATURATED:g} of an end of the range for 95% of the tokens")


def _is_saturated(spread: Spread, low: float, width: float) -> bool:
    _, five, *_, ninety_five, _ = ((quantile - low) / width for quantile in spread.quantiles)
    return ninety_five < SATURATED or five > 1 - SATURATED


def _alike(sublayers: Sublayers, _recipe: Recipe) -> Iterator[Finding]:
    least = min(each.similarity for each in sublayers)
    threshold = f"a cosine above {ALIKE:g} after every sublayer"
    if least > ALIKE:
        text = f"The streams are nearly alike at every depth (cosine {least:.4f} or more): they do the work of one."
        yield Finding("note", "", text, threshold)
    else:
        yield Finding("good", "", f"The streams differ: their cosine falls to {least:.2f}.", threshold)


def _grouped(
    level: str,
    found: Sequence[tuple[Sublayer, float]],
    total: int,
    text: Callable[[float], str],
    threshold: str,
    *,
    most: bool = True,
) -> Iterator[Finding]:
    """One finding for all sublayers of a kind; it names the worst one, and a few of the others."""
    if not found:
        return
    worst, value = (max if most else min)(found, key=lambda pair: pair[1])
    if len(found) > 1:
        others = [each.name for each, _ in found if each is not worst][:SHOWN_NAMES]
        more = ", ..." if len(found) - 1 > len(others) else ""
        where = f" Worst in {worst.name}; in {len(found)} of {total} sublayers, also {', '.join(others)}{more}."
    else:
        where = f" In {worst.name}."
    yield Finding(level, worst.name, text(value) + where, threshold)


def _all_finite(sublayer: Sublayer) -> bool:
    """Coefficients that are NaN or infinite, and products of large ones that overflow, are in one of these."""
    return all(
        math.isfinite(value)
        for value in (
            sublayer.gain_forward,
            sublayer.gain_backward,
            sublayer.identity_distance,
            sublayer.uniform_distance,
            sublayer.similarity,
            sublayer.row_error,
            sublayer.column_error,
            *sublayer.reads,
            *sublayer.writes,
        )
    )
