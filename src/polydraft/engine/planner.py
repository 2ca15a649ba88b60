"""Choosing the tree of every step by what trees brought and took so far, plain decoding among them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polydraft.drafters import Drafter
from polydraft.engine.block import Block
from polydraft.engine.wrappers.witness import Outlook
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, LanguageModel
from polydraft.trees import Chain, TreePolicy, TreeShape, Widths
from polydraft.trees.policies import FixedShape

PLAIN = TreeShape(())
MEMORY = 0.98
"""How much of an arm's experience is left after each further step, of whatever arm: machines and texts drift."""
HOPE = 0.55
"""How likely a level of drafts has an accepted one, before any was seen; counts as much as one level."""
TRUST = 5.0
"""How many of an arm's own steps count as much as what is hoped of it."""
STAKE = 0.02
"""The share of a text's plain steps that a first trial may lose."""
BUDGET = 0.008
"""The share of all time that may be lost to later trials of arms that are not the best."""
HICCUP = 1.5
"""A step counts as at most so many times as long as expected, since a machine is busy now and then, and a tree's first
as long as expected if it took longer, since a new shape is slow."""
UNFORESEEN = 1.75
"""How many times as long as its size suggests the very first step may count, which nothing was timed before."""
PAUSE = 8
"""The least number of steps between two such trials."""
READING = 1 / 40
"""What reading a token with others takes, in passes over one token."""
WIDENING = 1 / 64
"""What another row or node adds to a pass, in passes over one token, before any was timed."""
BESIDES = 0.1
"""What a tree costs beside its levels and nodes, in passes over one token, when it is compared with another."""
ARMS: tuple[TreePolicy, ...] = tuple(map(Widths, ((2, 1, 1), (2, 1, 1, 1, 1), (1,), (2, 1, 1, 1, 1, 1, 1, 1), (3, 2))))
"""The trees to choose from at temperature 0."""
SAMPLED_ARMS: tuple[TreePolicy, ...] = tuple(map(Chain, (5, 7, 1)))
"""Those above it, where chains drawn from whole rows and verified as blocks were ahead of trees."""


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
        kept = MEMORY ** (number - self.last)
        return Experience(kept * self.steps + 1, kept * self.tokens + tokens, kept * self.seconds + seconds, number)


