"""A method under observation: behind stopwatches and a guard, with its times and chances told to a planner."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from polydraft.drafters import Drafter
from polydraft.engine.block import Block, Statistics
from polydraft.engine.calls.choices import Parts
from polydraft.engine.decode import Method
from polydraft.engine.planner import Opening, PlanningPolicy, Spent, relative_cost
from polydraft.engine.target_law import TargetLaw
from polydraft.engine.wrappers.guarded import Guarded
from polydraft.engine.wrappers.timed import Stopwatch, TimedDrafter, TimedModel, TimedVerifier
from polydraft.models import LanguageModel
from polydraft.trees import TreePolicy
from polydraft.verifiers import TreeVerifier


class Watched:
    """Wrap the parts of a method; `method` is what decodes.

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
        self._planner = policy if isinstance(policy, PlanningPolicy) else None
        self._watch = Stopwatch(target.device, timed=time or self._planner is not None)
        self._guard = Guarded(drafter, fallback)
        self._torn, self._target, self._drafter = False, target, drafter
        model, drafts = TimedModel(target, self._watch), TimedDrafter(self._guard, self._watch)
        rule, teaches = TimedVerifier(verifier, self._watch), self._planner is not None
        self.method = Method(model, drafts, rule, policy, keeps_scores, logprobs, teaches)
        self._others: dict[int, tuple[Parts, Guarded, Method]] = {}

    def method_of(self, parts: Parts) -> Method:
        """Return the method of a text that has parts of its own, the same one for the same parts."""
        if id(parts) not in self._others:
            guard, usual = Guarded(parts.drafter), self.method
            verifier = TimedVerifier(parts.verifier, self._watch)
            method = replace(usual, drafter=TimedDrafter(guard, self._watch), verifier=verifier, policy=parts.policy)
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

    def opens(self, length: int, left: int, rows: int, law: TargetLaw) -> None:
        """Tell a planner what begins; the arguments are those of `Opening`."""
        if self._planner is not None:
            relative = relative_cost(self._target, self._drafter)
            self._planner.opens(Opening(length, left, rows, relative, law.in_force))

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
        """Let a planner learn from a step, unless it was torn by an interrupt: then its time is no lesson."""
        if self._planner is None:
            return
        spent, torn, self._torn = self._watch.lap(), self._torn, False
        if not torn:
            rest = spent["total"] - spent["draft"] - spent["target"]
            self._planner.note(block.lessons, Spent(spent["draft"], spent["target"], rest), block.tree.tokens.numel())
