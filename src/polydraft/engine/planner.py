"""Choose the tree of every step: count what each tree has gained and cost so far, and take the best.

Plain decoding is one of the choices. An *arm* is one choice: a tree, or plain decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polydraft.drafters import Drafter
from polydraft.engine.block import Block
from polydraft.engine.wrappers.witness import Outlook
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel, weight_bytes
from polydraft.trees import Chain, TreePolicy, TreeShape, Widths
from polydraft.trees.policies import FixedShape

PLAIN = TreeShape(())
MEMORY = 0.98
"""Every step multiplies all older experience by this, because machines and texts change."""
HOPE = 0.55
"""The chance that a level of drafts has an accepted one. It is assumed at first, with the weight of one level."""
TRUST = 5.0
"""The weight of an arm's expected tokens, in steps of the arm."""
STAKE = 0.02
"""What the first trial may lose, as a share of the time that the text would take without drafts."""
BUDGET = 0.008
"""What later trials may lose, as a share of all time."""
HICCUP = 1.5
"""A step counts as at most so many times its expected time, because a machine is busy now and then.

The first step of a tree counts as at most its expected time, because a new shape is slow once."""
UNFORESEEN = 1.75
"""The very first step counts as at most so many times what its size suggests."""
PAUSE = 8
"""The least number of steps between two trials."""
READING = 1 / 40
"""The cost of one token in a pass over many, in passes over one token."""
WIDENING = 1 / 64
"""What a further row or node adds to a pass, in passes over one token. It is assumed until a pass was timed."""
BESIDES = 0.1
"""The fixed cost of a tree beside its levels and nodes, in passes over one token."""
ARMS: tuple[TreePolicy, ...] = tuple(map(Widths, ((2, 1, 1), (2, 1, 1, 1, 1), (1,), (2, 1, 1, 1, 1, 1, 1, 1), (3, 2))))
"""The trees to choose from at temperature 0."""
SAMPLED_ARMS: tuple[TreePolicy, ...] = tuple(map(Chain, (5, 7, 1)))
"""The trees to choose from above temperature 0. Chains verified as blocks were faster there than trees."""


@dataclass(frozen=True)
class Experience:
    """What the steps with one arm gained and cost. Recent steps count most.

    Args:
        steps: how many there were.
        tokens: the tokens that they gave, per row.
        seconds: the time that they took.
        last: the number of the last of them.
    """

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    last: int = -1

    def after(self, tokens: float, seconds: float, number: int) -> "Experience":
        """Add a step."""
        kept = MEMORY ** (number - self.last)
        return Experience(kept * self.steps + 1, kept * self.tokens + tokens, kept * self.seconds + seconds, number)


