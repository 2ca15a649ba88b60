"""Choose the tree of every step by expected tokens over expected seconds; plain decoding is one of the choices.

What steps take is learnt by `Costs`, what drafts bring by `Chances`. An *arm* is one choice: a tree, or plain decoding.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import cast

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft.drafters import Drafter, owned_models
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel, weight_bytes
from polydraft.planning.chances import Chances, GrowthRule, Law, accepted_by_depth, tokens_found, tokens_of
from polydraft.planning.costs import Costs, Finder, Spent, costs_for
from polydraft.planning.lessons import Lesson
from polydraft.planning.plan import TunedTree
from polydraft.trees import Chain, GrowingPolicy, LearningPolicy, Lookup, TreePolicy, TreeShape, Widths

PLAIN = TreeShape(())
STAKE = 0.01
"""What the first tree and the first plain step of a planner that knows nothing may each lose, as a share of the text's
time without drafts."""
BUDGET = 0.008
"""What all other trials together may lose, as a share of all time."""
PAUSE = 8
"""The least number of steps between two trials."""
AFRESH = 4
"""After so many steps the arms are compared again."""
FORGONE = 16
"""What is forgone by stopping is a mean of about so many steps."""
NEAR = 0.9
"""The usual tree comes first if its rate is expected to be so much of the best one's, or more."""
UNSURE = 0.7
"""An arm that was never timed may be the best if its rate is expected to be so much of the best one's, or more."""
STALE = 200
"""A time that is so many steps old counts as none: the machine may have been busy with something else."""
SHORT = 1024
"""Behind so few tokens their keys cost next to nothing; beyond, costs are learnt apart where the length doubles."""
BRANCHING: tuple[TreePolicy, ...] = tuple(
    map(Widths, ((2, 1, 1), (2, 1, 1, 1, 1), (1,), (2, 1, 1, 1, 1, 1, 1, 1), (3, 2)))
)
"""The trees to choose from beside the usual one, where that branches."""


