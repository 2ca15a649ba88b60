"""Finished texts become lessons: between steps the target reads them once more, for the states that a draft learns by.

They are those of its last layer, from which all its rows follow, and those of the layers that a head reads.

A lesson's states could be kept as the text is written. They are read again instead: a pass over a whole text costs a
small part of what writing it took, no drafter and no cache has to know of it, and what is decoded stays as it is
without learning. It is done while nothing else is, and at most a fiftieth of the time otherwise.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polydraft.drafters.learnt import states_to_learn
from polydraft.engine import Request
from polydraft.models import cache_in
from polydraft.models.anatomy import observed_layers
from polydraft.server.worker.asking import TextRequest
from polydraft.server.worker.asks import Event
from polydraft.server.worker.served import LoadedModels
from polydraft.server.worker.served_versions import MOST_TOKENS
from polydraft.verifiers import TreeVerifier

LESSON = "lesson"
"""An event that is for the learner alone."""
MOST_WAITING = 64
"""So many finished texts wait to be read; then the oldest are not learnt from."""
SHARE = 0.02
"""Of the time while texts are written."""


@dataclass(frozen=True)
class FinishedText:
    """A text that was written to its end: the tokens with the prompt's, how many these are, and its temperature.

    `mark` is that of the last time that everything was forgotten, when the text was asked for.
    """

    ids: tuple[int, ...]
    given: int
    heat: float
    mark: str


def may_teach(wanted: TextRequest, request: Request, rule: TreeVerifier) -> bool:
    """Tell whether a text may be learnt from.

    Not one that opted out, nor one whose prompt is nobody else's business, and none whose law is another than the
    target's at a temperature under filters: grammars, penalties and biases are a request's own, and a lossy rule has a
    law of its own.
    """
    ask = wanted.ask
    own = ask.learn is not False and not ask.alone and not ask.told
    return own and rule.lossless and not request.law.processors and len(wanted.tokens) < MOST_TOKENS


class Teaching:
    """Make lessons, and say them.

    Args:
        served: the models.
        say: takes lessons.
        clock: tells seconds.
    """

    def __init__(
        self, served: LoadedModels, say: Callable[[Event], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._served, self._say, self._clock = served, say, clock
        self._open: dict[Hashable, tuple[list[int], int, float, str]] = {}
        self._waiting = deque[FinishedText](maxlen=MOST_WAITING)
        self._reading: Iterator[None] | None = None
        self._rests_until = 0.0
        self.on = True

    @property
    def pending(self) -> bool:
        """Whether there is a text to be read."""
        return self.on and (self._reading is not None or bool(self._waiting))

    def begins(self, wanted: TextRequest, request: Request, rule: TreeVerifier) -> None:
        """Take note of a text that is begun, and whose drafts this rule verifies."""
        if self.on and may_teach(wanted, request, rule):
            mark = getattr(wanted.draft, "mark", "")
            self._open[wanted.name] = [*wanted.tokens], len(wanted.tokens), request.law.params.temperature, mark

    def gained(self, name: Hashable, told: Mapping[str, Any]) -> None:
        """Take note of what a step brought a text."""
        if name in self._open:
            ids, given, heat, mark = self._open[name]
            ids += told["tokens"]
            if told["finish"] and len(ids) > given and self.on:
                self._waiting.append(FinishedText(tuple(ids[:MOST_TOKENS]), given, heat, mark))

    def leaves(self, name: Hashable) -> None:
        """Forget a text that is over; what did not come to its end is not learnt from."""
        self._open.pop(name, None)

    def stop(self) -> None:
        """Make no more lessons: nobody takes them."""
        self.on, self._reading = False, None
        self._open.clear()
        self._waiting.clear()

    def teach(self, *, idle: bool) -> None:
        """Read a chunk of a finished text, if there is time; when all is read, say the lesson."""
        now = self._clock()
        if not self.pending or (not idle and now < self._rests_until):
            return
        self._reading = self._reading or self._read(self._waiting.popleft())
        try:
            over = next(self._reading, self) is self
        except Exception as error:  # noqa: BLE001  whatever it is, texts are written on
            self.stop()
            warnings.warn(f"A finished text cannot be read, and nothing more is learnt: {error}", stacklevel=2)
            return
        if over:
            self._reading = None
        if not idle:  # however long nothing was written before
            self._rests_until = now + (self._clock() - now) / SHARE

    @torch.inference_mode()
    def _states(self, ids: torch.Tensor, past: Any, *, keeps: bool) -> tuple[torch.Tensor, Any]:
        target = self._served.target
        before = {} if past is None else {target.cached_as: past}
        model: Any = target.model
        read = states_to_learn(self._served.draft)
        with observed_layers(model, read, target.modules) as observed:
            output = model.get_decoder()(input_ids=ids, use_cache=keeps or past is not None, **before)
        found = torch.cat([output.last_hidden_state, *(observed[layer] for layer in read)], -1)
        return found[0].bfloat16().cpu(), cache_in(output)

    def _read(self, text: FinishedText) -> Iterator[None]:
        """Go through a text, with a stop behind every chunk but the last."""
        size, past, found = self._served.settings.chunk, None, list[torch.Tensor]()
        ids = torch.tensor([text.ids], device=self._served.target.device)
        if self._served.target.states:  # such a model's states are not handed on between passes
            size = len(text.ids)
        for first in range(0, len(text.ids), size):
            if first:
                yield
            more = first + size < len(text.ids)
            states, past = self._states(ids[:, first : first + size], past, keeps=more)
            found.append(states)
        whole, read = torch.cat(found), states_to_learn(self._served.draft)
        width = whole.shape[-1] - len(read) * self._served.target.width
        numbers = whole.view(torch.int16).numpy().tobytes()
        self._say(Event(LESSON, said={**vars(text), "states": numbers, "width": width}))
