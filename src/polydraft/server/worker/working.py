"""The worker: it owns the model, does what it is told between steps, and says what happens."""

import time
from collections.abc import Callable
from typing import Any

from polydraft.drafters import flush_stores
from polydraft.errors import PolydraftError
from polydraft.options.commands.serve_options import Settings
from polydraft.server.worker.asks import Ask, Cancel, Event, GrammarRequest, Stop
from polydraft.server.worker.prompt_preparing import FoundTexts, Preparing
from polydraft.server.worker.served import load_served
from polydraft.server.worker.writing import Say, Writing, refusal

HEARING = 0.05
"""After so many seconds of hearing what it is told, a worker goes on with the texts in progress."""
SOON = 0.005
"""A worker without texts waits for prompts in preparation for so many seconds, and hears what else there is."""
WARM_UP = 8
"""Steps of a text before the first request."""
QUIET = 5.0
"""A worker that was told nothing for so many seconds writes down the texts that its drafters keep."""
Hear = Callable[[float | None], Any]
"""Return the next thing that the worker is told: waits for at most so many seconds, None for ever; None for nothing."""


def work(settings: Settings, hear: Hear, say: Say) -> None:
    """Load the models and serve them until told to stop; what drafters keep of texts is written then.

    Args:
        settings: the server's.
        hear: gives what the worker is told.
        say: takes what it says.
    """
    try:
        served = load_served(settings)
        writing = Writing(served, lambda _: None)  # nobody is told of the first tokens, nor counts them
        _warm(writing)
        writing.say = say
        say(Event("ready", said=served.told() | writing.rule))
    except PolydraftError as error:
        say(Event("broken", said={"message": str(error)}))
        return
    preparing = Preparing(served)
    try:
        while _heard(writing, preparing, hear):
            if not writing.idle:
                writing.step()
    finally:
        preparing.end()
        flush_stores()  # a child process ends without Python's exit


def _warm(writing: Writing) -> None:
    """Write a few tokens greedily, sampled and as JSON, so that no client waits for what is made or compiled only once.

    The texts are given up before they end, so that no drafter keeps them.
    """
    for heat, grammar in ((0.0, None), (1.0, None), (0.0, GrammarRequest("json_object"))):
        options = {"temperature": heat, "top_k": 0}
        writing.take(Ask("", ((0,),), seed=0, ignore_eos=True, options=options, grammar=grammar))
        for _ in range(1 if grammar else WARM_UP):
            writing.step()
        writing.cancel("")


def _heard(writing: Writing, preparing: Preparing, hear: Hear) -> bool:
    """Do what the worker was told, waiting for something if there is nothing to do; False to stop.

    Whoever sends without end does not keep the texts in progress from their steps.
    """
    if writing.idle and preparing.busy:
        preparing.wait(SOON)
    told, end = _first(hear, waits=writing.idle and not preparing.busy), time.monotonic() + HEARING
    while told is not None:
        if isinstance(told, Stop):
            return False
        if isinstance(told, Cancel):
            writing.cancel(told.name)
            preparing.cancel(told.name)
        else:
            preparing.take(writing.seeded(told) if isinstance(told, Ask) else told)
        told = None if time.monotonic() > end and not (writing.idle and not preparing.busy) else hear(0.0)
    for one in preparing.done():
        _go_on(writing, one)
    return True


def _first(hear: Hear, *, waits: bool) -> Any:
    """Return what the worker is told next, or None for nothing; one that waits writes what drafters keep meanwhile."""
    told = hear(QUIET if waits else 0.0)
    if told is None and waits:
        flush_stores()
        told = hear(None)
    return told


def _go_on(writing: Writing, one: FoundTexts) -> None:
    """Begin what was prepared, or say what was found."""
    try:
        found = one.found()
        if isinstance(one.told, Ask):
            writing.begin(one.told, found)
        else:
            writing.say(Event("spelt", one.told.name, found))
    except PolydraftError as error:
        writing.say(refusal(one.told.name, error))
    except Exception as error:  # noqa: BLE001  one request must not end the server
        writing.say(Event("failed", one.told.name, {"message": f"{type(error).__name__}: {error}"}))
