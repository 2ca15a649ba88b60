"""Errors in OpenAI's shape, each with one sentence and the field that it is about."""

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
SERVER_ERROR = "server_error"
STATUSES = {
    "context_length_exceeded": 400,
    "unusable": 400,
    "worker_gone": 503,
    "not_ready": 503,
    "stopping": 503,
    "deadline": 504,
    "queue_full": 429,
}
MOST_NAME = 100
"""Characters of a name that is told."""


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

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape."""
        kind = TYPES.get(self.status, SERVER_ERROR if self.status >= 500 else TYPES[400])
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def ours(request: str) -> Refused:
    """Return the error for one of the server's own, whose text is for the log alone.

    Args:
        request: the request's id.
    """
    return Refused(500, f"The server failed at this request; its log says why under the id {request}.")


def of_fields(errors: Sequence[Mapping[str, Any]], body: Any) -> Refused:
    """Return the error for fields that are not as they must be: the first of them, in one sentence.

    Args:
        errors: pydantic's; the first part of each place is the body.
        body: the class that the body was to be.
    """
    first = errors[0]
    place, kind = [*_named(body, first["loc"][1:])], str(first.get("type", ""))
    param, name = ".".join(place), ".".join(map(readable, place))
    if kind == "json_invalid":
        return Refused(400, "The body is not JSON.", None, "not_json")
    if kind == "extra_forbidden":
        return Refused(400, f"{name} is no field of this request; leave it out.", param, "unknown_field")
    if not place and kind == "value_error":
        said = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
        return Refused(400, f"{said[:300]}.", said.split()[0].split(".")[0])
    if not place:
        return Refused(400, "The body must be a JSON object, sent as application/json.", None, "not_json")
    said = str(first.get("msg", "is wrong")).removeprefix("Value error, ").rstrip(".")
    if kind == "missing":
        return Refused(400, f"{name} is missing.", param, "missing_field")
    sentence = said if said.startswith(name) else f"{name} is wrong: {said[:1].lower()}{said[1:]}"
    return Refused(400, f"{sentence[: 300 + len(name)]}.", param)


def readable(name: str) -> str:
    """Return a name as it can stand in a sentence: in quotes where it is empty, or not to be seen as it is."""
    return name if name and name.isprintable() and name == name.strip() else repr(name)


def told(name: str) -> str:
    """Return a name that is no longer than anybody needs to know it by, and can be sent."""
    short = name if len(name) <= MOST_NAME else f"{name[:MOST_NAME]}..."
    return short.encode("utf-8", "backslashreplace").decode()


def _named(kind: Any, place: Sequence[int | str]) -> Iterator[str]:
    """Yield the names of fields, and the numbers in lists, of an error's place.

    Where a field may have one of several types, the next part of a place is pydantic's name of the type, and no name
    that a client gave: this is known by the fields' types, since names may look like anything.
    """
    kinds = _alternatives(kind)
    is_type = len(kinds) > 1
    for part in place:
        if is_type:
            is_type = False
            continue
        yield told(str(part))
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
    """Return the type of a part of a value of some type, if it has such a part."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [one.annotation for name, one in kind.model_fields.items() if part in (name, one.alias)]
    return [*get_args(kind)[-1:]] if get_origin(kind) in (list, dict) else []


def of_event(said: Mapping[str, Any]) -> Refused:
    """Return the error for what a worker refuses."""
    return Refused(
        STATUSES.get(str(said.get("code")), 400), str(said.get("message", "")), said.get("param"), said.get("code")
    )
