"""Recipe: the whole math of one kind of hyper-connection, as one frozen value.

Two systems that both "use mHC" differ in the order of Sinkhorn's steps, in where an eps goes, in whether a matrix is
stored [out, in] or [in, out]. None of that is a detail: a checkpoint trained with one recipe is wrong under another.
So every choice is a field here, and every published system is a preset:

    recipe = Recipe.preset("deepseek_v4")
    recipe = Recipe.preset("deepseek_v4", streams=2, iterations=10)

The operators never branch on a preset's name, only on the fields.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

ResidualMap = Literal["sinkhorn", "projection", "permutation", "identity", "free"]
Init = Literal["exp", "exp_minus_max", "softmax", "abs"]
Order = Literal["cols", "rows"]
EpsMode = Literal["none", "add", "clamp", "guard"]
Stored = Literal["out_in", "in_out"]
NormEpsPosition = Literal["inside", "outside"]
Head = Literal["mean", "learned", "last_pre"]

MAX_PERMUTATION_STREAMS = 5

# What each start of Sinkhorn may be combined with: eps modes, orders.
_INIT_RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "exp": (get_args(EpsMode), get_args(Order), ""),
    "exp_minus_max": (
        ("clamp", "guard"),
        ("rows",),
        "subtracting the row maximum is exact only when rows come first and eps is not added; otherwise use init='exp'",
    ),
    "softmax": (
        ("add",),
        ("rows",),
        "the softmax is the first row step and eps is added to it; softmax without eps is init='exp', order='rows'",
    ),
    "abs": (("add",), get_args(Order), "without an added eps a row of zeros has no normalisation"),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The math of one kind of hyper-connection; hashable, comparable, validated on construction.

    Attributes:
        streams: N, the number of parallel residual streams.
        residual: how logits become the matrix that mixes the streams. ``"sinkhorn"``: doubly stochastic by finite
            iteration; ``"projection"``: what that iteration tends to, doubly stochastic within 1e-6;
            ``"permutation"``: a convex combination of the N! permutation matrices (mHC-lite, N <= 5);
            ``"identity"``: streams are not mixed (Hy-V4); ``"free"``: unconstrained, the original HC.
        init, order, iterations, eps, eps_mode: of ``residual="sinkhorn"`` alone; the other maps ignore them.
        init: Sinkhorn starts from ``exp(L)``, ``exp(L - rowmax)``, ``softmax(L) + eps`` (which takes the place of the
            first row step) or ``abs(L) + eps``.
        order: which sums are normalised first in each iteration.
        iterations: how often rows and columns are normalised.
        eps, eps_mode: a sum s divides as ``s`` (none), ``s + eps`` (add), ``max(s, eps)`` (clamp), or, if s > eps, as
            ``s`` with other rows left alone and other columns zeroed (guard).
        stored: orientation in which the N x N logits are stored. The operators always return [out, in].
        norm_eps, norm_eps_position: the projection is divided by ``sqrt(ms + eps)`` (inside) or ``sqrt(ms) + eps``
            (outside), with ms the mean square of the token's streams.
        pre_eps: added to ``sigmoid(logits)`` of the read weights (and of a learned head).
        normalized_pre, normalized_pre_eps: divide the read weights by ``their sum + eps``.
        post_scale, post_eps: write weights are ``post_scale * sigmoid(logits) + post_eps``.
        shifted: a sublayer reads with the *previous* sublayer's pre (single-pass, DeepSeek-V4.1); the first reads
            stream 0.
        head: how the streams become one vector after the last sublayer: their mean, learned weights per token, or the
            last sublayer's pre (only with ``shifted``). Systems that define no head get the paper's mean.
        dynamic: coefficients computed per token; False makes ``bias`` itself the logits (static).
        round_mix: round post and the residual matrix to the dtype of the streams, as Hugging Face's eager code does
            before it mixes. For comparisons: nearer to it, not equal, since it rounds its products too. Gradients pass
            through the rounding.
    """

    # The defaults are the paper's. Keys leave them out, so saved models rely on them: a new field may be added with the
    # value that keeps old recipes as they are, but no default may change.
    streams: int = 4
    residual: ResidualMap = "sinkhorn"
    init: Init = "exp"
    order: Order = "cols"
    iterations: int = 20
    eps: float = 0.0
    eps_mode: EpsMode = "none"
    stored: Stored = "out_in"
    norm_eps: float = 1e-20
    norm_eps_position: NormEpsPosition = "inside"
    pre_eps: float = 0.0
    normalized_pre: bool = False
    normalized_pre_eps: float = 1e-8
    post_scale: float = 2.0
    post_eps: float = 0.0
    shifted: bool = False
    head: Head = "mean"
    dynamic: bool = True
    round_mix: bool = False

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Recipe:
        """The recipe of a published system (``Recipe.presets()`` lists the names), with single fields replaced.

        ``dynamic=False`` here gives a system's own static form where that differs in more (mhc_triton's post_scale).
        Presets are math, not memory layout: Transformer Engine keeps streams last, [..., C, N], with the columns of phi
        ordered c*N + i, and its tensors must be permuted to [..., N, C] and i*C + c. Megatron and mHC.cu iterate in
        linear float32, which loses columns that underflow; here the same iteration is exact for any logits.
        """
        if name not in _PRESETS:
            raise ValueError(f"unknown preset {name!r}; known presets: {', '.join(_PRESETS)}")
        fields = dict(_PRESETS[name])
        if overrides.get("dynamic") is False:
            fields |= _STATIC_FORM.get(name, {})
        return cls(**_known_fields(fields | overrides))

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names accepted by ``Recipe.preset``."""
        return tuple(_PRESETS)

    def replace(self, **overrides: Any) -> Recipe:
        """The same recipe with single fields replaced, validated again."""
        return dataclasses.replace(self, **_known_fields(overrides))

    @property
    def residual_logits(self) -> int:
        """Logits per token for the residual map: N^2, N! or 0."""
        return self._residual_logits  # type: ignore[attr-defined]

    @property
    def rows(self) -> int:
        """P, the rows of phi and the length of bias: N for pre, N for post, then the residual map's."""
        return 2 * self.streams + self.residual_logits

    @property
    def groups(self) -> tuple[int, ...]:
        """How the P rows are grouped; each group has one entry of scale."""
        return (self.streams, self.streams, *([self.residual_logits] if self.residual_logits else []))

    @property
    def key(self) -> str:
        """The recipe as text, such as "residual=identity norm_eps=1e-05": the fields that differ from the defaults.

        The form in which a recipe passes through an operator schema; ``Recipe.from_key`` reads it back.
        """
        return self._key  # type: ignore[attr-defined]

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def from_key(cls, key: str) -> Recipe:
        """The recipe that has this key; fields that the key does not name have their defaults."""
        return cls(**{name: _parse(name, text) for name, text in (part.split("=") for part in key.split())})

    def __post_init__(self) -> None:
        _check_types(self)
        _check_ranges(self)
        _check_combinations(self)
        # Derived once: torch.compile reads them as constants, and operators are called often.
        object.__setattr__(self, "_key", _describe(self))
        object.__setattr__(self, "_residual_logits", _count_residual_logits(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Recipe.from_key, (self.key,)


def softmax_start(eps: float) -> dict[str, Any]:
    """Fields of a Sinkhorn that starts from softmax + eps. Without eps the softmax is exp and an ordinary row step."""
    if eps:
        return {"init": "softmax", "eps": eps, "eps_mode": "add"}
    return {"init": "exp", "eps": 0.0, "eps_mode": "none"}


def as_recipe(recipe: Recipe | str) -> Recipe:
    """A Recipe, or the preset of that name."""
    if isinstance(recipe, str):
        return Recipe.preset(recipe)
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a Recipe or the name of a preset, got {type(recipe).__name__}")
    return recipe


def _describe(recipe: Recipe) -> str:
    values = {field.name: (getattr(recipe, field.name), field.default) for field in dataclasses.fields(Recipe)}
    return " ".join(f"{name}={value}" for name, (value, default) in values.items() if value != default)


def _parse(name: str, text: str) -> Any:
    """The value of a field from its text, by the type of the field's default."""
    defaults = {field.name: field.default for field in dataclasses.fields(Recipe)}
    if name not in defaults:
        raise ValueError(f"a recipe from another version of mhckit: this one has no field {name!r}")
    kind = type(defaults[name])
    return text == "True" if kind is bool else kind(text)


def _count_residual_logits(recipe: Recipe) -> int:
    if recipe.residual == "identity":
        return 0
    return math.factorial(recipe.streams) if recipe.residual == "permutation" else recipe.streams**2


def _known_fields(fields: dict[str, Any]) -> dict[str, Any]:
    known = [field.name for field in dataclasses.fields(Recipe)]
    for name in fields:
        if name not in known:
            raise TypeError(f"Recipe has no field {name!r}; fields: {', '.join(known)}")
    return fields


_CHOICES = {
    "residual": get_args(ResidualMap),
    "init": get_args(Init),
    "order": get_args(Order),
    "eps_mode": get_args(EpsMode),
    "stored": get_args(Stored),
    "norm_eps_position": get_args(NormEpsPosition),
    "head": get_args(Head),
}


def _check_types(recipe: Recipe) -> None:
    for field in dataclasses.fields(Recipe):
        name, value, default = field.name, getattr(recipe, field.name), field.default
        if name in _CHOICES:
            if value not in _CHOICES[name]:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, _CHOICES[name]))}, got {value!r}")
        elif isinstance(default, bool):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be a bool, got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int if isinstance(default, int) else (int, float)):
            raise TypeError(f"{name} must be {'an int' if isinstance(default, int) else 'a number'}, got {value!r}")
        elif isinstance(default, float):
            object.__setattr__(recipe, name, float(value))


