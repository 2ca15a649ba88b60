"""Tokens of prompts, texts of tokens, and grammars: what takes time and no pass of the model, beside the steps."""

import copy
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from polydraft.server.worker.asking import wanted_of
from polydraft.server.worker.asks import Ask, Spell, about
from polydraft.server.worker.served import LoadedModels


@dataclass(frozen=True, eq=False)
class FoundTexts:
    """What was found for a request: `found` returns the texts that it asks for or what was to be spelt, or raises."""

    told: Ask | Spell
    found: Callable[[], Any]


class Preparing:
    """Prepare requests in the order in which they came, on a thread, so that no text in progress waits for it.

    The thread has a tokenizer of its own: one that makes text and tokens at once may refuse to.

    Args:
        served: the models.
    """

    def __init__(self, served: LoadedModels) -> None:
        self._served = replace(served, tokenizer=_copied(served.tokenizer))
        self._told: queue.SimpleQueue[Ask | Spell | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[FoundTexts] = queue.SimpleQueue()
        self._wanted: dict[str, Ask | Spell] = {}
        self._news = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether something is in preparation, or was prepared and not asked for yet."""
        return bool(self._wanted)

    def take(self, told: Ask | Spell) -> None:
        """Take a request."""
        self._wanted[told.name] = told
        self._told.put(told)

    def cancel(self, name: str) -> None:
        """Forget a request."""
        self._wanted.pop(name, None)

    def wait(self, seconds: float) -> None:
        """Wait until something is prepared, for at most so many seconds."""
        self._news.wait(seconds)

    def done(self) -> Iterator[FoundTexts]:
        """Yield what was prepared since the last time, unless nobody wants it any more."""
        self._news.clear()
        while not self._done.empty():
            one = self._done.get()
            if self._wanted.pop(one.told.name, None) is not None:
                yield one

    def end(self) -> None:
        """End the thread, when it has done what it is at."""
        self._wanted.clear()
        self._told.put(None)

    def _run(self) -> None:
        while (told := self._told.get()) is not None:
            if told.name in self._wanted:
                self._done.put(self._prepared(told))
                self._news.set()

    def _prepared(self, told: Ask | Spell) -> FoundTexts:
        try:
            found = wanted_of(self._served, told) if isinstance(told, Ask) else spelling(self._served, told)
        except Exception as error:  # noqa: BLE001  it is raised where somebody can be told
            return FoundTexts(told, lambda error=error: _raise(error))
        return FoundTexts(told, lambda: found)


def _copied(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer; itself if it cannot be copied, as some that are written in Python."""
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # noqa: BLE001  whatever keeps it from being copied, it can be asked
        return tokenizer


def _raise(error: Exception) -> None:
    raise error


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
    name = "prompt" if isinstance(told.prompt, str) else "messages"
    with about(name):
        served.check_size((told.prompt or "", told.tools), name)
        ids = served.ids(told.prompt or "", told.tools, special=told.special)
    texts = list(map(served.spelling, ids)) if told.texts else None
    return {"tokens": ids, "texts": texts, "length": served.max_length}