class Planner(FixedShape):
    """A tree policy that learns as it goes: before each step it takes the tree with the most tokens per second.

    Problem: arms with unknown, drifting rewards, where also trying costs: lose little on what turns out slow.
    Rule: if the size of the draft model lets expect that a step with the first tree loses little of the text's time,
    the first step takes that tree and the second drafts nothing. After that the arm of the best rate

        (tokens + 5 hoped) / (steps + 5) / mean seconds

    is taken; plain decoding with its one token is an arm. Hoped for are 1 + p + ... + p^depth tokens, p being the share
    of levels won in all trees so far; of chains drawn by sampling, where both laws are known at every node, the mean
    chance of winning (`Outlook`), from which one step tells as much as from many results. While a tree is best,
    untried ones are taken on what is hoped of them and what trees of their size should take. Any other arm is tried
    only if what this is expected to lose, with all that trials lost before, stays below 0.8 % of the time spent. Plain
    steps cost nothing but themselves: the draft model is not run, not even over the prompt, and reads what it missed
    when it is asked again, which counts as part of the risk.
    Exactness: the tree of a step depends on steps that are over, so every output law is the target's; with sampling,
    which text is written depends on the times measured, so that a seed alone does not fix it.

    A planner may be shared by one generation after another of the same models, settings and batch size, and then need
    not learn anew; not by two at once.

    Args:
        trees: policies to choose from; the first is the first guess. None for those that suit the temperature.

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
        """The largest of the shapes, for any temperature if they are still to be chosen by it."""
        others = [tree.shape for tree in SAMPLED_ARMS] if self._suited and not self.steps else []
        return max([*self.shapes, *others], key=lambda shape: shape.size)

    def _choose_from(self, trees: Sequence[TreePolicy]) -> None:
        self.shapes = (PLAIN, *(tree.shape for tree in trees))
        self.known = [Experience() for _ in self.shapes]

    def opens(self, length: int, left: int, rows: int, relative: float, sampled: bool) -> None:
        """Learn that texts begin, before their prompts are read, and choose their first tree.

        Args:
            length: the tokens of the longest prompt, which a drafter that is asked later must read then.
            left: the most tokens that are to come.
            rows: the texts of a batch.
            relative: what a pass of the drafter should cost beside one of the target.
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
        """Return what the first plain step should count, and correct the trees before it: each may be a hiccup.

        No tree takes less than plain decoding with its size added, nor, as far as is known, much more.
        """
        sizes = {arm: 1 + self._extra(arm) for arm in self._tried_arms()}
        plain = min([plain, *(self._seconds(arm) / size for arm, size in sizes.items())])
        for arm, size in sizes.items():
            found = self.known[arm]
            self.known[arm] = replace(found, seconds=min(found.seconds, UNFORESEEN * size * plain * found.steps))
        return plain

    def _next(self, best: int) -> int:
        """Return an untried tree that should beat the best, if that is a tree; else what `_trial` says."""
        untried = [arm for arm, found in enumerate(self.known) if not found.steps] if best else []
        promises = {arm: self._hoped(arm) / self._seconds(arm) for arm in untried}
        arm = max(promises, key=lambda one: promises[one], default=best)
        return arm if promises.get(arm, 0.0) > self.rate(best) else self._trial(best)

    def _hoped(self, arm: int) -> float:
        """Return the tokens that an arm is expected to bring by what levels of any tree brought."""
        win = self._won / self._faced
        return sum(win**depth for depth in range(self.shapes[arm].depth + 1))

    def _tried_arms(self) -> list[int]:
        return [arm for arm, found in enumerate(self.known) if found.steps]

    def _trial(self, best: int) -> int:
        """Return the arm to try if one is due and affordable, by risk and the time since; else the best.

        Of arms without risk it is the one of which most is hoped.
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
        """Return what a step takes, or should take.

        An untried tree costs as much beside plain decoding, for its size, as the cheapest that was tried.
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
        """Return what a tree should cost, in plain steps, by its size and that of the drafter."""
        shape = self.shapes[arm]
        return self._relative * shape.depth + WIDENING * self._rows * (shape.size - 1)

    def _first_cost(self, length: int) -> float:
        """Return what a first step with a tree may lose, in plain steps, with the drafter's reading of the prompts."""
        return self._extra(1) + READING * self._relative * length * self._rows

    def _reading(self) -> float:
        """Return the seconds that the drafter should take for what it has not read, before any was timed nothing."""
        plain = self.known[0]
        unread = max(0, self._unread - 2)
        return READING * self._relative * unread * self._rows * plain.seconds / plain.steps if plain.steps else 0.0


def relative_cost(target: LanguageModel, drafter: Drafter) -> float:
    """Return what a pass of the drafter should cost beside one of the target, by the bytes of their weights.

    A draft model that is not small pushes the target's weights out of the processor's caches, so that half of its size
    is charged once more. Of a drafter that cannot be looked into a quarter is expected.
    """
    models = drafter.models()
    if models == ():
        return 0.0
    sizes, whole = [_weight_bytes(model) for model in models or ()], _weight_bytes(target)
    size = sum(sizes) / whole if whole and sizes and all(sizes) else 0.25
    return size * (1 + size / 2)


def _weight_bytes(model: LanguageModel) -> int:
    """Return the bytes of a model's weights; 0 if it is none of Hugging Face's."""
    if not isinstance(model, HuggingFaceModel):
        return 0
    return sum(weight.numel() * weight.element_size() for weight in model.model.parameters())