def _check_ranges(recipe: Recipe) -> None:
    for name in ("streams", "iterations"):
        if getattr(recipe, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(recipe, name)}")
    for name in ("norm_eps", "post_scale", "normalized_pre_eps"):
        if not 0 < getattr(recipe, name) < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {getattr(recipe, name)}")
    for name in ("eps", "pre_eps", "post_eps"):
        if not 0 <= getattr(recipe, name) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(recipe, name)}")


def _check_combinations(recipe: Recipe) -> None:
    if recipe.residual == "sinkhorn":
        _check_sinkhorn(recipe)
    if recipe.residual == "permutation" and recipe.streams > MAX_PERMUTATION_STREAMS:
        raise ValueError(
            f"residual='permutation' needs N! logits per token and allows streams <= {MAX_PERMUTATION_STREAMS}, "
            f"got streams={recipe.streams}"
        )
    if recipe.residual == "free" and (recipe.pre_eps or recipe.post_eps or recipe.normalized_pre):
        raise ValueError("residual='free' has no sigmoids: pre_eps and post_eps must be 0 and normalized_pre False")
    if recipe.head == "last_pre" and not recipe.shifted:
        raise ValueError("head='last_pre' collapses with the pre that a shifted recipe carries: it needs shifted=True")


def _check_sinkhorn(recipe: Recipe) -> None:
    eps_modes, orders, why = _INIT_RULES[recipe.init]
    for name, allowed in (("eps_mode", eps_modes), ("order", orders)):
        if getattr(recipe, name) not in allowed:
            raise ValueError(
                f"init={recipe.init!r} needs {name} in {', '.join(map(repr, allowed))}, "
                f"got {getattr(recipe, name)!r}: {why}"
            )
    if (recipe.eps > 0) != (recipe.eps_mode != "none"):
        raise ValueError(
            f"eps={recipe.eps} and eps_mode={recipe.eps_mode!r} contradict each other: "
            "eps_mode='none' goes with eps=0, every other mode with eps > 0"
        )


