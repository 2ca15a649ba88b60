"""Choosing the tree of every step by what trees brought and took so far, plain decoding among them."""

from collections.abc import Sequence
from dataclasses import dataclass

from polydraft.engine.block import Block
from polydraft.errors import InvalidParameter
from polydraft.trees import TreePolicy, TreeShape, Widths

PLAIN = TreeShape(())
MEMORY = 0.98
"""How much of an arm's experience is left after each further step of it."""
PRIOR = 3.0
"""How many steps' worth of experience an arm is given in advance."""
HOPE = 0.55
"""How likely a level of drafts has an accepted one, before any was seen; counts as much as `PRIOR` levels."""
BUDGET = 0.015
"""The share of all time that may be lost to trying arms that are not the best."""
PAUSE = 8
"""The least number of steps between two such trials."""
ARMS: tuple[TreePolicy, ...] = (Widths((3, 2)), Widths((3, 2, 1)), Widths((2, 1)), Widths((1,)), Widths((2, 2, 1, 1)))


@dataclass(frozen=True)
class Experience:
    """What steps with one tree brought and took; the last ones count most.

    Args:
        steps: how many there were.
        tokens: tokens per row that they brought.
        seconds: what they took.
        last: the number of the last of them.
    """

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    last: int = -1

    def after(self, tokens: float, seconds: float, number: int) -> "Experience":
        """Add a step."""
        return Experience(
            MEMORY * self.steps + 1, MEMORY * self.tokens + tokens, MEMORY * self.seconds + seconds, number
        )


class Planner:
    """A tree policy that learns as it goes: before each step it takes the tree with the most tokens per second.

    Problem: arms with unknown, drifting rewards, where also trying costs: lose little on what turns out slow.
    Rule: the first step drafts the first tree, the second drafts nothing; after that the arm of the best rate

        (tokens + 3 hoped) / (steps + 3) / mean seconds

    is taken; plain decoding with its one token is an arm. Hoped for are 1 + p + ... + p^depth tokens, p being the share
    of levels won in all trees so far. Another arm is tried only if what this is expected to lose, with all
    that trials lost before, stays below 1.5 % of the time spent. Plain steps cost nothing but themselves: the draft
    model is not run, and reads what it missed when it is asked again.
    Exactness: the tree of a step depends on steps that are over, so every output law is the target's; with sampling,
    which text is written depends on the times measured, so that a seed alone does not fix it.

    A planner may be shared by one generation after another of the same models, settings and batch size, and then need
    not learn anew; not by two at once.

    Args:
        trees: policies to choose from; the first is the first guess.

    Raises:
        InvalidParameter: there is none, or one of them drafts nothing.
    """

    def __init__(self, trees: Sequence[TreePolicy] = ARMS) -> None:
        if not trees or any(not tree.shape.counts for tree in trees):
            raise InvalidParameter("A planner needs at least one tree, and every tree a draft.")
        self.shapes = (PLAIN, *(tree.shape for tree in trees))
        self.known = [Experience() for _ in self.shapes]
        self.current = 1
        self.steps = 0
        self.spent = 0.0
        self.lost = 0.0
        self._tried = 0
        self._won, self._faced = PRIOR * HOPE, PRIOR

    @property
    def shape(self) -> TreeShape:
        """The shape of the next tree."""
        return self.shapes[self.current]

    @property
    def largest(self) -> TreeShape:
        """The largest of the shapes."""
        return max(self.shapes, key=lambda shape: shape.size)

    def note(self, block: Block, seconds: float) -> None:
        """Learn from a step and choose the next tree."""
        if not block.rows:
            return
        tokens = sum(len(row.tokens) for row in block.rows.values()) / len(block.rows)
        self.learn(tokens, seconds)

    def learn(self, tokens: float, seconds: float) -> None:
        """Learn that the current tree brought so many tokens per row in so much time; choose the next."""
        self.known[self.current] = self.known[self.current].after(tokens, seconds, self.steps)
        self.steps += 1
        self.spent += seconds
        if self.shape.depth:
            self._won = MEMORY * self._won + tokens - 1
            self._faced = MEMORY * self._faced + min(tokens, self.shape.depth)
        best = max(self._tried_arms(), key=self.rate)
        if self.current != best:
            self.lost += max(0.0, seconds * (1 - self.rate(self.current) / self.rate(best)))
        self.current = 0 if self.steps == 1 else self._trial(best)

    def rate(self, arm: int) -> float:
        """Return the tokens per second that an arm promises; it must have been tried."""
        found = self.known[arm]
        if not found.seconds:
            return float("inf")
        tokens = (found.tokens + PRIOR * self._hoped(arm)) / (found.steps + PRIOR)
        return tokens * found.steps / found.seconds

    def _hoped(self, arm: int) -> float:
        """Return the tokens that an arm is expected to bring by what levels of any tree brought."""
        win = self._won / self._faced
        return sum(win**depth for depth in range(self.shapes[arm].depth + 1))

    def _tried_arms(self) -> list[int]:
        return [arm for arm, found in enumerate(self.known) if found.steps]

    def _trial(self, best: int) -> int:
        """Return the arm to try if one is due and affordable, else the best."""
        others = [arm for arm in range(len(self.shapes)) if arm != best]
        if self.steps - self._tried < PAUSE or not others:
            return best
        arm = min(others, key=lambda one: self.known[one].last)
        if self.lost + self._risk(arm, best) > BUDGET * self.spent:
            return best
        self._tried = self.steps
        return arm

    def _risk(self, arm: int, best: int) -> float:
        """Return the time that a step of an arm is expected to lose; an untried level costs what the first's did."""
        found = self.known[arm]
        if found.steps:
            return max(0.0, found.seconds / found.steps * (1 - self.rate(arm) / self.rate(best)))
        plain, first = (self.known[one].seconds / self.known[one].steps for one in (0, 1))
        level = max(0.0, first - plain) / self.shapes[1].depth
        return max(0.0, plain + level * self.shapes[arm].depth - self._hoped(arm) / self.rate(best))
