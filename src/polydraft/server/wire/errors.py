"""Errors in OpenAI's shape, each with one sentence and the field that it is about."""

from collections.abc import Mapping, Sequence
from typing import Any

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


def of_fields(errors: Sequence[Mapping[str, Any]]) -> Refused:
    """Return the error for fields that are not as they must be: the first of them, in one sentence."""
    first = errors[0]
    place = [str(one) for one in first.get("loc", ()) if one not in ("body", "query", "path", "header")]
    kind, name = str(first.get("type", "")), ".".join(one[:100] for one in place if not _is_branch(one))
    if kind == "extra_forbidden":
        return Refused(400, f"{name} is no field of this request; leave it out.", name, "unknown_field")
    if kind == "json_invalid":
        return Refused(400, "The body is not JSON.", None, "not_json")
    if not name and kind == "value_error":
        said = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
        return Refused(400, f"{said[:300]}.", said.split()[0].split(".")[0])
    if not name:
        return Refused(400, "The body must be a JSON object, sent as application/json.", None, "not_json")
    said = str(first.get("msg", "is wrong")).removeprefix("Value error, ").rstrip(".")
    if kind == "missing":
        return Refused(400, f"{name} is missing.", name, "missing_field")
    sentence = said if said.startswith(name.split(".")[0]) else f"{name} is wrong: {said[:1].lower()}{said[1:]}"
    return Refused(400, f"{sentence[:300]}.", name)


def _is_branch(part: str) -> bool:
    """Tell whether a part of a field's place is the name of one of several types that it may have."""
    return part in ("str", "int", "float", "bool") or "[" in part or part.startswith(("list", "dict", "function"))


def of_event(said: Mapping[str, Any]) -> Refused:
    """Return the error for what a worker refuses."""
    return Refused(
        STATUSES.get(str(said.get("code")), 400), str(said.get("message", "")), said.get("param"), said.get("code")
    )
