"""What instructions compute on their own lane: functions of arrays of 32 lanes, by the name of the instruction.

Registers are kept as unsigned numbers of their width, predicates as bools. Approximate functions are exact here, and a
fused multiply-add rounds twice, first to a float64: it differs from hardware's once in half a billion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Lanes = Any  # an array of 32 numbers
Function = Callable[..., Lanes]

TYPES: dict[str, Any] = {
    "pred": np.dtype(np.bool_),
    **{f"{kind}{bits}": np.dtype(f"{letter}{bits // 8}")
       for kind, letter in (("b", "u"), ("u", "u"), ("s", "i")) for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
}  # fmt: skip


def unsigned(kind: str) -> Any:
    """Of the same width: how registers keep it."""
    kind = {"bf16": "b16", "bf16x2": "b32", "f16x2": "b32", "tf32": "b32"}.get(kind, kind)
    return TYPES[kind] if kind == "pred" else np.dtype(f"u{TYPES[kind].itemsize}")


def round_to_bfloat16(value: Lanes) -> Lanes:
    """The upper 16 bits, to nearest even; a NaN is the one that hardware makes."""
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), rounded)


def widen_bfloat16(bits: Lanes) -> Lanes:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _shift_left(a: Lanes, count: Lanes) -> Lanes:
    bits = 8 * a.dtype.itemsize
    return np.where(count < bits, a << np.minimum(count, bits - 1).astype(a.dtype), 0).astype(a.dtype)


def _shift_right(a: Lanes, count: Lanes) -> Lanes:
    """Signed numbers keep their sign."""
    bits = 8 * a.dtype.itemsize
    if a.dtype.kind == "u":
        return np.where(count < bits, a >> np.minimum(count, bits - 1).astype(a.dtype), 0).astype(a.dtype)
    return a >> np.minimum(count, bits - 1).astype(a.dtype)


def _fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _multiply_high(a: Lanes, b: Lanes) -> Lanes:
    bits = 8 * a.dtype.itemsize
    return np.array([int(x) * int(y) >> bits for x, y in zip(a, b, strict=True)]).astype(a.dtype)


def _prmt(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros(32, np.uint64)
    for k in range(4):
        chosen = (selector >> (4 * k)).astype(np.uint64)
        byte = (both >> ((chosen & np.uint64(7)) * np.uint64(8))) & np.uint64(0xFF)
        sign = np.where(byte >> np.uint64(7), np.uint64(0xFF), np.uint64(0))
        result |= np.where(chosen & np.uint64(8), sign, byte) << np.uint64(8 * k)
    return result.astype(np.uint32)


def _bit_field(a: Lanes, at: Lanes, length: Lanes) -> Lanes:
    """Behind the last bit a signed number goes on with its sign, and the field's highest bit is its sign."""
    at, length = (np.minimum(np.asarray(k, np.int64) & 0xFF, 32) for k in (at, length))
    field = (a.astype(np.int64) >> at) & ((np.int64(1) << length) - 1)
    if a.dtype.kind == "i":
        negative = (length > 0) & ((field >> np.maximum(length - 1, 0)) & 1 == 1)
        field = np.where(negative, field - (np.int64(1) << length), field)
    return field.astype(a.dtype)


def _least_magnitude(a: Lanes, b: Lanes) -> Lanes:
    """min.xorsign.abs: the sign is the product's."""
    return np.copysign(np.fmin(np.abs(a), np.abs(b)), np.where(np.signbit(a) ^ np.signbit(b), -1.0, 1.0))


