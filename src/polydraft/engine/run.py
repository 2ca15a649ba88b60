"""One generation in progress: an iterator of blocks that counts as it goes, and who watches it."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.engine.emission import Block, Statistics, Stopwatch
from polydraft.engine.loop.batch import Batch, Method, check_drafting
from polydraft.engine.loop.step import Prompts, Taken, begin, check_room, step
from polydraft.engine.output import Past, check_past, committed, state_of, with_logprobs
from polydraft.engine.target_law import Ending, TargetLaw, warn_of_context
from polydraft.models import LanguageModel
from polydraft.planning import Opening, Spent, relative_cost
from polydraft.planning.lessons import lessons_of
from polydraft.probs import Noise
from polydraft.reading import Text
from polydraft.trees import LearningPolicy


@dataclass(frozen=True, eq=False)
class _PlannedMethod:
    """A planner, and the method of its texts."""

    planner: LearningPolicy
    method: Method
    target: LanguageModel

    @cached_property
    def relative(self) -> float:
        """The expected cost of the drafter's passes; to count all weights for every new text takes time."""
        return relative_cost(self.target, self.method.drafter)


class Observer:
    """Watch a run, and tell those of its steps who want to know.

    Texts may have methods of their own, and these a planner. Each planner learns from its texts as if all texts were
    like them: their drafts' time is scaled up to all rows, and the target's pass is that of all.

    Args:
        target: the model.
        keeps_scores: whether blocks hold the target's logits and scores, of every node.
        logprobs: how many of the likeliest tokens are told with each token; None for no log-probabilities at all.
        time: whether the parts of a step are timed on a GPU too; for a planner they are.

    Attributes:
        clock: what the parts of a step are charged to.
        failure: why a drafter failed; empty if none did.
    """

    def __init__(
        self, target: LanguageModel, *, keeps_scores: bool = False, logprobs: int | None = None, time: bool = False
    ) -> None:
        self.clock, self.logprobs, self.failure = Stopwatch(target.facts.device, timed=time), logprobs, ""
        self._target, self._keeps_scores, self._torn = target, keeps_scores, False
        self._planned = list[_PlannedMethod]()
        self._warned = set[int]()

    def watched(self, method: Method) -> Method:
        """Return a method whose planner, if its policy is one, is told of each step."""
        if isinstance(method.policy, LearningPolicy) and not any(one.method is method for one in self._planned):
            self.clock.timed = True
            self._planned.append(_PlannedMethod(method.policy, method, self._target))
        return method

    def forget(self, method: Method) -> None:
        """Forget a method that no text has any more."""
        self._warned.discard(id(method))
        self.clock.forget(method)

    def opens(
        self, method: Method, length: int, left: int, rows: int, law: TargetLaw, others: int = 0, soon: int = 0
    ) -> None:
        """Tell the planner of a method what begins; the other arguments are those of `Opening`."""
        for one in self._planned:
            if one.method is method:
                one.planner.texts_opened(Opening(length, left, rows, one.relative, law.in_force, others, soon))

    def begins(self) -> None:
        """Note that a step begins: what was done since the last one, such as texts that joined, is no part of it."""
        self.clock.lap()

    @contextmanager
    def counting(self, statistics: Statistics) -> Iterator[None]:
        """Charge the time spent inside to the total, and hand all times on, also after an error."""
        try:
            with self.clock.charge("total"):
                yield
        except BaseException:
            self._torn = True  # nobody knows what the step took that is then finished or taken again
            raise
        finally:
            idle = ""
            for one in self._planned:
                idle = one.planner.why_idle or idle
            statistics.note(self.clock.seconds, self.failure, idle)

    def told(self, block: Block, taken: Taken) -> Block:
        """Return a block with what is wanted of its step: scores, log-probabilities, and lessons for planners."""
        logits, rows = taken.step.scored.logits, block.rows
        if self.logprobs is not None:
            rows = with_logprobs(rows, block.verdict, logits, self.logprobs)
        kept = (logits, taken.scores) if self._keeps_scores else (None, None)
        lessons = tuple(self._lessons(one, block, taken) for one in self._planned)
        return replace(block, rows=rows, logits=kept[0], scores=kept[1], lessons=lessons)

    def note(self, block: Block, statistics: Statistics) -> None:
        """Take note of what failed in a step, with one warning for each method; it may be done again."""
        for fault in block.faults:
            self.failure = statistics.fallback = fault.reason
            if id(fault.method) in self._warned:
                continue
            rest = "the rest is" if fault.every else "rows in which it fails are"
            said = f"The {fault.method.drafter.name} drafter failed ({fault.reason}); {rest} decoded without drafts."
            try:
                warnings.warn(said, RuntimeWarning, stacklevel=4)
            except Warning:  # whoever wants errors of warnings has one of each, too
                self._warned.add(id(fault.method))
                raise
            self._warned.add(id(fault.method))

    def learn(self, block: Block) -> None:
        """Let planners learn from a step; one that was torn by an interrupt is no lesson."""
        if not self._planned:
            return
        own = [self.clock.own(one.method) for one in self._planned]
        spent, torn, self._torn = self.clock.lap(), self._torn, False
        rest = max(0.0, spent["total"] - spent["draft"] - spent["target"])  # on a GPU these are of two clocks
        for one, charged, lessons in zip(self._planned, own, block.lessons, strict=True):
            if lessons and not torn:
                drafted = charged * len(block.rows) / len(lessons)
                one.planner.learn(lessons, Spent(drafted, spent["target"], rest), block.tree.tokens.numel())

    def _lessons(self, one: _PlannedMethod, block: Block, taken: Taken) -> tuple[object, ...]:
        """Return what a step shows of the drafts whose trees a planner chose."""
        own = [(piece, method.verifier) for method, piece in taken.drafts if method is one.method]
        told = {row: len(gained.tokens) for row, gained in block.rows.items() if row not in taken.last}
        laws = [law.in_force for law in taken.laws]
        return lessons_of(own, taken.step.probs, taken.step.verdict, told, laws)


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that determines a generation but its random numbers.

    Args:
        target: the model whose law the texts follow.
        method: what drafts and verifies.
        prompt: the prompts.
        laws: per row, how the target's logits become distributions.
        endings: per row, where it ends.
        keeps_scores: whether blocks hold the target's logits and scores.
        logprobs: how many of the likeliest tokens are told with each token; None for no log-probabilities at all.
        fallback: why nothing is drafted whatever was asked for; else empty.
        past: what the models know already of how the only prompt begins.
        keeps_past: whether the run keeps its own past when it is over.
        time: whether the parts of a step are timed on a GPU too.
        sources: per row, what the target reads beside the text; None for nothing.
    """

    target: LanguageModel
    method: Method
    prompt: Text
    laws: tuple[TargetLaw, ...]
    endings: tuple[Ending, ...]
    keeps_scores: bool = False
    logprobs: int | None = None
    fallback: str = ""
    past: Past | None = None
    keeps_past: bool = False
    time: bool = False
    sources: Sequence[Any] | None = None


class Run:
    """Iterate over the blocks of a generation; `statistics` and `new_tokens` grow with every block.

    Stopping early loses nothing: what was generated so far stays here. After an interrupt or an error, wherever it came
    from, the run goes on when it is asked for the next block, and the text is what it would have been; an error that
    lasts is raised again. `finish` is empty for rows that have not ended. Time between blocks, when the caller has the
    floor, is not counted.
    """

    def __init__(self, setup: Setup, noise: Noise) -> None:
        if setup.past is not None or setup.keeps_past:
            check_past(setup.past, setup.target, setup.prompt, alone=setup.sources is None)
        check_room(setup.prompt, setup.endings)
        check_drafting(setup.method)
        self.setup = setup
        rule = setup.method.verifier
        self.statistics = Statistics(in_force=setup.laws[0].in_force, verifier=rule.name, lossless=rule.lossless)
        self.new_tokens: list[list[int]] = [[] for _ in setup.prompt.lengths]
        self.finish: list[str] = [""] * len(self.new_tokens)
        self._noise = noise
        self._observer = Observer(
            setup.target, keeps_scores=setup.keeps_scores, logprobs=setup.logprobs, time=setup.time
        )
        self._observer.failure = setup.fallback
        self._observer.watched(setup.method)
        self._taken: _Taken | None = None
        self._told = False
        self._learnt, self._handed = 0, 0  # the numbers of the last steps that were learnt from, and handed over
        lengths = setup.prompt.lengths.tolist()
        left = max(ending.max_length - length for ending, length in zip(setup.endings, lengths, strict=True))
        self._function = state_of(setup.target) if setup.keeps_past else None
        self._known = setup.past.known(setup.prompt, setup.method.drafter) if setup.past else 0
        self._observer.opens(setup.method, max(lengths) - self._known, left, len(lengths), setup.laws[0])

    @property
    def over(self) -> bool:
        """Whether every row has ended and the last block was handed over."""
        taken = self._taken
        if taken is None or (taken.batch is not None and taken.batch.going):
            return False
        return taken.number == self._handed

    @property
    def past(self) -> Past | None:
        """What the models know of the text so far, for a run whose prompt begins like it.

        None unless the run was begun with keep_past; before its first step, the past that it was begun with.
        """
        taken = self._taken
        if not self.setup.keeps_past:
            return None
        if taken is None or taken.batch is None:
            return self.setup.past
        text, target = committed(taken.batch.text), self.setup.target
        return Past(target, text, taken.batch.reader, taken.batch.parts[0].state, self._function)

    def __iter__(self) -> Iterator[Block]:
        return self

    def __next__(self) -> Block:
        if self.over:
            self._tell_of_context()
            raise StopIteration
        if self._taken is None or self._taken.number == self._handed:
            with self._observer.counting(self.statistics):
                self._taken = self._next(self._taken)
        taken, block = self._taken, self._taken.block
        try:
            self._note(taken)
        except BaseException:
            self._note(taken)  # whoever is interrupted here finishes first
            raise
        self._handed = taken.number  # last: no signal comes between this and the return, so a block is handed over once
        return block

    def _tell_of_context(self) -> None:
        if "context" in self.finish and not self._told:
            self._told = True
            warn_of_context(self.setup.target.facts.context)

    def exhaust(self) -> "Run":
        """Generate to the end."""
        for _ in self:
            pass
        return self

    def sequences(self, prompt: Int[Tensor, "b t"], pad: int) -> Int[Tensor, "b s"]:
        """Return the prompts as given, followed by the new tokens, right-padded with `pad`."""
        longest = max(map(len, self.new_tokens))
        rows = [tokens + [pad] * (longest - len(tokens)) for tokens in self.new_tokens]
        new = torch.tensor(rows, dtype=prompt.dtype, device=prompt.device).view(len(rows), longest)
        return torch.cat([prompt, new], dim=-1)

    def _next(self, last: "_Taken | None") -> "_Taken":
        """Take a step, the first after reading the prompts."""
        setup, observer = self.setup, self._observer
        if last is None or last.batch is None:
            prompts = Prompts(setup.prompt, setup.laws, setup.endings, self._noise, setup.sources)
            ways = {"past": setup.past, "fault": setup.fallback, "clock": observer.clock}
            batch = begin(setup.target, setup.method, prompts, **ways)
        else:
            batch = last.batch
        known, number = tuple(map(len, self.new_tokens)), last.number if last else 0
        batch, block, taken = step(batch, observer.clock)
        return _Taken(
            number + 1, observer.told(block, taken), known, batch if batch.going or setup.keeps_past else None
        )

    def _note(self, taken: "_Taken") -> None:
        """Count a step, once however often this is called."""
        if self.statistics.steps < taken.number:
            first, known = taken.number == 1, self._known
            read = int(self.setup.prompt.lengths.sum()) - known
            self.statistics.add(taken.block, read if first else 0, known if first else 0)
        for row, gained in taken.block.rows.items():
            self.new_tokens[row][taken.known[row] :] = gained.tokens
            self.finish[row] = gained.finish
        if self._learnt < taken.number:
            self._observer.note(taken.block, self.statistics)
            self._learnt = taken.number
            self._observer.learn(taken.block)


@dataclass(frozen=True, eq=False)
class _Taken:
    """The last step that a run has taken; nothing of a step is kept elsewhere before it is complete.

    Args:
        number: how many steps that makes.
        block: what it brought.
        known: per row, the new tokens before it.
        batch: the rows after it; None if every row has ended and nothing is to be kept, so that the caches are free.
    """

    number: int
    block: Block
    known: tuple[int, ...]
    batch: Batch | None
