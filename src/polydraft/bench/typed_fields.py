"""Dataclasses from JSON: every value is of its field's declared type, or the field is named."""

import math
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Made = TypeVar("Made")
PLAIN: tuple[type, ...] = (int, float, str, bool, type(None))
LARGEST = 2**63
"""Whole numbers lie below, in size."""


def from_fields(kind: type[Made], values: Any) -> Made:
    """Make a dataclass of a JSON object; lists become tuples and objects dataclasses where these are declared.

    Raises:
        ValueError: it is no object, a field is missing or not known, or holds something else than its declared type;
            numbers are to be finite, and texts without halves of surrogate pairs.
    """
    if not isinstance(values, dict):
        raise ValueError(f"there is a {type(values).__name__} in place of an object")
    given, hints = cast(dict[str, Any], values), _hints(kind)
    declared = fields(cast(Any, kind))
    needed = (one.name for one in declared if one.default is MISSING and one.default_factory is MISSING)
    for name in needed:
        if name not in given:
            raise ValueError(f"{name} is missing")
    for name in given:
        if name not in {one.name for one in declared}:
            raise ValueError(f"{name[:40]!r} is not known")
    return kind(**{name: _made(hints[name], value, name) for name, value in given.items()})


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _made(hint: Any, value: Any, name: str) -> Any:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        (kind,) = (one for one in inner if one is not type(None))
        return None if value is None else _made(kind, value, name)
    if kind in PLAIN and _is_plain(kind, value):
        return value
    if kind in (list, tuple) and isinstance(value, list):
        return kind(_made(inner[0], one, name) for one in cast(list[Any], value))
    if kind is dict and isinstance(value, dict):
        named = cast(dict[str, Any], value)
        return {_made(str, key, f"a key of {name}"): _made(inner[1], one, name) for key, one in named.items()}
    if is_dataclass(kind) and isinstance(value, dict):
        return from_fields(cast(type, kind), value)
    if kind is Any:
        return value
    raise ValueError(f"{name} is {in_brief(value)}, which is no {getattr(hint, '__name__', hint)}")


def in_brief(value: Any) -> str:
    """Return the beginning of a value from JSON as text, for messages."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= LARGEST:
        return "a number of too many digits"
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(cast(Any, value))}"
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is_plain(kind: type, value: Any) -> bool:
    if kind in (int, float) and isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < LARGEST
    if kind is float:
        return isinstance(value, float) and math.isfinite(value)
    if kind is str:
        return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
