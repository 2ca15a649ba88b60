"""Bodies as JSON: read beside the event loop if they are large, and checked for their size before their fields are."""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from polydraft.server.wire.error_answers import Refused, readable, told
from polydraft.server.worker.asks import is_row, nested

SMALL = 1 << 14
"""Bodies of at most so many bytes are read at once."""
READ = "polydraft.body"
MOST_VALUES = 100_000
"""Values of a body beside the tokens of prompts: fields, messages, parts, and what lists and objects of them hold."""
MOST_PROMPTS = 128
ROWS = ("prompt", "tokens")
"""Fields that may hold tokens: a row of them, or rows."""
HALF = re.compile("[\ud800-\udfff]")
STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)


async def read_body(body: bytes, most_tokens: int | None) -> Any:
    """Return what a body says, or the error that it is no JSON.

    Raises:
        Refused: it holds more than a request can need, with texts of so many tokens (None: the model is not known yet).
    """
    if len(body) <= SMALL:
        return _read(body, most_tokens)
    return await asyncio.to_thread(_read, body, most_tokens)


def _read(body: bytes, most_tokens: int | None) -> Any:
    check_brackets(body)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        return error
    check_sizes(found, most_tokens)
    return found


class _Read(Request):
    """A request whose body was read at the door."""

    async def json(self) -> Any:
        """Return what the body says."""
        if READ not in self.scope:
            return await super().json()
        found = self.scope[READ]
        if isinstance(found, Exception):
            raise found
        return found


class BodyRoute(APIRoute):
    """A route that takes a body as it was read at the door."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        usual = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await usual(_Read(request.scope, request.receive))

        return handle


def check_brackets(body: bytes) -> None:
    """Check that JSON has no more lists and objects than a request can need, before it is read.

    To make a million of them takes over a second, in which nothing else is done.

    Raises:
        Refused: it has more.
    """
    if _brackets(body) <= MOST_VALUES or _brackets(STRING.sub(b"", body)) <= MOST_VALUES:
        return
    said = f"The body has more than {MOST_VALUES:,} lists and objects, which no request needs."
    raise Refused(400, said, None, "body_too_long")


def _brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def check_sizes(body: Any, most_tokens: int | None) -> None:
    """Check that a body is no larger than a request can need.

    Args:
        body: what the JSON says.
        most_tokens: tokens of a text; None as long as the model is not known.

    Raises:
        Refused: it is larger.
    """
    if not isinstance(body, dict):
        return
    if most_tokens is not None:
        for name in ROWS:
            _check_rows(name, body.get(name), most_tokens)
    left = MOST_VALUES
    for name, value in body.items():
        left -= _count(value, left)
        if left < 0:
            most = f"a body has at most {MOST_VALUES:,} values beside the tokens of a prompt"
            raise Refused(400, f"{readable(told(name))} is too much: {most}.", told(name), "body_too_long")


def _check_rows(name: str, value: Any, most: int) -> None:
    """Check that a row of tokens, or of the first rows that there may be each, is no longer than a text."""
    if not isinstance(value, list):
        return
    rows = [value, *(one for one in value[:MOST_PROMPTS] if isinstance(one, list))]
    longest = max((len(row) for row in rows if len(row) > most and is_row(row)), default=0)
    if longest:
        said = f"{name} has {longest} tokens, but a text has at most {most} here."
        raise Refused(400, said, name, "context_length_exceeded")


def _count(value: Any, most: int) -> int:
    """Return how many values a value is, or that there are more than so many."""
    found = 0
    for found, one in enumerate(nested(value), 1):
        if isinstance(one, list) and len(one) > most:
            return len(one)
        if found > most:
            break
    return found


def is_half_text(value: object) -> bool:
    """Tell whether a text somewhere in a value cannot be written in UTF-8, for half of a surrogate pair."""
    texts = (one for one in nested(value, names=True) if isinstance(one, str))
    return any(not one.isascii() and HALF.search(one) for one in texts)