def _funnel_left(low: Lanes, high: Lanes, count: Lanes) -> Lanes:
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    return ((both << (count & 31).astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)


_FLOAT_MODIFIERS = {"rn", "ftz"}
# By the beginning of a name: what it computes, the types of its operands, "" for the one that the name ends with, and
# what may stand between. Results have that type, too.
FUNCTIONS: dict[str, tuple[Function, tuple[str, ...], set[str]]] = {
    "mov": (lambda a: a, ("",), set()),
    "cvta": (lambda a: a, ("",), {"param", "to", "global"}),
    "add": (lambda a, b: a + b, ("", ""), _FLOAT_MODIFIERS),
    "sub": (lambda a, b: a - b, ("", ""), _FLOAT_MODIFIERS),
    "mul": (lambda a, b: a * b, ("", ""), {"lo", *_FLOAT_MODIFIERS}),
    "mad": (lambda a, b, c: a * b + c, ("", "", ""), {"lo"}),
    "fma": (_fma, ("", "", ""), _FLOAT_MODIFIERS),
    "div": (lambda a, b: a / b, ("", ""), {"full", "approx", *_FLOAT_MODIFIERS}),
    "rem": (lambda a, b: np.fmod(a, b), ("", ""), set()),
    "neg": (lambda a: -a, ("",), {"ftz"}),
    "abs": (lambda a: np.abs(a), ("",), {"ftz"}),
    "not": (lambda a: ~a, ("",), set()),
    "and": (lambda a, b: a & b, ("", ""), set()),
    "or": (lambda a, b: a | b, ("", ""), set()),
    "xor": (lambda a, b: a ^ b, ("", ""), set()),
    "shl": (_shift_left, ("", "u32"), set()),
    "shr": (_shift_right, ("", "u32"), set()),
    "bfe": (_bit_field, ("", "u32", "u32"), set()),
    "shf": (_funnel_left, ("", "", ""), {"l", "wrap"}),
    "prmt": (_prmt, ("", "", ""), set()),
    "min": (lambda a, b: np.fmin(a, b), ("", ""), {"ftz"}),
    "max": (lambda a, b: np.fmax(a, b), ("", ""), {"ftz"}),
    "selp": (lambda a, b, c: np.where(c, a, b), ("", "", "pred"), set()),
    "ex2": (lambda a: np.exp2(a.astype(np.float64)), ("",), {"approx", "ftz"}),
    "lg2": (lambda a: np.log2(a.astype(np.float64)), ("",), {"approx", "ftz"}),
    "sqrt": (np.sqrt, ("",), {"approx", *_FLOAT_MODIFIERS}),
    "rsqrt": (lambda a: 1 / np.sqrt(a.astype(np.float64)), ("",), {"approx", "ftz"}),
    "rcp": (lambda a: 1 / a.astype(np.float64), ("",), {"approx", *_FLOAT_MODIFIERS}),
}
# Of 32 bits alone.
_ONLY_32 = {"fma", "bfe", "shf", "prmt"}
COMPARISONS: dict[str, Function] = {
    "eq": np.equal, "ne": lambda a, b: (a < b) | (a > b), "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "equ": lambda a, b: ~(a < b) & ~(a > b), "neu": lambda a, b: ~(a == b), "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip


# To whole numbers.
_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _convert(target: str, source: str, how: list[str]) -> Function:
    """From lanes of one type to those of another."""
    how = [each for each in how if each != "ftz"]
    if how and (target, source, how[0]) in {("f32", "f32", each) for each in _WHOLE}:
        return _WHOLE[how[0]]
    roundings = {"tf32": "rna", "s32": "rzi", "u32": "rzi"}
    if how not in ([], [roundings.get(target, "rn")]):
        raise NotImplementedError(f"cvt {how}")
    if target == "bf16x2":
        return lambda high, low: (
            (round_to_bfloat16(high).astype(np.uint32) << 16) | round_to_bfloat16(low).astype(np.uint32)
        )
    if target == "f16x2":
        return lambda high, low: (
            (high.astype(np.float16).view(np.uint16).astype(np.uint32) << 16)
            | low.astype(np.float16).view(np.uint16).astype(np.uint32)
        )
    if target == "tf32":
        return _round_to_tf32
    if target == "bf16":
        return round_to_bfloat16
    if source == "bf16":
        return widen_bfloat16
    kind = TYPES[target]
    if kind.kind in "iu" and source[0] == "f":
        if how != ["rzi"]:
            raise NotImplementedError(f"cvt {how}")
        least, most = np.iinfo(kind).min, np.iinfo(kind).max
        return lambda a: np.where(np.isnan(a), 0, np.clip(np.trunc(a.astype(np.float64)), least, most)).astype(kind)
    return lambda a: a.astype(kind)


def _round_to_tf32(a: Lanes) -> Lanes:
    """Ten bits, to nearest and away from zero, kept as what it is."""
    rounded = (a.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(a), np.uint32(0x7FFFFFFF), rounded).view(np.float32)


def function_of(name: tuple[str, ...], count: int) -> tuple[Function, str, list[str]]:
    """What an instruction with so many operands computes, the type of its result, and those of its operands."""
    function, result, kinds = _known(name)
    if len(kinds) != count or (result in ("bf16", "bf16x2", "f16", "f16x2") and name[0] not in ("cvt", "mov")):
        raise NotImplementedError(".".join(name))
    return function, result, kinds


def _known(name: tuple[str, ...]) -> tuple[Function, str, list[str]]:
    base, *between, kind = name
    if base == "setp" and len(between) == 1 and kind in TYPES:
        comparison = np.not_equal if between == ["ne"] and kind[0] != "f" else COMPARISONS[between[0]]
        return comparison, "pred", [kind, kind]
    if base == "cvt":
        *how, target = between
        return _convert(target, kind, how), target, [kind] * (2 if target.endswith("x2") else 1)
    if name == ("min", "xorsign", "abs", "f32"):
        return _least_magnitude, kind, [kind, kind]
    if base == "mul" and between == ["hi"]:
        return _multiply_high, kind, [kind, kind]
    if base in ("mul", "mad") and between == ["wide"]:
        wide = kind[0] + str(2 * int(kind[1:]))
        product, number = FUNCTIONS[base][0], TYPES[wide]
        return lambda a, b, *c: product(a.astype(number), b, *c), wide, [kind, kind, *[wide] * (base == "mad")]
    function, kinds, modifiers = FUNCTIONS.get(base, (None, (), set()))
    if function is None or set(between) - modifiers or (base in _ONLY_32 and kind[-2:] != "32"):
        raise NotImplementedError(".".join(name))
    return function, kind, [each or kind for each in kinds]
