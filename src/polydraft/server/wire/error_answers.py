"""Errors in OpenAI's shape, each with one sentence and the field that it is about."""

import json
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import takewhile
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from polydraft.server.wire.answer_types import ErrorBody

TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
SERVER_ERROR = "server_error"
STATUSES = {
    "context_length_exceeded": 400,
    "unknown_version": 404,
    "unusable": 400,
    "fatal_request": 500,
    "worker_gone": 503,
    "not_ready": 503,
    "stopping": 503,
    "deadline": 504,
    "queue_full": 429,
}
MOST_NAME = 100
"""Characters of a name that is told."""
MOST_VALUE = 40
"""Characters of a text that is told as it is."""
KINDS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""What a value must be, by pydantic's word for the error that it is nothing of the kind."""
RULES = {
    "greater_than": "must be above {gt}, not {value}",
    "greater_than_equal": "must be at least {ge}, not {value}",
    "less_than": "must be below {lt}, not {value}",
    "less_than_equal": "must be at most {le}, not {value}",
    "finite_number": "must be a finite number, not {value}",
    "literal_error": "must be {expected}, not {value}",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters, but has {size}",
    "too_long": "must have at most {max_length} entries, but has {size}",
}
"""What is said of a value of the right kind, by pydantic's word for the error; no least length is above one."""


class Refused(Exception):
    """A request is answered with an error.

    Args:
        status: HTTP's number.
        message: one sentence.
        param: the field that it is about.
        code: a word for programs.
        retry: after how many seconds it is worth trying again.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry = status, message, param, code, retry

    @property
    def headers(self) -> dict[str, str]:
        """The headers that go with it."""
        found = {} if self.retry is None else {"retry-after": str(self.retry)}
        return {**found, "www-authenticate": "Bearer"} if self.status == 401 else found

    def body(self) -> ErrorBody:
        """Return the error in OpenAI's shape."""
        kind = TYPES.get(self.status, SERVER_ERROR if self.status >= 500 else TYPES[400])
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def ours(request: str) -> Refused:
    """Return the error for one of the server's own, whose text is for the log alone, under the request's id."""
    return Refused(500, f"The server failed at this request; its log says why under the id {request}.")


def of_fields(errors: Sequence[Mapping[str, Any]], body: Any) -> Refused:
    """Return the error for fields that are not as those of `body` must be: the first of them, in one sentence."""
    found = _nearest(errors, body)
    first = found[0]
    steps, kind = [*_steps(body, first["loc"][1:])], str(first.get("type", ""))
    place = [name for name, is_shape in steps if not is_shape]
    param, name = ".".join(place), ".".join(map(readable, place))
    if kind == "json_invalid":
        return Refused(400, "The body is not JSON.", None, "not_json")
    if kind == "extra_forbidden":
        return Refused(400, f"{name} is no field of this request; leave it out.", param, "unknown_field")
    said = str(first.get("msg", "is wrong")).removeprefix("Value error, ").rstrip(".")
    if not place and kind == "value_error":
        return Refused(400, f"{said[:300]}.", said.split()[0].split(".")[0])
    if not place:
        return Refused(400, "The body must be a JSON object, sent as application/json.", None, "not_json")
    if kind == "missing":
        return Refused(400, f"{name} is missing.", param, "missing_field")
    field = ".".join(name for name, _ in takewhile(lambda step: not step[1], steps))
    sentence = said if said.startswith(name) else f"{name} {_rule(found) or f'is wrong: {said[:1].lower()}{said[1:]}'}"
    return Refused(400, f"{sentence[: 300 + len(name)]}.", field)


def _nearest(errors: Sequence[Mapping[str, Any]], body: Any) -> list[Mapping[str, Any]]:
    """Return the errors of the first wrong field, one for each shape that was likely meant.

    A value of a field of several shapes is wrong for each of them. Meant is the shape whose kinds fit everywhere, else
    the one that fits furthest into the value.
    """
    place = errors[0]["loc"][1:]
    shape = next((number for number, (_, is_shape) in enumerate(_steps(body, place), 1) if is_shape), None)
    if shape is None:
        return [errors[0]]
    firsts = dict[Any, Mapping[str, Any]]()
    for error in errors:
        if error["loc"][:shape] == errors[0]["loc"][:shape]:
            firsts.setdefault(error["loc"][shape], error)

    def fit(error: Mapping[str, Any]) -> tuple[bool, list[int]]:
        return error["type"] not in KINDS, [part for part in error["loc"][shape + 1 :] if isinstance(part, int)]

    best = max(map(fit, firsts.values()))
    return [error for error in firsts.values() if fit(error) == best]


def _rule(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return what a field must be and is not, to stand behind its name; empty if pydantic's words must do."""
    first = errors[0]
    given, rule = first.get("input"), RULES.get(first["type"], "")
    if first["type"] in KINDS:
        *others, last = dict.fromkeys(KINDS[error["type"]] for error in errors)
        wanted = f"{', '.join(others)} or {last}" if others else last
        rule = f"must be {wanted}, not {{value}}"
    size = len(given) if isinstance(given, Sized) else 0
    limits = {
        name: int(one) if isinstance(one, float) and one.is_integer() else one
        for name, one in first.get("ctx", {}).items()
    }
    return rule.format(value=_value(given), size=size, **limits)


def _value(given: object) -> str:
    """Return a value as it is in JSON, or what it is if that would be long."""
    if isinstance(given, dict):
        return "an object"
    if isinstance(given, list):
        return "a list"
    if isinstance(given, str):
        if len(given) > MOST_VALUE:
            return f"a text of {len(given)} characters"
        return json.dumps(given, ensure_ascii=not given.isprintable())
    return "so large a number" if isinstance(given, int) and abs(given) >= 2**64 else json.dumps(given)


def readable(name: str) -> str:
    """Return a name as it can stand in a sentence: in quotes where it is empty, or not to be seen as it is."""
    return name if name and name.isprintable() and name == name.strip() else repr(name)


def told(name: str) -> str:
    """Return a name that is no longer than anybody needs to know it by, and can be sent."""
    short = name if len(name) <= MOST_NAME else f"{name[:MOST_NAME]}..."
    return short.encode("utf-8", "backslashreplace").decode()


def _steps(kind: Any, place: Sequence[int | str]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of an error's place, names of fields and numbers in lists, and whether each is a shape's name.

    Where a field may have one of several types, the next part of a place is pydantic's name of the type, and no name
    that a client gave: this is known by the fields' types, since names may look like anything.
    """
    kinds = _alternatives(kind)
    is_type = len(kinds) > 1
    for part in place:
        yield told(str(part)), is_type
        if is_type:
            is_type = False
            continue
        inside = [_alternatives(one) for kind in kinds for one in _inside(kind, part)]
        kinds, is_type = [one for some in inside for one in some], any(len(some) > 1 for some in inside)


def _alternatives(kind: Any) -> list[Any]:
    """Return the types that a field may have, beside null."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _alternatives(get_args(kind)[0])
    if origin in (Union, UnionType):
        return [one for some in get_args(kind) if some is not NoneType for one in _alternatives(some)]
    return [kind]


def _inside(kind: Any, part: int | str) -> list[Any]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [one.annotation for name, one in kind.model_fields.items() if part in (name, one.alias)]
    return [*get_args(kind)[-1:]] if get_origin(kind) in (list, dict) else []
