"""Bodies as JSON: read beside the event loop if they are large, and checked for their size before anything else."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from polydraft.server.wire.sizes import check_brackets, check_sizes

SMALL = 1 << 14
"""Bodies of at most so many bytes are read at once."""
READ = "polydraft.body"


async def read_body(body: bytes, most_tokens: int | None) -> Any:
    """Return what a body says, or the error that it is no JSON.

    Args:
        body: its bytes.
        most_tokens: tokens of a text; None as long as the model is not known.

    Raises:
        Refused: it holds more than a request can need.
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
