"""From a request that was taken to its answer: whole, or as a stream of events."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from polydraft.server.front.desk import Desk
from polydraft.server.front.logs import log
from polydraft.server.front.tickets import Ticket
from polydraft.server.wire.answers import AnswerShape, OpenRequest, as_json
from polydraft.server.wire.error_answers import Refused
from polydraft.server.wire.fields import Common
from polydraft.server.wire.openapi import DONE
from polydraft.server.worker import Ask, Event, Spell

STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}
LARGE = 5_000
"""Answers that tell more values are made beside the event loop."""
LATE = 10.0
"""A client may read on for so many seconds after its request's deadline."""


class _Stream(StreamingResponse):
    """A stream that lets go of its request, however it ends.

    A client that does not read would keep what is written for it in memory for ever; and of one that went away just
    before the first event nobody would ever begin to read the events.
    """

    def __init__(self, desk: Desk, ticket: Ticket, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=STREAM)
        self._desk, self._ticket = desk, ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._ticket.deadline + LATE):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log("stream not read", id=scope["state"]["request_id"])
        finally:
            self._desk.leave(self._ticket)


async def answer(desk: Desk, request: Request, ask: Ask, body: Common, shape: AnswerShape) -> Response:
    """Answer a request for texts.

    Raises:
        Refused: it cannot be answered.
    """
    ticket, event = await attended(desk, request, ask)
    tally = OpenRequest(event.said, ask.n, body.level(desk.settings.draft_metrics))
    if body.stream:
        return _Stream(desk, ticket, _events(desk, request, ticket, tally, body, shape))
    try:
        await _unless_gone(request, _all(ticket, tally))
        made = await _made(tally, lambda: shape.whole(tally))  # a server that stops waits for it too
    finally:
        desk.leave(ticket)
        _tell_log(request, tally, desk, ticket)
    return Response(made, media_type="application/json")


async def attended(desk: Desk, request: Request, ask: Ask | Spell) -> tuple[Ticket, Event]:
    """Submit a request, unless its client goes away first."""
    return await _unless_gone(request, desk.submit(ask, request.scope["state"]["request_id"]))


async def _made(tally: OpenRequest, make: Callable[[], bytes]) -> bytes:
    """Make what is told; beside the event loop if that takes long, since all streams would stand still meanwhile."""
    return make() if tally.size <= LARGE else await asyncio.to_thread(make)


async def _all(ticket: Ticket, tally: OpenRequest) -> None:
    while not tally.over:
        event = await ticket.next()
        tally.add(event.kind, event.said)


async def _unless_gone(request: Request, work: Any) -> Any:
    """Do something as long as the client is there: it is refused when it went away."""
    doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Refused(499, "The client went away.")
        return doing.result()
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    desk: Desk, request: Request, ticket: Ticket, tally: OpenRequest, body: Common, shape: AnswerShape
) -> AsyncIterator[bytes]:
    options = body.stream_options
    usage, always = bool(options and options.include_usage), bool(options and options.continuous_usage_stats)
    try:
        opening, beside = shape.opening(tally), {"usage": None} if usage else {}
        while opened := await _made(tally, lambda: b"".join(_line({**one, **beside}) for one in islice(opening, 1))):
            yield opened
        while not tally.over:
            event = await ticket.next()
            choice = tally.add(event.kind, event.said)
            if event.kind == "joined":
                continue
            chunk = shape.chunk(tally, choice, event.said)
            if tally.over:
                shape.add_measures(chunk, tally, usage)
            if usage:
                chunk["usage"] = tally.usage() if always else None
            told = event.said.get("events", event.said["text"]) or "trace" in event.said or event.said.get("logprobs")
            if told or choice.reason or (shape.token_ids and event.said["tokens"]):
                yield _line(chunk)
        if usage:
            yield _line(shape.closing(tally))
    except Refused as error:
        desk.metrics.add_by("request_refused", error.status)
        yield _line(error.body())
    finally:
        desk.leave(ticket)
        _tell_log(request, tally, desk, ticket)
    yield f"data: {DONE}\n\n".encode()


def _line(body: Mapping[str, object]) -> bytes:
    return b"data: " + as_json(body) + b"\n\n"


def _tell_log(request: Request, tally: OpenRequest, desk: Desk, ticket: Ticket) -> None:
    """Say what a request came to, for the log; of its text only what the operator wants to see."""
    usage, gains, ask = tally.usage(), tally.gains, ticket.ask
    told: dict[str, Any] = {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "drafted": sum(one.drafted for one in gains),
        "accepted": sum(one.accepted for one in gains),
        **tally.rule,
        "finish": [choice.finish or "cancelled" for choice in tally.choices],
        "resent": ticket.resent or None,
    }
    if desk.settings.prompts_logged and isinstance(ask, Ask):
        told |= {"prompts": ask.prompts, "texts": [choice.text for choice in tally.choices]}
    request.scope["state"]["told"] = told
