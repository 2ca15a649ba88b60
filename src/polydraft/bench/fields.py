"""Dataclasses from JSON: every value is of its field's declared type, or the field is named."""

import math
from dataclasses import is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Made = TypeVar("Made")
PLAIN: tuple[type, ...] = (int, float, str, bool, type(None))


def from_fields(kind: type[Made], values: Any) -> Made:
    """Make a dataclass of a JSON object; lists become tuples and objects dataclasses where these are declared.

    Raises:
        TypeError: it is no object, or a field is missing or not known.
        ValueError: a field holds something else than its declared type; numbers are to be finite.
    """
    if not isinstance(values, dict):
        raise TypeError(f"{kind.__name__} is no {type(values).__name__}")
    fields, hints = cast(dict[str, Any], values), _hints(kind)
    return kind(**{name: _made(hints.get(name, Any), value, name) for name, value in fields.items()})


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
        return {key: _made(inner[1], one, name) for key, one in cast(dict[str, Any], value).items()}
    if is_dataclass(kind) and isinstance(value, dict):
        return from_fields(cast(type, kind), value)
    if kind is Any:
        return value
    raise ValueError(f"{name} is {str(value)[:40]}, which is no {getattr(hint, '__name__', hint)}")


def _is_plain(kind: type, value: Any) -> bool:
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind)
