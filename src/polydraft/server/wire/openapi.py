"""The description at `/openapi.json`: the framework's, with the answers from their types."""

from typing import Any

from pydantic import TypeAdapter

from polydraft.server.wire.answer_types import ChatCompletionChunk, CompletionChunk, ErrorBody
from polydraft.server.wire.fields import TOKEN

STREAMED = (CompletionChunk, ChatCompletionChunk)
"""Kinds of events: each is a line `data: ` with one of them; an error ends a stream, and then comes `DONE`."""
DONE = "[DONE]"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": said}
    for status, said in {
        400: "The request is wrong: fields that this description does not allow, or what it cannot say, such as fields "
        "that do not go together, words and grammars that mean nothing, too long a text, or messages for a model "
        "without a chat template.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        408: "The body took too long.",
        413: "The body is too long.",
        415: "The body is compressed.",
        429: "The queue is full.",
        500: "An error of the server's own.",
        503: "The model is not there, or not yet.",
        504: "The request took too long.",
    }.items()
}
ASKED: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (400, 401, 500, 503)}
"""What may be said of a request without a body."""


def answers(kind: type, streamed: type | None = None) -> dict[int | str, dict[str, Any]]:
    """Return the description of what may be answered to a body: whole, or where it may be streamed as events."""
    told: dict[str, Any] = {"model": kind, "description": "The answer, whole or as events."}
    if streamed is None:
        return {200: {"model": kind}, **ERRORS}
    parts = [{"$ref": f"#/components/schemas/{one.__name__}"} for one in (streamed, ErrorBody)]
    said = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": parts}}
    data = {"anyOf": [{"const": DONE}, said]}
    event = {"type": "object", "required": ["data"], "properties": {"data": data}}
    return {200: told | {"content": {"text/event-stream": {"itemSchema": event}}}, **ERRORS}


def described(schema: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """Return an OpenAPI description with the events of streams, and without the framework's own kind of error.

    Args:
        schema: the framework's.
        vocab_size: the model's tokens are smaller numbers; None as long as the model is not known.
    """
    for path in schema.get("paths", {}).values():
        for operation in path.values():
            operation.get("responses", {}).pop("422", None)
    parts = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        parts.pop(name, None)
    _, found = TypeAdapter.json_schemas(
        [(one.__name__, "serialization", TypeAdapter(one)) for one in STREAMED],
        ref_template="#/components/schemas/{model}",
    )
    for name, part in found["$defs"].items():
        parts.setdefault(name, part)
    return schema if vocab_size is None else _with_largest(schema, vocab_size - 1)


def _with_largest(schema: Any, token: int) -> Any:
    if isinstance(schema, list):
        return [_with_largest(one, token) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _with_largest(one, token) for name, one in schema.items()}
    return {**found, "maximum": token} if found.get("title") == TOKEN else found
