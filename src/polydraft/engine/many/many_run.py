"""Many texts in progress: each slot takes the next prompt as soon as its text has ended."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polydraft.engine.emission import Emission, Statistics, names_of
from polydraft.engine.loop.batch import Method
from polydraft.engine.many.asked import Completed, PromptRequest, request_for
from polydraft.engine.many.running import RunningBatch, RunningStep
from polydraft.engine.observer import Observer
from polydraft.engine.stopping import warn_of_context
from polydraft.engine.target_law import TargetLaw
from polydraft.errors import ContextOverflow, InvalidParameter, UnsupportedModel
from polydraft.models import (
    HuggingFaceModel,
    own_inputs,
)


@dataclass(frozen=True, eq=False)
class ManySetup:
    """Everything that determines a run over many prompts.

    Args:
        target: the model.
        method: what drafts and verifies.
        law: of a prompt without options of its own; for its sampling settings the drafter drafts.
        options: Hugging Face's generation arguments that the prompts have in common.
        size: the number of slots.
        capacity: key slots of each.
        asked: the prompts that can be continued.
        refused: those that cannot, with the reason.
        logprobs: how many of the likeliest tokens are told with each token; None for no log-probabilities at all.
        time: whether the parts of a step are timed on a GPU too.
    """

    target: HuggingFaceModel
    method: Method
    law: TargetLaw
    options: Mapping[str, Any]
    size: int
    capacity: int
    asked: tuple[PromptRequest, ...]
    refused: tuple[Completed, ...]
    logprobs: int | None = None
    time: bool = False


class ManyRun:
    """Iterate over completed texts, in the order in which they end; `statistics` grows with every step.

    A text depends on its prompt, its options and its seed alone, not on the batch size or its neighbours. Stopping
    early loses nothing that was yielded. After an interrupt or an error, wherever it came from, the run goes on when it
    is asked again, and every text is still yielded once; an error that lasts is raised again. Whoever wants the floor
    between steps, for a progress bar or to stop in good order, calls `step` until the run is `over`.
    """

    def __init__(self, setup: ManySetup) -> None:
        self.setup = setup
        rules = [setup.method.verifier, *(one.method.verifier for one in setup.asked if one.method)]
        self.statistics = Statistics(
            in_force=setup.law.in_force,
            verifier=names_of([one.name for one in rules]),
            lossless=all(one.lossless for one in rules),
        )
        self._asked = {one.name: one for one in setup.asked}
        self._gains: dict[Hashable, list[Emission]] = {}  # of the texts in progress, step by step
        self._ended = _Ended(texts=setup.refused)
        self._learnt = 0
        self._cut = False  # whether a text was cut by the context, of which nobody was told yet
        self._observer = Observer(setup.target, logprobs=setup.logprobs, time=setup.time)
        self._batch = self._open() if setup.asked else None

    @property
    def over(self) -> bool:
        """Whether every text has ended and was handed over."""
        return not (self._ended.left or self._goes_on())

    def step(self) -> list[Completed]:
        """Let prompts join, take one step, and return the texts that have ended since the last call."""
        if self._batch is not None and self._goes_on():
            self._advance(self._batch)
        ended, after = [*self._ended.waiting], self._ended.without(self._ended.left)
        self._ended = after  # last: no signal comes between this and the return, so a text is handed over once
        return ended

    def __iter__(self) -> Iterator[Completed]:
        return self

    def __next__(self) -> Completed:
        while not self._ended.left:
            if self._batch is None or not self._goes_on():
                self._tell_of_context()
                raise StopIteration
            self._advance(self._batch)
        text, after = self._ended.texts[self._ended.handed], self._ended.without(1)
        self._ended = after  # last, likewise
        return text

    def _tell_of_context(self) -> None:
        """Warn, once, where the model's context left no room for what was asked for."""
        if self._cut:
            self._cut = False
            warn_of_context(self.setup.target.context)

    def _open(self) -> RunningBatch:
        setup, observer = self.setup, self._observer
        method = observer.watched(setup.method)
        longest = max(len(one.tokens) for one in setup.asked)
        observer.opens(method, longest, setup.capacity - longest, setup.size, setup.law)
        fixed = setup.law.params
        return RunningBatch(setup.target, method, setup.size, setup.capacity, fixed=fixed, observer=observer)

    def _goes_on(self) -> bool:
        """Tell whether a prompt waits, a text is in progress, or a step was taken and not noted."""
        batch, noted = self._batch, self._ended.steps
        return batch is not None and bool(
            self._next(batch) < len(self.setup.asked) or batch.batch.going or (batch.last and batch.last.number > noted)
        )

    def _next(self, batch: RunningBatch) -> int:
        """Return the place of the next prompt: all before it have joined or were refused."""
        return batch.joined + self._ended.refused

    def _advance(self, batch: RunningBatch) -> None:
        """Take a step, unless the last is still to be noted, and note it."""
        if batch.last is None or batch.last.number == self._ended.steps:
            with self._observer.counting(self.statistics):
                batch.sweep()
                while batch.free and self._next(batch) < len(self.setup.asked):
                    self._join(batch, self.setup.asked[self._next(batch)])
                batch.step()
        if batch.last is not None and batch.last.number > self._ended.steps:
            self._note(batch.last)

    def _join(self, batch: RunningBatch, asked: PromptRequest) -> None:
        """Give a prompt a row, or note why that cannot be."""
        try:
            request = request_for(self.setup.target, asked, self.setup.options)
            batch.join(replace(request, method=asked.method))
        except (ContextOverflow, InvalidParameter, UnsupportedModel) as error:
            if not isinstance(error, ContextOverflow) and not self._reads_more(asked):
                raise
            refused = Completed(asked.name, finish="refused", error=str(error), seed=asked.seed)
            self._ended = self._ended.with_refused(refused)

    def _reads_more(self, asked: PromptRequest) -> bool:
        """Tell whether a prompt has images or an encoder's input, which only the model's own code can check."""
        target = self.setup.target
        return target.encodes or bool(asked.own.keys() & own_inputs(target.model))

    def _note(self, last: RunningStep) -> None:
        """Count a step, once however often this is called before it is through."""
        rows = [(last.texts[row], last.steps[row], gained) for row, gained in last.block.rows.items()]
        texts = [(text, count, gained) for text, count, gained in rows if text is not None]
        if self.statistics.steps < last.number:
            read = sum(len(text.tokens) for text, count, _ in texts if count == 1)
            self.statistics.add(last.block, prompt_read=read)
        for text, count, gained in texts:
            self._gains.setdefault(text.name, [])[count - 1 :] = [gained]
        if self._learnt < last.number:
            self._observer.note(last.block, self.statistics)
            self._learnt = last.number
            self._observer.learn(last.block)
        names = [text.name for text, _, gained in texts if gained.finish]
        self._ended = self._ended.with_texts(last.number, [self._completed(name) for name in names])
        self._cut |= any(gained.finish == "context" for _, _, gained in texts)
        for name in names:
            self._gains.pop(name, None)

    def _completed(self, name: Hashable) -> Completed:
        gains = self._gains[name]
        return Completed(
            name,
            tokens=[token for gained in gains for token in gained.tokens],
            finish=gains[-1].finish,
            target_calls=len(gains),
            accepted=sum(gained.accepted for gained in gains),
            seed=self._asked[name].seed,
            logprobs=tuple(one for gained in gains for one in gained.logprobs),
            verifier=gains[-1].verifier,
            lossless=gains[-1].lossless,
        )


@dataclass(frozen=True)
class _Ended:
    """The texts that have ended and what is known of them; every change takes its place at once, or not at all.

    Args:
        texts: those that were noted last.
        handed: how many of these were handed over.
        steps: how many steps were noted.
        refused: how many prompts were refused when it was their turn.
    """

    texts: tuple[Completed, ...] = ()
    handed: int = 0
    steps: int = 0
    refused: int = 0

    @property
    def left(self) -> int:
        """How many texts are to be handed over."""
        return len(self.texts) - self.handed

    @property
    def waiting(self) -> tuple[Completed, ...]:
        """The texts to hand over."""
        return self.texts[self.handed :]

    def without(self, count: int) -> "_Ended":
        """Return what is left after the first were handed over."""
        return replace(self, handed=self.handed + count)

    def with_refused(self, refused: Completed) -> "_Ended":
        """Add a prompt that was refused."""
        return replace(self, texts=(*self.waiting, refused), handed=0, refused=self.refused + 1)

    def with_texts(self, step: int, ended: Sequence[Completed]) -> "_Ended":
        """Add the texts that ended with a step."""
        return replace(self, texts=(*self.waiting, *ended), handed=0, steps=step)
