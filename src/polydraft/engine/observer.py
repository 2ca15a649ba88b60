"""Who watches a run: its clock and warnings, and what planners, log-probabilities and kept scores are told."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from polydraft.engine.calls.output import with_logprobs
from polydraft.engine.clock import Stopwatch
from polydraft.engine.emission import Block, Statistics
from polydraft.engine.loop.batch import Method
from polydraft.engine.loop.step import Taken
from polydraft.engine.target_law import TargetLaw
from polydraft.models import LanguageModel
from polydraft.planning import Opening, Spent, relative_cost
from polydraft.planning.lessons import lessons_of
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
            statistics.note(self.clock.seconds, self.failure)

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
        return lessons_of(own, taken.step.probs, block.verdict, told, laws)