def arms_beside(usual: TreePolicy) -> tuple[TreePolicy, ...]:
    """Return the trees to choose from, the usual one of the drafter first.

    Beside a chain there are chains alone: above temperature 0 chains verified as blocks were faster than trees.
    """
    if isinstance(usual, GrowingPolicy):
        return BRANCHING
    if usual.shape.max_children > 1:
        return (usual, *BRANCHING)
    length = usual.shape.depth
    return tuple(map(Chain, dict.fromkeys((length, length + 2, max(1, length // 2), 1, 2 * length))))


@dataclass(frozen=True)
class Opening:
    """What is known of new texts before their prompts are read.

    Args:
        length: the tokens of the longest prompt; a drafter that is asked later must read them then.
        left: the most tokens that are still to be written.
        rows: the number of texts in the batch.
        relative: the expected cost of a pass of the drafter, in passes of the target.
        law: the names of processors and filters of the target's law.
        others: the tokens of the longest text in progress that they join; 0 for none.
        soon: the number of texts as soon as all prompts are read, for which trees are chosen; 0 for as many.
    """

    length: int
    left: int
    rows: int
    relative: float
    law: Law = ()
    others: int = 0
    soon: int = 0


class Planner(LearningPolicy):
    """A tree policy that learns while it runs: before each step it takes the tree with the most tokens per second.

    Problem: find the fastest way to draft without losing much time on slow ones. With texts r of a batch, trees T, and
    the root alone among them for plain decoding,

        rate(T) = sum_r E_r[tokens | T] / seconds(T)

    where tokens follow from the chances of drafts (`Chances`) and seconds from measured passes (`Costs`). A step with
    any tree teaches the chances and costs of all of them. This is SmartSpec's goodput (arXiv 2406.14066), with trees.

    Lookups: where the drafter finds continuations in a text (`LookupFirst`, `RoutedDrafter`), those rows take them
    whose rate, with all rows together, is higher than that of the best tree. What each finder brings is learnt apart.
    Where looking for continuations takes more than it saves, nothing is looked up (`LookupCosts`).

    Trials: chances that are not tried grow old. So another arm than the best is taken now and then, if all such steps
    together are expected to lose less than 0.8 % of the time. The first tree and the first plain step may each lose 1 %
    of the time of the first text.

    A plain step does not run the draft model, not even over the prompt. The draft model reads what it missed when a
    tree is chosen again, which counts as part of a trial's cost.

    Exactness: the tree of a step depends on earlier steps, the committed text and the clock, all of which are known
    before its first draft, so every text follows the target's law. But a seed does not fix a sampled text.

    One planner may serve several generations, one after the other, of the same models; it then learns once. Two
    generations must not use it at the same time.

    Args:
        trees: the policies to choose from, the first guess first. None takes those that suit the drafter.
        plan: what `tune` found for these models on this machine: it then knows costs and chances from the beginning.

    Raises:
        InvalidParameter: there is no tree, or one of them drafts nothing.
    """

    weighs_lookups = True

    def __init__(self, trees: Sequence[TreePolicy] | None = None, *, plan: TunedTree | None = None) -> None:
        if trees is not None and (not trees or any(not tree.shape.counts for tree in trees)):
            raise InvalidParameter("A planner needs at least one tree, and every tree a draft.")
        self._suited, self._plan = trees is None, plan
        self._choose_from(BRANCHING if trees is None else trees)
        self.chances = Chances(plan.acceptance if plan else None)
        self.costs = self.timed = Costs(1, 0.25, plan.costs if plan else None)  # by which it chooses, and learns
        self._of_rows: dict[int, Costs] = {}
        self._views: dict[str, tuple[Chances, dict[int, dict[int, Costs]]]] = {}
        self._view, self._relative = "", cast(Callable[[int], float] | None, None)
        self._gains: dict[Lookup, float] = {}  # until the next comparison
        self._looked, self._looks = False, True
        self.current = self._best = 1
        self.steps = 0
        self.spent = self.lost = self.stake = self._risk = 0.0
        self._unread = self._tried = self._searched = self._asked = 0
        self._laws: Counter[Law] = Counter([()])
        self._best_arm()

    @property
    def shape(self) -> TreeShape:
        """The shape of the next tree."""
        return self.shapes[self.current]

    @property
    def largest(self) -> TreeShape:
        """The largest shape that it may choose."""
        return max(self.shapes, key=lambda shape: shape.size)

    def suited(self, usual: TreePolicy) -> None:
        """Choose from the trees that suit a drafter, unless others were named or it has begun."""
        if self._suited and not self.steps:
            self._choose_from(arms_beside(usual))

    def views_by(self, view: str, relative: Callable[[int], float]) -> None:
        """Keep chances by view, and costs by view and length of the text: behind twice as many tokens others hold."""
        self._view, self._relative = view, relative
        self.chances, _ = self._views.setdefault(view, (Chances(self._plan.acceptance if self._plan else None), {}))

    def _expected(self, opening: Opening) -> Opening:
        """Return an opening with what a view's drafts cost at its length, and turn to what was learnt there."""
        if self._relative is None:
            return opening
        _, by_length = self._views[self._view]
        self._of_rows = by_length.setdefault((opening.length // SHORT).bit_length(), {})
        return replace(opening, relative=self._relative(opening.length))

    def _choose_from(self, trees: Sequence[TreePolicy]) -> None:
        self.shapes = (PLAIN, *dict.fromkeys(tree.shape for tree in trees))
        self._last, self._forgone = [0] * len(self.shapes), [0.0] * len(self.shapes)
        self._going: GrowthRule | None = None
        self._why: str | None = None

    def texts_opened(self, opening: Opening) -> None:
        """Choose the first tree of new texts, before their prompts are read."""
        opening, known = self._expected(opening), self._plan.costs if self._plan else None
        self.timed = costs_for(self._of_rows, opening.rows, opening.relative, known)
        self.costs = costs_for(self._of_rows, opening.soon or opening.rows, opening.relative, known)
        self._laws = Counter({opening.law: opening.rows})
        missed = min(self._unread, opening.others)
        self._unread = max(missed, opening.length)
        best = self._best_arm()
        new, known = not self.costs.measured(self.shapes[best]), self._plan is not None
        self.stake = 0.0 if known or not (new or self._is_new(0)) else STAKE * opening.left
        self.current = self._first(best) if new and not known else best
        self._unread = missed if self.current else self._unread
        self._looks = not self._looking_loses()

    @property
    def why_idle(self) -> str:
        """Why plain decoding is expected to be fastest, by what is known now; empty if a tree is."""
        if self._best or not self.steps:
            return ""
        if self._why is None:
            law, arm = self._laws.most_common(1)[0][0], max(range(1, len(self.shapes)), key=self._rates.__getitem__)
            shape, costs = self.shapes[arm], self.costs
            self._why = (
                f"{self._view or 'The drafter'} is not asked: by what is known a level of its drafts takes "
                f"{costs.full(shape) / max(1, shape.depth) / costs.plain:.2f} of the target's pass, they are accepted "
                f"{float(self.chances.rates('', law)[0, 0]):.0%} of the time, and with the best tree that would be "
                f"{self._rates[arm] / self._rates[0]:.2f} times as fast as without."
            )
        return self._why

    @property
    def uses_lookups(self) -> bool:
        """Whether continuations are looked up for the next tree."""
        return self._looks

    def rows_with_lookup(self, found: Sequence[Lookup]) -> tuple[int, ...]:
        """Return which rows take the continuation that was looked up for them, given its shape and who found it.

        The other rows take the tree that was chosen; if there are none, nobody drafts. The answer follows from finished
        steps and these shapes alone, so that it is the same where an interrupted step is taken again.
        """
        self._looked = True
        taken = tuple(row for row, one in enumerate(found) if one.parents)
        if not taken:
            return ()
        others, own = len(found) - len(taken), self._tokens[self.current]
        tokens = (sum(self._tokens_of_lookup(found[row]) for row in taken) + others * own) / len(found)
        nodes = max(1 + max(len(one.parents) for one in found), self.shape.size if others else 1)
        finders = [one.source if one.parents else self._finder for one in found]
        costs, shape = self.timed, self.shape
        seconds = costs.scored(costs.rows * nodes, finders) + (costs.draft(shape) if others else 0.0)
        self._risk = max(0.0, seconds - tokens / own * costs.step(shape))
        due = self.steps - self._searched >= PAUSE and self._risk <= BUDGET * self.spent - self.lost
        return taken if not self._risk or due else ()

    @property
    def _finder(self) -> Finder:
        return "" if self.shape.counts else None

    def learn(self, lessons: Sequence[Lesson], spent: Spent, scored: int) -> None:
        """Learn from a step and choose the next tree.

        Args:
            lessons: what it showed of each text.
            spent: what it took.
            scored: the tokens that the target scored, of all rows.
        """
        if not lessons:
            return
        drafted = bool(self.current) and any(not lesson.source for lesson in lessons)
        spent = self._without_looking(lessons, spent, drafted)
        if not (self.current or self._best) and scored == self.timed.rows and (self.steps + 1) % PAUSE:
            self._plain(spent, scored)
            return
        tokens = sum(lesson.tokens for lesson in lessons)
        trial = self.current != self._best and (drafted or not self.current) and not self._is_new(self.current)
        taken = self.current
        unread = max(0, self._unread - 2) if drafted else 0
        reading = self.timed.reading(unread)
        shape = self.shape if drafted else PLAIN
        depths = [lesson.depth for lesson in lessons if not lesson.source]
        stopped = any(lesson.stopped for lesson in lessons)
        finders = [lesson.source or self._finder for lesson in lessons]
        self.timed.learn(spent, scored, shape, unread, max(depths) if stopped else None, finders)
        self.chances.learn(lessons, shape)
        self._forgive(lessons)
        if any(lesson.source for lesson in lessons):
            self.lost, self._searched = self.lost + self._risk, self.steps
        self.steps += 1
        self.spent += spent.total
        self._last[taken] = self.steps if drafted or not taken else self._last[taken]
        self._unread = 0 if drafted else self._unread + max(1, tokens // len(lessons))
        laws = Counter(lesson.law for lesson in lessons)
        due = taken != self._best or self.steps <= PAUSE or not self.steps % (AFRESH if taken else PAUSE)
        if due or laws.keys() != self._laws.keys():
            self._laws = laws
            best = self._best_arm()
            self.lost += max(self._expected_loss(taken, best) + reading, self._lost(lessons, spent)) if trial else 0.0
            self.current = self._trial(best)

    def _without_looking(self, lessons: Sequence[Lesson], spent: Spent, drafted: bool) -> Spent:
        """Learn what looking for continuations took and saved, and return the step's time without it.

        Then decide whether the next step looks: where that loses, only if a trial is due and affordable.
        """
        looked, drafts, looking = self._looked, bool(self.current), self.timed.looking
        self._looked = False
        if looked:
            trial = looking.loss(drafts=drafts) > 0
            took = min(spent.draft, looking.took) if drafted else spent.draft
            spent = replace(spent, draft=spent.draft - took)
            saved = self._saved(lessons, spent)
            looking.learn(None if drafted else took, saved, drafts=drafts)
            self.lost += max(0.0, took - saved) if trial else 0.0
            self.spent += took
            self._asked = self.steps
        self._looks = not self._looking_loses()
        return spent

    def _saved(self, lessons: Sequence[Lesson], spent: Spent) -> float:
        """Return the seconds in which the tree would have brought the tokens that continuations brought more."""
        if not any(lesson.source for lesson in lessons):
            return 0.0
        tokens, usual = sum(lesson.tokens for lesson in lessons) / len(lessons), self.timed.step(self.shape)
        return max(-usual, tokens / self._tokens[self.current] * usual - spent.total)

    def _looking_loses(self) -> bool:
        drafts, looking = bool(self.current), self.costs.looking
        loss = looking.loss(drafts=drafts)
        if loss:
            looking.pause(drafts=drafts)
        return loss > 0 and (self.steps - self._asked < PAUSE or loss > BUDGET * self.spent - self.lost)

    @property
    def stops(self) -> bool:
        """Whether growth may be asked to stop: not where a level costs next to nothing."""
        return self._now().stops

    def grows_on(self, depth: int, chances: Float[Tensor, "b c"]) -> bool:
        """Tell whether the next level is expected to bring as many tokens as its time is worth elsewhere.

        With R the expected number of this depth's nodes that will be accepted, in all texts, by the draft probabilities
        of the drawn tokens, and m_d the same by depth alone (both of `Chances`), the next level
        brings R m_{d+1} / m_d tokens. It has to bring the best rate times its seconds.
        """
        return self._now().on(depth, chances.tolist())

    def _now(self) -> "GrowthRule":
        if self._going is None or self._going.shape is not self.shape:
            rows, law = sum(self._laws.values()), self._laws.most_common(1)[0][0]
            rates = self.chances.rates("", law)
            costs, shape, sizes = self.costs, self.shape, np.cumsum([1, *map(sum, self.shape.counts)])
            passes = [costs.target(rows * int(size)) for size in sizes]
            seconds = [costs.level(shape) + max(0.0, b - a) for a, b in pairwise(passes)] if shape.counts else []
            means = accepted_by_depth(shape, rates)
            worth = max(self._rates)
            need = [
                took * worth * means[depth] / means[depth + 1] if means[depth + 1] else inf
                for depth, took in enumerate(seconds)
            ]
            first = float(rates[0, 0])
            others = float(rates[0, 1]) / max(1e-9, 1 - first)
            self._going = GrowthRule(shape, need, self.chances.hazards(law, (first, min(1.0, others))))
        return self._going

    def _forgive(self, lessons: Sequence[Lesson]) -> None:
        """Learn how many tokens are forgone where growth is stopped: those below drafts that were all accepted."""
        if not self.stops:
            return
        means, forgone = accepted_by_depth(self.shape, self.chances.rates("", self._laws.most_common(1)[0][0])), 0.0
        own = [lesson for lesson in lessons if not lesson.source]
        for lesson in own:
            if lesson.stopped and lesson.tokens > lesson.depth and means[lesson.depth]:
                forgone += sum(means[lesson.depth + 1 :]) / means[lesson.depth]
        if own:
            old = self._forgone[self.current]
            self._forgone[self.current] = old + (forgone / len(own) - old) / FORGONE

    def _plain(self, spent: Spent, scored: int) -> None:
        self.timed.learn(spent, scored, PLAIN)
        self.steps, self.spent, self._unread = self.steps + 1, self.spent + spent.total, self._unread + 1
        self._last[0] = self.steps

    def _first(self, best: int) -> int:
        """Return the arm to begin with where nothing was measured: one that does not lose the stake if all fails."""
        plain = self.costs.step(PLAIN)
        losses = [self.costs.step(shape) + self._reading(arm) - plain for arm, shape in enumerate(self.shapes)]
        safe = [arm for arm in range(len(losses)) if losses[arm] <= self.stake * plain]
        if not best or not any(safe):
            return 0
        if 1 in safe and self._rates[1] >= NEAR * self._rates[best]:
            return 1
        return max(safe[1:], key=self._rates.__getitem__)

    def _reading(self, arm: int) -> float:
        return self.costs.reading(max(0, self._unread - 2)) if arm else 0.0

    def _best_arm(self) -> int:
        rows = sum(self._laws.values())
        rates = [(self.chances.rates("", law), count / rows) for law, count in self._laws.items()]
        every = [sum(share * tokens_of(shape, rate) for rate, share in rates) for shape in self.shapes]
        self._tokens = [max(1.0, tokens - lost) for tokens, lost in zip(every, self._forgone, strict=True)]
        self._going = self._why = None
        self._gains = {}
        seconds = [self.costs.step(shape) for shape in self.shapes]
        self._rates = [tokens / took for tokens, took in zip(self._tokens, seconds, strict=True)]
        self._best = max(range(len(seconds)), key=self._rates.__getitem__)
        return self._best

    def _tokens_of_lookup(self, found: Lookup) -> float:
        if found not in self._gains:
            rows = sum(self._laws.values())
            looked = [(self.chances.rates(found.source, law), count / rows) for law, count in self._laws.items()]
            self._gains[found] = sum(share * tokens_found(found.parents, rates) for rates, share in looked)
        return self._gains[found]

    def _trial(self, best: int) -> int:
        """Return an arm to try if a trial is due and affordable; else the best arm.

        While nothing is drafted, any tree tells whether drafts have become worth their time. While something is, an
        arm that was not timed for long is tried if it may be the best, and plain decoding in any case. The arm with the
        least loss per step since its last turn goes first.
        """
        if self.timed is not self.costs or (self.steps - self._tried < PAUSE and self.steps > 1):
            return best
        left, stake = BUDGET * self.spent - self.lost, self.stake * self.costs.step(PLAIN)
        near = [arm for arm, rate in enumerate(self._rates) if not arm or rate >= UNSURE * self._rates[best]]
        old = {arm for arm in near if self.steps - self._last[arm] >= STALE}
        untimed = [arm for arm in near if arm in old or not self.costs.measured(self.shapes[arm])]
        telling = untimed if best else range(len(self.shapes))
        losses = {arm: self._expected_loss(arm, best) for arm in telling if arm != best}
        affordable = [arm for arm, loss in losses.items() if loss <= left + stake * self._is_new(arm)]
        if not affordable:
            return best
        self._tried = self.steps
        return min(affordable, key=lambda arm: losses[arm] / (1 + self.steps - self._last[arm]))

    def _lost(self, lessons: Sequence[Lesson], spent: Spent) -> float:
        """Return the time that a step has lost against the best arm: a trial may take more than was expected."""
        tokens = sum(lesson.tokens for lesson in lessons) / len(lessons)
        return spent.total - tokens / self._rates[self._best]

    def _is_new(self, arm: int) -> bool:
        """Tell whether nothing of the kind was tried, no tree or no plain step: a stake is set aside for this."""
        kind = self.shapes[1:] if arm else self.shapes[:1]
        return not any(map(self.costs.measured, kind))

    def _expected_loss(self, arm: int, best: int) -> float:
        rate = self._tokens[best] / self.costs.step(self.shapes[best])
        return self._reading(arm) + max(0.0, self.costs.step(self.shapes[arm]) - self._tokens[arm] / rate)


def relative_cost(target: LanguageModel, drafter: Drafter) -> float:
    """Return the expected cost of a pass of the drafter, in passes of the target, from the bytes of their weights.

    A large draft model pushes the target's weights out of the processor's caches, so its cost grows faster than its
    size. A drafter without a model in its fields costs nothing, or half a pass if it drafts by the target itself; one
    of unknown weights a quarter of the target.
    """
    sizes, whole = [weight_bytes(model) for model in owned_models(drafter)], weight_bytes(target)
    if not sizes:
        return 0.5 if drafter.needs.target else 0.0
    size = sum(sizes) / whole if whole and all(sizes) else 0.25
    return size * (1 + size / 2)
