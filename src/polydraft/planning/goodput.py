"""SmartSpec's rule: the length of the next chain by goodput, tokens of the whole batch over seconds."""

from collections.abc import Sequence

from polydraft.errors import InvalidParameter
from polydraft.planning.costs import Costs, Spent, costs_for
from polydraft.planning.lessons import Lesson
from polydraft.planning.planner import PLAIN, Opening, Planner
from polydraft.trees import Chain, LearningPolicy, TreeShape

FIRST = 0.7
"""The acceptance that is assumed at the beginning of a generation."""
MEMORY = 0.95
"""Every step multiplies what was seen before by this."""
OF_FIRST = 4.0
"""How many drafts' worth the first guess counts for."""


class Goodput(LearningPolicy):
    """Chains whose length has the largest expected goodput; none where plain decoding has more.

    Rule: with the mean acceptance alpha, a chain of k drafts brings l(k) = 1 + alpha + ... + alpha^k tokens of each
    text, and the next chain is argmax_k l(k) / seconds(k), k from 0 to `longest`. Alpha is a moving average of what was
    accepted of what was tried; seconds follow from measured passes (`Costs`).
    What it does not do: it takes no trees and no lookups, and knows alpha no better once it has stopped to draft, so
    that it stays with plain decoding to the end of a generation. `Planner` does all of this.
    Exactness: as for `Planner`; a seed does not fix a sampled text.
    Source: SmartSpec, arXiv 2406.14066, section 4, with a table of times instead of a linear fit.

    Args:
        longest: the longest chain.

    Raises:
        InvalidParameter: a length below 1.
    """

    def __init__(self, longest: int = 8) -> None:
        if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
            raise InvalidParameter(f"longest must be an integer of at least 1, but is {longest!r}.")
        self.shapes: tuple[TreeShape, ...] = (PLAIN, *(Chain(length).shape for length in range(1, longest + 1)))
        self._of_rows: dict[int, Costs] = {}
        self.costs = Costs(1, 0.25)
        self._forget()

    @property
    def shape(self) -> TreeShape:
        """The shape of the next tree."""
        return self.shapes[self.length]

    @property
    def largest(self) -> TreeShape:
        """The longest chain."""
        return self.shapes[-1]

    @property
    def acceptance(self) -> float:
        """The mean chance of a draft to be accepted once those before it are."""
        return self._won / self._faced

    def texts_opened(self, opening: Opening) -> None:
        """Begin a generation with the first guess at the acceptance."""
        self.costs = costs_for(self._of_rows, opening.rows, opening.relative)
        self._forget()

    def learn(self, lessons: Sequence[Lesson], spent: Spent, scored: int) -> None:
        """Learn from a step and choose the next chain."""
        if not lessons:
            return
        self.costs.learn(spent, scored, self.shape)
        tried = [one for lesson in lessons for one in lesson.tried]
        weight = sum(share for *_, share in tried)
        if weight:
            self._won = MEMORY * self._won + sum(share * chance for _, _, chance, share in tried)
            self._faced = MEMORY * self._faced + weight
        self.length = self._best()

    def _forget(self) -> None:
        self._won, self._faced = FIRST * OF_FIRST, OF_FIRST
        self.length = self._best()

    def _best(self) -> int:
        tokens, total, alpha = list[float](), 0.0, self.acceptance
        for length in range(len(self.shapes)):
            total += alpha**length
            tokens.append(total)
        return max(range(len(tokens)), key=lambda length: tokens[length] / self.costs.step(self.shapes[length]))


PLANNERS: dict[str, type[Planner] | type[Goodput]] = {"auto": Planner, "goodput": Goodput}
"""The words for policies that choose the tree of every step."""
