"""A method under observation: behind stopwatches and a guard, with its times and chances told to a planner."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from polydraft.drafters import Drafter
from polydraft.engine.block import Block, Statistics
from polydraft.engine.calls.choices import Parts
from polydraft.engine.decode import Method
from polydraft.engine.planner import Planner, relative_cost
from polydraft.engine.wrappers.guarded import Guarded
from polydraft.engine.wrappers.timed import Stopwatch, TimedDrafter, TimedModel, TimedVerifier
from polydraft.engine.wrappers.witness import Witness, keeps_overlaps
from polydraft.models import LanguageModel
from polydraft.trees import TreePolicy
from polydraft.verifiers import TreeVerifier


class Watched:
    """Wrap the parts of a method; `method` is what decodes.

    Args:
        target, drafter, verifier, policy, keeps_scores, logprobs: those of `Method`; a planner for a policy is told how
            each step went.
        fallback: why nothing is drafted from the beginning; else empty.
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
    ) -> None:
        self._watch, self._guard = Stopwatch(target.device), Guarded(drafter, fallback)
        self._planner = policy if isinstance(policy, Planner) else None
        self._torn = False
        timed = TimedVerifier(verifier, self._watch)
        self._witness = Witness(timed) if self._planner and keeps_overlaps(verifier) else None
        self._relative = relative_cost(target, drafter) if self._planner else 0.0
        model, drafts = TimedModel(target, self._watch), TimedDrafter(self._guard, self._watch)
        self.method = Method(model, drafts, self._witness or timed, policy, keeps_scores, logprobs)
        self._others: dict[int, tuple[Parts, Guarded, Method]] = {}

    def method_of(self, parts: Parts) -> Method:
        """Return the method of a text that has parts of its own, the same one for the same parts."""
        if id(parts) not in self._others:
            guard, usual = Guarded(parts.drafter), self.method
            verifier = TimedVerifier(parts.verifier, self._watch)
            method = replace(usual, drafter=TimedDrafter(guard, self._watch), verifier=verifier, policy=parts.policy)
            self._others[id(parts)] = parts, guard, method
        return self._others[id(parts)][2]

    @property
    def _failure(self) -> str:
        """Why a drafter failed; empty if none did."""
        guards = (self._guard, *(guard for _, guard, _ in self._others.values()))
        return next((guard.failure for guard in guards if guard.failure), "")

    def opens(self, length: int, left: int, rows: int, sampled: bool) -> None:
        """Tell a planner what begins; the arguments are those of `Planner.opens`."""
        if self._planner is not None:
            self._planner.opens(length, left, rows, self._relative, sampled)

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
        took, torn, self._torn = self._watch.lap(), self._torn, False
        if not torn:
            self._planner.note(block, took, self._witness.outlook if self._witness else None)
