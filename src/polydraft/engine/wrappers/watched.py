"""A method under observation: behind stopwatches and a guard, with its times and chances told to a planner."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from polydraft.drafters import Drafter
from polydraft.engine.block import Block, Statistics
from polydraft.engine.calls.choices import Parts
from polydraft.engine.clock import Stopwatch
from polydraft.engine.decode import Method
from polydraft.engine.planner import Opening, Spent, relative_cost
from polydraft.engine.target_law import TargetLaw
from polydraft.engine.wrappers.guarded import Guarded
from polydraft.models import LanguageModel
from polydraft.trees import LearningPolicy, TreePolicy
from polydraft.verifiers import TreeVerifier


@dataclass(frozen=True, eq=False)
class _Planned:
    """A planner, the drafter of its texts, and who is charged for what they draft; None for the usual drafter."""

    planner: LearningPolicy
    drafter: Drafter
    guard: Guarded | None
    target: LanguageModel

    @cached_property
    def relative(self) -> float:
        """The expected cost of the drafter's passes; to count all weights for every new text takes time."""
        return relative_cost(self.target, self.drafter)


class Watched:
    """Wrap the parts of a method; `method` is what decodes.

    Texts may have parts of their own, and these a planner. Each planner learns from its texts as if all texts were
    like them: their drafts' time is scaled up to all rows, and the target's pass is that of all.

    Args:
        target, drafter, verifier, policy, keeps_scores, logprobs: those of `Method`; a planner for a policy is told how
            each step went.
        fallback: why nothing is drafted from the beginning; else empty.
        time: whether the parts of a step are timed on a GPU too; for a planner they are.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        verifier: TreeVerifier,
        policy: TreePolicy,
        keeps_scores: bool = False,
        fallback: str = "",
        logprobs: int | None = None,
        time: bool = False,
    ) -> None:
        planner = policy if isinstance(policy, LearningPolicy) else None
        self._watch = Stopwatch(target.device, timed=time or planner is not None)
        self._guard = Guarded(drafter, fallback)
        self._torn, self._target, self._timed = False, target, time
        self._planned = [_Planned(planner, drafter, None, target)] if planner else []
        teaches = (policy,) if planner else ()
        self.method = Method(target, self._guard, verifier, policy, keeps_scores, logprobs, teaches, self._watch)
        self._others: dict[int, tuple[Parts, Guarded, Method]] = {}

    def method_of(self, parts: Parts) -> Method:
        """Return the method of a text that has parts of its own, the same one for the same parts."""
        if id(parts) not in self._others:
            guard = Guarded(parts.drafter)
            if isinstance(parts.policy, LearningPolicy):
                self._watch.timed = True
                self._planned.append(_Planned(parts.policy, parts.drafter, guard, self._target))
                self.method = replace(self.method, teaches=(*self.method.teaches, parts.policy))
            method = replace(self.method, drafter=guard, verifier=parts.verifier, policy=parts.policy)
            self._others[id(parts)] = parts, guard, method
        return self._others[id(parts)][2]

    def forget(self, parts: Parts) -> None:
        """Drop the method of parts that no text has any more."""
        self._others.pop(id(parts), None)

    @property
    def _failure(self) -> str:
        """Why a drafter failed; empty if none did."""
        guards = (self._guard, *(guard for _, guard, _ in self._others.values()))
        return next((guard.failure for guard in guards if guard.failure), "")

    def opens(
        self,
        length: int,
        left: int,
        rows: int,
        law: TargetLaw,
        policy: TreePolicy | None = None,
        others: int = 0,
        soon: int = 0,
    ) -> None:
        """Tell a planner what begins; the arguments are those of `Opening`, and whose texts; None for the method's."""
        whose = self.method.policy if policy is None else policy
        for one in self._planned:
            if one.planner is whose:
                one.planner.texts_opened(Opening(length, left, rows, one.relative, law.in_force, others, soon))

    def begins(self) -> None:
        """Note that a step begins: what was done since the last one, such as texts that joined, is no part of it."""
        self._watch.lap()

    @contextmanager
    def counting(self, statistics: Statistics) -> Iterator[None]:
        """Charge the time spent inside to the total, and hand all times on, also after an error."""
        try:
            with self._watch.charge("total"):
                yield
        except BaseException:
            self._torn = True  # nobody knows what the step took that is then finished or taken again
            raise
        finally:
            statistics.note(self._watch.seconds, self._failure)

    def learn(self, block: Block) -> None:
        """Let planners learn from a step, unless it was torn by an interrupt: then its time is no lesson."""
        if not self._planned:
            return
        own = [None if one.guard is None else self._watch.own(one.guard) for one in self._planned]
        spent, torn, self._torn = self._watch.lap(), self._torn, False
        rest = max(0.0, spent["total"] - spent["draft"] - spent["target"])  # on a GPU these are of two clocks
        for one, charged, lessons in zip(self._planned, own, block.lessons, strict=True):
            if lessons and not torn:
                drafted = (spent["draft"] if charged is None else charged) * len(block.rows) / len(lessons)
                one.planner.learn(lessons, Spent(drafted, spent["target"], rest), block.tree.tokens.numel())
