"""Values of configuration fields: from YAML, the command line or Python to the type that the field declares.

YAML reads ``1e-3`` as a string and ``off`` as False, and the command line has strings for all that may be more than one
thing; both are meant as what the field is.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def option(default: Any, panel: str, text: str) -> Any:
    """A field of a configuration, with the heading and the line under which ``--help`` shows it."""
    return dataclasses.field(default=default, metadata={"panel": panel, "help": text})


def convert(name: str, value: Any, hint: Any) -> Any:
    """The value as its type hint wants it; TypeError if it is nothing of the kind, ValueError for no such choice."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _one_of(name, value, arguments)
    if origin is Literal:
        return _choice(name, value, arguments)
    if origin is tuple:
        return _tuple(name, value, arguments)
    converted = _SCALARS[hint](value) if hint in _SCALARS else value
    if hint in _SCALARS and converted is None:
        raise TypeError(f"{name} must be {describe(hint)}, got {value!r}")
    return converted


def convert_all(kind: type, values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value as the field of a dataclass wants it; a name that is no field is an error."""
    hints = get_type_hints(kind)
    refuse_unknown(values, {field.name: prefix + field.name for field in dataclasses.fields(kind)}, prefix)
    return {name: convert(prefix + name, value, hints[name]) for name, value in values.items()}


def refuse_unknown(names: Iterable[str], known: Mapping[str, str], prefix: str = "") -> None:
    """ValueError for a name that is not known, with the nearest one as it should be written."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            advice = f"did you mean {known[near[0]]}?" if near else f"known are {', '.join(sorted(known.values()))}"
            raise ValueError(f"{prefix}{name} is no option: {advice}")


def describe(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(repr(argument) for argument in arguments)
    if origin is tuple:
        return f"{len(arguments)} values"
    return {type(None): "null", str: "text", int: "an int", float: "a number", bool: "true or false"}.get(
        hint, str(hint)
    )


def _one_of(name: str, value: Any, hints: tuple[Any, ...]) -> Any:
    if value is None and type(None) in hints:
        return None
    for hint in hints:
        if hint is not type(None):
            try:
                return convert(name, value, hint)
            except (TypeError, ValueError):
                continue
    raise ValueError(f"{name} must be {describe(Union[hints])}, got {value!r}")  # noqa: UP007 (a tuple of hints)


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if value is False and "off" in choices:
        return "off"
    if isinstance(value, bool) or value not in choices:
        raise ValueError(f"{name} must be {describe(Literal[choices])}, got {value!r}")
    return value


def _tuple(name: str, value: Any, hints: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != len(hints):
        raise TypeError(f"{name} must be a list of {len(hints)} values, got {value!r}")
    return tuple(convert(f"{name}[{i}]", each, hint) for i, (each, hint) in enumerate(zip(value, hints, strict=True)))


def _int(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _float(value)
    return None if number is None or not number.is_integer() else int(number)


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


_SCALARS: dict[Any, Any] = {
    int: _int,
    float: _float,
    bool: lambda value: value if isinstance(value, bool) else None,
    str: lambda value: value if isinstance(value, str) else None,
}
