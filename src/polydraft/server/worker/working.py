"""The worker: it owns the model, does what it is told between steps, and says what happens."""

import time
from collections.abc import Callable
from typing import Any

from polydraft.errors import PolydraftError
from polydraft.server.settings import Settings
from polydraft.server.worker.asks import Ask, Cancel, Event, Spell, Stop, about
from polydraft.server.worker.served import Served, load_served
from polydraft.server.worker.writing import Say, Writing, refusal

HEARING = 0.05
"""After so many seconds of hearing what it is told, a worker goes on with the texts in progress."""
Hear = Callable[[float | None], Any]
"""Return the next thing that the worker is told: waits for at most so many seconds, None for ever; None for nothing."""


def work(settings: Settings, hear: Hear, say: Say) -> None:
    """Load the models and serve them until told to stop.

    Args:
        settings: the server's.
        hear: gives what the worker is told.
        say: takes what it says.
    """
    try:
        served = load_served(settings)
        writing = Writing(served, say)
        _warm(writing)
        say(Event("ready", said=served.told()))
    except PolydraftError as error:
        say(Event("broken", said={"message": str(error)}))
        return
    while _heard(served, writing, hear):
        if not writing.idle:
            writing.step()


def _warm(writing: Writing) -> None:
    """Write a few tokens greedily and sampled, so that no client waits for what is made or compiled only once."""
    for heat in (0.0, 1.0):
        writing.take(Ask("", ((0,),), seed=0, max_tokens=8, ignore_eos=True, options={"temperature": heat, "top_k": 0}))
    while not writing.idle:
        writing.step()


def _heard(served: Served, writing: Writing, hear: Hear) -> bool:
    """Do what the worker was told, waiting for something if there is nothing to write; False to stop.

    Whoever sends without end does not keep the texts in progress from their steps.
    """
    told, end = hear(None if writing.idle else 0.0), time.monotonic() + HEARING
    while told is not None:
        if isinstance(told, Stop):
            return False
        _do(served, writing, told)
        told = None if time.monotonic() > end and not writing.idle else hear(0.0)
    return True


def _do(served: Served, writing: Writing, told: Ask | Cancel | Spell) -> None:
    if isinstance(told, Cancel):
        writing.cancel(told.name)
        return
    try:
        if isinstance(told, Ask):
            writing.take(told)
        else:
            writing.say(Event("spelt", told.name, _spelt(served, told)))
    except PolydraftError as error:
        writing.say(refusal(told.name, error))
    except Exception as error:  # noqa: BLE001  one request must not end the server
        writing.say(Event("failed", told.name, {"message": f"{type(error).__name__}: {error}"}))


def _spelt(served: Served, told: Spell) -> dict[str, Any]:
    if told.tokens is not None:
        with about("tokens"):
            served.check_tokens(told.tokens, "tokens")
        return {"text": served.text(told.tokens)}
    with about("prompt" if isinstance(told.prompt, str) else "messages"):
        ids = served.ids(told.prompt or "", special=told.special)
    texts = list(map(served.spelling, ids)) if told.texts else None
    return {"tokens": ids, "texts": texts, "length": served.max_length}
