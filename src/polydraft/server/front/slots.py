"""Places for workers: who is there, what each has to do, which prompts it knows, and who gets the next request."""

import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from polydraft.server.front.tickets import Attempt, Ticket
from polydraft.server.worker import Ask, Cancel, Spell, Worker
from polydraft.server.worker.asks import Prompt

LEAST_KNOWN = 64
"""Prompts that have fewer characters in common (or tokens, where these were given) are not known."""


class WorkerSlot:
    """A place for a worker, which is filled again when its worker is gone.

    Args:
        number: of the place.
        texts: how many prompts are remembered; none where there is one place alone.

    Attributes:
        worker: who is there.
        ready: whether its model is loaded.
        known: set when it is known whether it can be.
        broken: why it cannot.
        failures: how often in a row it was not.
        attempts: what it has to do, by name.
        guest: the only request that it takes; None for all.
        closed: whether it takes none, since it is about to be replaced.
    """

    def __init__(self, number: int, texts: int = 0) -> None:
        self.number = number
        self.worker: Worker | None = None
        self.ready, self.broken, self.failures = False, "", 0
        self.known = threading.Event()
        self.attempts: dict[str, Attempt] = {}
        self.guest: Ticket | None = None
        self.closed = False
        self._prompts = deque[str](maxlen=texts)

    @property
    def texts(self) -> int:
        """How many texts it writes, or has waiting."""
        return sum(one.left for one in self.attempts.values())

    def send(self, attempt: Attempt) -> None:
        """Let the worker do something."""
        self.attempts[attempt.ask.name] = attempt
        if self._prompts.maxlen and (prompt := prompt_key(attempt.ask)):
            self._prompts.append(prompt)
        assert self.worker is not None
        self.worker.tell(attempt.ask)

    def drop(self, attempt: Attempt) -> None:
        """Let the worker forget something, if it has not ended."""
        if self.attempts.pop(attempt.ask.name, None) is not None and attempt.left and self.worker is not None:
            self.worker.tell(Cancel(attempt.ask.name))

    def emptied(self) -> list[Attempt]:
        """Return what its worker had to do, now that it is gone."""
        left, self.attempts = [*self.attempts.values()], {}
        self.worker, self.ready, self.guest = None, False, None
        self._prompts.clear()
        return left

    def common(self, prompt: str) -> int:
        """Return how much of a prompt its worker likely knows, by the last prompts that it was given."""
        found = max((common_length(prompt, one) for one in self._prompts), default=0)
        return found if found >= LEAST_KNOWN else 0


def chosen(slots: Sequence[WorkerSlot], attempt: Attempt, ahead: int) -> WorkerSlot | None:
    """Return who gets a request: who knows most of its prompt, else who has the fewest texts.

    A worker that has `ahead` texts more than another gets none for what it knows: to read a prompt again costs less
    than to wait, and a step takes longer the more texts it has.
    """
    if len(slots) < 2:
        return slots[0] if slots else None
    prompt, least = prompt_key(attempt.ask), min(slot.texts for slot in slots)
    near = [slot for slot in slots if slot.texts < least + max(1, ahead)]
    return max(near, key=lambda slot: (slot.common(prompt), -slot.texts))


def prompt_key(ask: Ask | Spell) -> str:
    """Return a request's first prompt as a text that begins like those of prompts that begin like it.

    Empty where nothing may be known of it.
    """
    return "" if isinstance(ask, Spell) or ask.alone or not ask.prompts else _as_text(ask.prompts[0])


def _as_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(_as_character(one) if isinstance(one, int) else _as_turn(one) for one in prompt)


def _as_character(token: int) -> str:
    return chr(token % 0x110000)


def _as_turn(message: Mapping[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, default=str) + "\n"


def common_length(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    if one[:LEAST_KNOWN] != other[:LEAST_KNOWN]:  # most are nothing alike
        high = min(high, LEAST_KNOWN)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[:middle]) else (low, middle - 1)
    return low