class Planner(FixedShape):
    """A tree policy that learns while it runs: before each step it takes the tree with the most tokens per second.

    Problem: it must find the fastest tree without losing much time on slow ones.

    First step: the planner estimates the cost of the first tree from the size of the draft model. If a trial is cheap,
    the first step takes that tree and the second step drafts nothing. Else the first step drafts nothing.

    Every later step takes the arm with the highest rate. Plain decoding is an arm too; it gives one token a step:

        rate = (tokens + 5 expected) / (steps + 5) / mean seconds
        expected = 1 + p + ... + p^depth

    Here p is the share of levels that had an accepted draft, over all trees so far. For sampled chains p is the mean
    chance of acceptance (`Outlook`), which is known at every node, so that one step tells as much as many results.

    Trials: while a tree is the best arm, an untried tree is taken if its expected rate is higher. Any other arm is
    tried only if all trials together are expected to lose less than 0.8 % of the time.

    A plain step does not run the draft model, not even over the prompt. The draft model reads what it missed when a
    tree is chosen again. The planner counts this reading as part of a trial's cost.

    Exactness: the tree of a step depends only on earlier steps, so every text follows the target's law. But the choice
    depends on measured times, so a seed does not fix a sampled text.

    One planner may serve several generations, one after the other, of the same models, settings and batch size; it
    then learns once. Two generations must not use it at the same time.

    Args:
        trees: the policies to choose from, the first guess first. None takes those that suit the temperature.

    Raises:
        InvalidParameter: there is none, or one of them drafts nothing.
    """

    def __init__(self, trees: Sequence[TreePolicy] | None = None) -> None:
        if trees is not None and (not trees or any(not tree.shape.counts for tree in trees)):
            raise InvalidParameter("A planner needs at least one tree, and every tree a draft.")
        self._suited = trees is None
        self._choose_from(ARMS if trees is None else trees)
        self.current = 1
        self.steps = 0
        self.spent = 0.0
        self.lost = 0.0
        self._relative, self._rows, self._unread = 0.0, 1, 0
        self._tried, self._best = 0, 1
        self._won, self._faced = HOPE, 1.0

    @property
    def shape(self) -> TreeShape:
        """The shape of the next tree."""
        return self.shapes[self.current]

    @property
    def largest(self) -> TreeShape:
        """The largest shape, of the trees for any temperature before the first step, as it is unknown then."""
        others = [tree.shape for tree in SAMPLED_ARMS] if self._suited and not self.steps else []
        return max([*self.shapes, *others], key=lambda shape: shape.size)

    def _choose_from(self, trees: Sequence[TreePolicy]) -> None:
        self.shapes = (PLAIN, *(tree.shape for tree in trees))
        self.known = [Experience() for _ in self.shapes]

    def opens(self, length: int, left: int, rows: int, relative: float, sampled: bool) -> None:
        """Choose the first tree of new texts, before their prompts are read.

        Args:
            length: the tokens of the longest prompt; a drafter that is asked later must read them then.
            left: the most tokens that are still to be written.
            rows: the number of texts in the batch.
            relative: the expected cost of a pass of the drafter, in passes of the target.
            sampled: whether the temperature is above 0.
        """
        if self._suited and not self.steps:
            self._choose_from(SAMPLED_ARMS if sampled else ARMS)
        self._relative, self._rows = relative, rows
        best = max(self._tried_arms(), key=self.rate, default=1)
        known = self.known[0].steps > 0 or self.known[best].steps > 1
        self.current = best if known or self._first_cost(length) <= STAKE * left else 0
        self._unread = 0 if self.current else length

    def note(self, block: Block, seconds: float, outlook: Outlook | None = None) -> None:
        """Learn from a step and choose the next tree."""
        if not block.rows:
            return
        tokens = sum(len(row.tokens) for row in block.rows.values()) / len(block.rows)
        self.learn(tokens, seconds, outlook)

    def learn(self, tokens: float, seconds: float, outlook: Outlook | None = None) -> None:
        """Learn that the current tree brought so many tokens per row in so much time; choose the next.

        Args:
            tokens: the new tokens per row.
            seconds: what the step took.
            outlook: the chances that its drafts had, if they are known; else the result stands for them.
        """
        reading = self._reading() if self.current else 0.0
        least = self._seconds(0) * (1 + self._extra(self.current)) if reading else seconds
        own = max(seconds - reading, min(seconds, least))  # reading is an estimate, and must not explain too much
        if self.known[0].steps and own > HICCUP * (expected := self._seconds(self.current)):
            own = (HICCUP if self.known[self.current].steps else 1.0) * expected
        if not (self.current or self.known[0].steps):
            own = self._settled(own)
        self.known[self.current] = self.known[self.current].after(tokens, own, self.steps)
        self.steps += 1
        self.spent += seconds
        if self.current:
            seen = outlook or Outlook(tokens - 1, min(tokens, self.shape.depth))
            self._won = MEMORY * self._won + seen.won
            self._faced = MEMORY * self._faced + seen.faced
        self._unread = 0 if self.current else self._unread + 1
        if self.current == self._best == 0 and self.steps % PAUSE:
            return  # one more plain step changes nothing, and to think it over takes as long as to verify it
        self._best = best = max(self._tried_arms(), key=self.rate)
        if self.current != best:
            self.lost += max(0.0, own + reading - own * self.rate(self.current) / self.rate(best))
        self.current = self._next(best) if self.known[0].steps else 0

    def rate(self, arm: int) -> float:
        """Return the tokens per second that an arm promises; it must have been tried."""
        found = self.known[arm]
        if not found.seconds:
            return float("inf")
        tokens = (found.tokens + TRUST * self._hoped(arm)) / (found.steps + TRUST)
        return tokens * found.steps / found.seconds

    def _settled(self, plain: float) -> float:
        """Return the time that the first plain step counts as, and correct the times of the trees before it.

        Each of these times may be a hiccup, so each bounds the others: a tree takes no less than a plain step and the
        cost of its size, and not many times as much.
        """
        sizes = {arm: 1 + self._extra(arm) for arm in self._tried_arms()}
        plain = min([plain, *(self._seconds(arm) / size for arm, size in sizes.items())])
        for arm, size in sizes.items():
            found = self.known[arm]
            self.known[arm] = replace(found, seconds=min(found.seconds, UNFORESEEN * size * plain * found.steps))
        return plain

    def _next(self, best: int) -> int:
        """Return an untried tree if it promises more than the best arm and this is a tree; else ask `_trial`."""
        untried = [arm for arm, found in enumerate(self.known) if not found.steps] if best else []
        promises = {arm: self._hoped(arm) / self._seconds(arm) for arm in untried}
        arm = max(promises, key=lambda one: promises[one], default=best)
        return arm if promises.get(arm, 0.0) > self.rate(best) else self._trial(best)

    def _hoped(self, arm: int) -> float:
        """Return the expected tokens of an arm, from the levels of all trees so far."""
        win = self._won / self._faced
        return sum(win**depth for depth in range(self.shapes[arm].depth + 1))

    def _tried_arms(self) -> list[int]:
        return [arm for arm, found in enumerate(self.known) if found.steps]

    def _trial(self, best: int) -> int:
        """Return an arm to try if a trial is due and affordable; else the best arm.

        The arm with the least risk per step since its last trial goes first; among equals the one that promises most.
        """
        if self.steps - self._tried < PAUSE:
            return best
        left = BUDGET * self.spent - self.lost
        risks = {arm: self._risk(arm, best) for arm in range(len(self.shapes)) if arm != best}
        affordable = [arm for arm, risk in risks.items() if risk <= left]
        if not affordable:
            return best
        self._tried = self.steps
        return min(
            affordable,
            key=lambda one: (risks[one] / (self.steps - self.known[one].last), -self._hoped(one) / self._seconds(one)),
        )

    def _risk(self, arm: int, best: int) -> float:
        """Return the time that a step of an arm is expected to lose."""
        reading = self._reading() if arm else 0.0
        return reading + max(0.0, self._seconds(arm) - self._hoped(arm) / self.rate(best))

    def _seconds(self, arm: int) -> float:
        """Return the time of a step with an arm: measured, or expected for an untried one.

        For its size, an untried tree is expected to cost as much as the cheapest tree that was tried.
        """
        found = self.known[arm]
        if found.steps:
            return found.seconds / found.steps
        plain = self.known[0].seconds / self.known[0].steps
        tried = [one for one in self._tried_arms() if one]
        if not tried:
            return plain * (1 + self._extra(arm))
        unit = min((self._seconds(one) - plain) / (BESIDES + self._extra(one)) for one in tried)
        return plain + max(0.0, unit) * (BESIDES + self._extra(arm))

    def _extra(self, arm: int) -> float:
        """Return the expected cost of a tree beside the plain step, in plain steps, by its size and the drafter's."""
        shape = self.shapes[arm]
        return self._relative * shape.depth + WIDENING * self._rows * (shape.size - 1)

    def _first_cost(self, length: int) -> float:
        """Return what the first step with a tree may lose, in plain steps. The drafter must read the prompts first."""
        return self._extra(1) + READING * self._relative * length * self._rows

    def _reading(self) -> float:
        """Return the expected seconds in which the drafter reads what it missed; 0 before the first plain step."""
        plain = self.known[0]
        unread = max(0, self._unread - 2)
        return READING * self._relative * unread * self._rows * plain.seconds / plain.steps if plain.steps else 0.0


def relative_cost(target: LanguageModel, drafter: Drafter) -> float:
    """Return the expected cost of a pass of the drafter, in passes of the target, from the bytes of their weights.

    A large draft model pushes the target's weights out of the processor's caches, so its cost grows faster than its
    size. A drafter whose weights are unknown counts as a quarter of the target.
    """
    models = drafter.models()
    if models == ():
        return 0.0
    sizes, whole = [weight_bytes(model) for model in models or ()], weight_bytes(target)
    size = sum(sizes) / whole if whole and sizes and all(sizes) else 0.25
    return size * (1 + size / 2)