_DEEPSEEK_V4: dict[str, Any] = dict(
    init="softmax", order="rows", eps=1e-6, eps_mode="add", stored="in_out", norm_eps=1e-6, pre_eps=1e-6, head="learned"
)
_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_v41": _DEEPSEEK_V4 | dict(shifted=True, head="last_pre"),
    "glm5_next": _DEEPSEEK_V4 | dict(norm_eps=1e-5, head="mean"),
    "hy_v4": dict(residual="identity", norm_eps=1e-5, pre_eps=1e-6, post_eps=1e-6, head="learned"),
    "liger": dict(init="softmax", order="rows", eps=1e-6, eps_mode="add", norm_eps=1e-6),
    "transformer_engine": dict(order="rows", stored="in_out", norm_eps=2.0**-23),
    "megatron": dict(
        init="exp_minus_max", order="rows", eps=1e-6, eps_mode="clamp", norm_eps=1e-6, norm_eps_position="outside"
    ),
    "mhc_cu": dict(order="rows", eps=1e-5, eps_mode="guard", norm_eps=1e-5),
    "mhc_triton": dict(init="abs", order="rows", eps=1e-8, eps_mode="add", norm_eps=1e-6, normalized_pre=True),
    "mhc_lite": dict(residual="permutation", norm_eps=1e-6),
    "hc": dict(residual="free", norm_eps=1e-6),
}
# What a system changes when its coefficients are static.
_STATIC_FORM: dict[str, dict[str, Any]] = {"mhc_triton": dict(post_scale=1.0)}
