"""Requests in progress: where their clients wait, what each text was told, and who was asked for what."""

import asyncio
import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polydraft.server.front.logs import log
from polydraft.server.front.metrics import Timing
from polydraft.server.wire.error_answers import STATUSES, Refused, ours
from polydraft.server.worker import Ask, Event, Spell
from polydraft.server.worker.asks import CODES, SEEDS, UnknownVersion

SOON = 2
"""After so many seconds a client may ask again whether the model is there."""


@dataclass
class ToldText:
    """What was told of a text, and what it is written from.

    A text that is asked for again, with its seed, is written from its beginning. What was told is compared with it and
    not told again. It is taken for the same text if it has the same tokens after the same number of steps: each step
    has random numbers of its own, so what comes then is independent of everything told, whatever the trees were.
    Otherwise the text goes on from its tokens with a fresh seed. Both keep the law.

    Args:
        ask: a request for this text alone, with the seed and the tokens that it is written from.
        tokens: all that were told.
        steps: that brought them, behind `ask.told`.
        joined: whether it was told that the text is read.
        over: whether it has ended.
        again: steps of the writer in progress that will bring what was told.
        place: tokens of the writer in progress.
        unplaced: log-probabilities of the last tokens, which were not told yet.
        resumed: what is to be told of a text that went on with another seed.
    """

    ask: Ask
    tokens: list[int] = field(default_factory=list[int])
    steps: int = 0
    joined: bool = False
    over: bool = False
    again: int = 0
    place: int = 0
    unplaced: tuple[Mapping[str, Any], ...] = ()
    resumed: Mapping[str, int] | None = None

    def restart(self) -> Ask:
        """Return what another worker is to be asked for."""
        self.again, self.place = self.steps, len(self.ask.told)
        return self.ask

    def hear(self, said: Mapping[str, Any]) -> bool | None:
        """Take a step; tell whether it is new. None if it is not that of the text that was told."""
        if not self.again:
            self.tokens += said["tokens"]
            self.steps, self.over = self.steps + 1, bool(said["finish"])
            self.unplaced = tuple(said.get("unplaced", ()))
            return True
        begin, self.place, self.again = self.place, self.place + len(said["tokens"]), self.again - 1
        same = self.tokens[begin : self.place] == list(said["tokens"]) and not said["finish"]
        return False if same and (self.place == len(self.tokens)) is not bool(self.again) else None

    def go_on(self, number: int, seed: int) -> Ask:
        """Return what to ask for so that the text goes on from its tokens with another seed."""
        self.ask = replace(self.ask, told=tuple(self.tokens), seed=seed, unplaced=self.unplaced)
        self.steps, self.resumed = 0, {"index": number, "tokens": len(self.tokens), "seed": seed}
        return self.restart()


@dataclass(eq=False)
class Attempt:
    """What one worker is asked for: a request, or one text of it again.

    Attributes:
        number: of the text; None for the whole request.
        left: texts that have not ended.
        waits: whether the worker took it and has not come to it yet, so that it can be no reason why a worker ends.
    """

    ask: Ask | Spell
    ticket: "Ticket"
    number: int | None = None
    left: int = 0
    waits: bool = False

    def __post_init__(self) -> None:
        self.left = self.ask.size

    def restarts(self) -> Iterator["Attempt"]:
        """Yield what is to be asked for again where its worker is gone: what was not told to its end."""
        ticket = self.ticket
        if isinstance(self.ask, Spell) or not ticket.texts:
            yield Attempt(replace(self.ask, name=ticket.fresh_name()), ticket)
            return
        for number in range(len(ticket.texts)) if self.number is None else (self.number,):
            if not ticket.texts[number].over:
                ticket.held.pop(number, None)
                ask = ticket.texts[number].restart()
                yield Attempt(replace(ask, name=ticket.fresh_name()), ticket, number)


class Ticket:
    """What a request, which its client knows by the id `request`, waits at for what comes of it.

    Attributes:
        deadline: when it is over, by the loop's clock.
        left: how many of its texts have not ended.
        held: tokens of its texts in progress, with their prompts.
        texts: what was told of its texts; none as long as no worker has taken it.
        lost: how many workers ended while they were at it.
        resent: how often something of it was asked for again.
    """

    def __init__(self, ask: Ask | Spell, timing: Timing, deadline: float, request: str = "") -> None:
        self.ask, self.timing, self.deadline, self.request = ask, timing, deadline, request or ask.name
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.left = ask.size
        self.held: dict[int, int] = {}
        self.texts: list[ToldText] = []
        self.lost, self.resent = 0, 0

    def fresh_name(self) -> str:
        """Return a name for an attempt that no other has: what late workers say of others is nobody's."""
        self.resent += 1
        return f"{self.ask.name}~{self.resent}"

    async def next(self) -> Event:
        """Return the next event.

        Raises:
            Refused: the worker refused or lost the request, or its time is over.
        """
        rest = self.deadline - asyncio.get_running_loop().time()
        try:
            event = await asyncio.wait_for(self.events.get(), max(rest, 0))
        except TimeoutError:
            raise Refused(504, "The request took longer than this server allows.", None, "deadline") from None
        if event.kind not in ("refused", "failed"):
            return event
        message, code = event.said["message"], event.said["code"]
        status = STATUSES.get(str(code), 400 if event.kind == "refused" else 500)
        if status == 500:
            log("request failed", level=logging.ERROR, id=self.request, error=message)
        if status == 500 and code not in STATUSES:
            raise ours(self.request)
        raise Refused(status, message, event.said.get("param"), code, SOON if status == 503 else None)

    def news(self, attempt: Attempt, event: Event) -> Event | Attempt | None:
        """Take what a worker said; return what of it is new to the client, or how its text is to go on."""
        kind, said = event.kind, event.said
        if kind == "begun":
            attempt.waits = True
            if self.texts or not isinstance(self.ask, Ask):
                return None
            if "version" in said:  # what is asked for again is drafted by the same weights, so that it is the same
                self.ask = replace(self.ask, speculation=replace(self.ask.speculation, version=said["version"]))
            self.texts = [ToldText(self.ask.of_text(number)) for number in range(len(said["seeds"]))]
        elif kind == "refused" and attempt.number is not None and said["code"] == CODES[UnknownVersion]:
            text = self.texts[attempt.number]  # it is asked for again, and its version was dropped meanwhile
            text.ask = replace(text.ask, speculation=replace(text.ask.speculation, version=None))
            return self._going_on(text, attempt.number)
        elif kind in ("joined", "gained"):
            if attempt.number is not None:
                event = Event(kind, self.ask.name, {**said, "number": attempt.number})
            return self._news_of_text(attempt, event.said["number"], event)
        return event if event.name == self.ask.name else replace(event, name=self.ask.name)

    def _news_of_text(self, attempt: Attempt, number: int, event: Event) -> Event | Attempt | None:
        text = self.texts[number]
        if event.kind == "joined":
            attempt.waits = False
            self.held[number] = event.said["prompt"] + len(text.tokens)
            known, text.joined = text.joined, True
            return None if known else event
        new = text.hear(event.said)
        if new is None:
            return self._going_on(text, number)
        if not new:
            return None
        attempt.left -= text.over
        resumed, text.resumed = text.resumed, None
        return event if resumed is None else replace(event, said={**event.said, "resumed": resumed})

    def _going_on(self, text: ToldText, number: int) -> Attempt:
        """Return a try that goes on from what was told, with a fresh seed."""
        ask = text.go_on(number, secrets.randbelow(SEEDS))
        return Attempt(replace(ask, name=self.fresh_name()), self, number)
