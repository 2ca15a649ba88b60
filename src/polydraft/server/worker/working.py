"""The worker: it owns the model, does what it is told between steps, and says what happens."""

import copy
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from typing import Any

from polydraft.drafters import flush_stores
from polydraft.errors import PolydraftError
from polydraft.options.commands.serve_options import Settings
from polydraft.server.worker.asking import wanted_of
from polydraft.server.worker.asks import Ask, Cancel, Event, GrammarRequest, Spell, Stop, Unlearning, about
from polydraft.server.worker.served import LoadedModels, load_served
from polydraft.server.worker.teaching import Teaching
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


class Preparing:
    """Make prompts into tokens, tokens into texts, and grammars, in the order of requests, beside the steps.

    The thread has a tokenizer of its own: one that makes text and tokens at once may refuse to.
    """

    def __init__(self, served: LoadedModels) -> None:
        self._served = replace(served, tokenizer=_copied(served.tokenizer))
        self._told: queue.SimpleQueue[tuple[Ask | Spell, futures.Future[Any]] | None] = queue.SimpleQueue()
        self._wanted: dict[str, tuple[Ask | Spell, futures.Future[Any]]] = {}
        threading.Thread(target=self._run, daemon=True).start()  # which no process that ends waits for

    @property
    def busy(self) -> bool:
        """Whether something is in preparation, or was prepared and not asked for yet."""
        return bool(self._wanted)

    def take(self, told: Ask | Spell) -> None:
        """Take a request."""
        self._wanted[told.name] = one = told, futures.Future[Any]()
        self._told.put(one)

    def cancel(self, name: str) -> None:
        """Forget a request."""
        if name in self._wanted:
            self._wanted.pop(name)[1].cancel()

    def wait(self, seconds: float) -> None:
        """Wait until something is prepared, for at most so many seconds."""
        futures.wait([found for _, found in self._wanted.values()], seconds, futures.FIRST_COMPLETED)

    def done(self) -> Iterator[tuple[Ask | Spell, futures.Future[Any]]]:
        """Yield what was prepared since the last time: the texts that are asked for, or what was to be spelt."""
        for name, (told, found) in [*self._wanted.items()]:
            if not found.done():
                break
            del self._wanted[name]
            yield told, found

    def end(self) -> None:
        """End the thread, when it has done what it is at."""
        for name in [*self._wanted]:
            self.cancel(name)
        self._told.put(None)

    def _run(self) -> None:
        while (one := self._told.get()) is not None:
            told, found = one
            if found.set_running_or_notify_cancel():
                try:
                    ready = wanted_of(self._served, told) if isinstance(told, Ask) else spelling(self._served, told)
                except Exception as error:  # noqa: BLE001  it is raised where somebody can be told
                    found.set_exception(error)
                else:
                    found.set_result(ready)


def _copied(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer; itself if it cannot be copied, as some that are written in Python."""
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # noqa: BLE001  whatever keeps it from being copied, it can be asked
        return tokenizer


def spelling(served: LoadedModels, told: Spell) -> dict[str, Any]:
    """Return the tokens or the text that somebody wants to see.

    Raises:
        ContextOverflow: it is longer than any text.
        InvalidParameter: it cannot be spelt.
    """
    if told.tokens is not None:
        with about("tokens"):
            served.check_tokens(told.tokens, "tokens")
        return {"text": served.text(told.tokens)}
    prompt = told.prompt or ""
    name = "prompt" if isinstance(told.prompt, str) else "messages"
    with about(name):
        served.check_size((prompt, told.tools), name)
        ids = served.ids(prompt, told.tools, special=told.special)
    texts = list(map(served.spelling, ids)) if told.texts else None
    return {"tokens": ids, "texts": texts, "length": served.max_length}


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
        writing.teaching = Teaching(served, say) if served.learnt else None
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of JSON that a tiny vocabulary cannot spell
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
        elif isinstance(told, Unlearning):
            if writing.teaching is not None:
                writing.teaching.stop()
        else:
            preparing.take(told)
        told = None if time.monotonic() > end and not (writing.idle and not preparing.busy) else hear(0.0)
    for asked, found in preparing.done():
        _go_on(writing, asked, found)
    return True


def _first(hear: Hear, *, waits: bool) -> Any:
    """Return what the worker is told next, or None for nothing; one that waits writes what drafters keep meanwhile."""
    told = hear(QUIET if waits else 0.0)
    if told is None and waits:
        flush_stores()
        told = hear(None)
    return told


def _go_on(writing: Writing, told: Ask | Spell, found: futures.Future[Any]) -> None:
    try:
        if isinstance(told, Ask):
            writing.begin(told, found.result())
        else:
            writing.say(Event("spelt", told.name, found.result()))
    except PolydraftError as error:
        writing.say(refusal(told.name, error))
    except Exception as error:  # noqa: BLE001  one request must not end the server
        writing.fail(told.name, error)
