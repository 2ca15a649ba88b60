"""Tree policies: how many children each node gets, decided before they are drawn.

**The number of children at a node is decided before they are drawn**, from its ancestors and draft row, or from
anything else that was drawn earlier (`trees.growing.growth` has the proof). **Pruning after sampling is allowed only
under a deterministic scheme**: dropping a sampled child because of what it is changes the law of those that remain, and
verification is then biased (drawing two and keeping the likelier one misses the target law by 0.05 to 0.19).

A policy derives from one of three classes: from `TreePolicy` if the shape of its next tree is known beforehand, from
`LearningPolicy` if it chooses that shape by what finished steps brought and took, and from `GrowingPolicy`
(`trees.growing`) if it shapes each tree as it grows. What most policies have in common is a default of these classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self, cast

from jaxtyping import Float
from torch import Tensor

from polydraft.errors import InvalidParameter, is_whole, shortened
from polydraft.schemes import Scheme
from polydraft.trees.tree import MOST_NODES, TokenTree, TreeShape, Verdict


class TreePolicy:
    """A rule for the shape of trees: the next one has its `shape`, whatever is drawn, unless the policy grows."""

    __slots__ = ()

    if TYPE_CHECKING:  # policies may have it as a field, of which a property here would become the default

        @property
        def shape(self) -> TreeShape:
            """The shape of the next tree; of a growing policy, bounds on its nodes, depth and nodes' children."""
            ...

    @property
    def largest(self) -> TreeShape:
        """The largest shape that a tree may ever have, or bounds on it."""
        return self.shape

    @property
    def most_drafts(self) -> int:
        """The most drafts of one tree."""
        return self.largest.size - 1

    @property
    def stops(self) -> bool:
        """Whether growth may end before its full depth by what was drawn.

        Draft rows are then listed as for sampled drafts, since their probabilities are looked at.
        """
        return False

    def grows_on(self, depth: int, chances: Float[Tensor, "b c"]) -> bool:
        """Tell whether the nodes of a depth get children, in all rows of the batch.

        It may look at all that was drawn so far (`trees.growing.growth` has the proof). A policy that `stops` is asked
        once for every depth but the last, from 1 on; one that grows is asked which nodes it opens instead.

        Args:
            depth: the depth that was just drawn.
            chances: the draft probabilities of its nodes' tokens, in node order.
        """
        return True

    def check(self, scheme: Scheme) -> None:
        """Check that the policy's trees can be drawn under a scheme.

        Raises:
            UnpairedScheme: they cannot.
        """

    def after(self, tree: TokenTree, verdict: Verdict) -> Self:
        """Return the policy for the next step, given what was drafted and kept in this one: itself, unless it learns.

        The answer is a part of the step, which may be taken again, so it follows from these values alone.
        """
        return self

    def select(self, rows: Sequence[int]) -> Self:
        """Return the policy for some rows of a batch, with what it has learnt of each."""
        return self

    def put(self, row: int, other: Any) -> Self:
        """Return the policy with what another has learnt of its only row, as a row's, or as that behind the last."""
        return self


@dataclass(frozen=True)
class Lookup:
    """A continuation of a row's text that was looked up, as a tree without its tokens.

    Args:
        parents: by node, the place of the node above it, an earlier one; -1 below the root. () if nothing
            was found.
        source: who found it.
    """

    parents: tuple[int, ...] = ()
    source: str = ""


class LearningPolicy(TreePolicy, ABC):
    """A policy that chooses the shape of every tree by what finished steps of its texts brought and took.

    It is told once, behind the step, and changes in place, since texts share it and whoever made it reads it. The shape
    is known before the first draft, so every text follows the target's law; but where it depends on clocks or on other
    texts, a seed does not fix a sampled text.
    """

    __slots__ = ()
    weighs_lookups = False
    """Whether it chooses between its trees and continuations that were looked up in the text."""

    def suited(self, usual: TreePolicy) -> None:
        """Take note of the trees that suit the drafter, before anything else; `largest` may follow from them."""

    def views_by(self, view: str, relative: Callable[[int], float]) -> None:
        """Take note that a view of the target drafts, of which costs and chances are to be kept by themselves.

        Args:
            view: its name.
            relative: what a level of its drafts costs behind so many tokens, in passes of the target over one.
        """

    @abstractmethod
    def texts_opened(self, opening: Any) -> None:
        """Choose the first tree of new texts, before their prompts are read, by what is known of them (`Opening`)."""

    @abstractmethod
    def learn(self, lessons: Sequence[Any], spent: Any, scored: int) -> None:
        """Learn from a step and choose the next tree.

        Args:
            lessons: what a step showed of each text (`Lesson`).
            spent: the seconds that it took (`Spent`).
            scored: the tokens that the target scored, of all rows.
        """

    @property
    def why_idle(self) -> str:
        """Why the drafter is not asked at present, in a sentence; empty where it is, or nothing was learnt."""
        return ""

    @property
    def uses_lookups(self) -> bool:
        """Whether continuations are looked up for the next tree; finished steps decide."""
        return True

    def rows_with_lookup(self, found: Sequence[Lookup]) -> tuple[int, ...]:
        """Return the rows that take what was found for them, given its shape and who found it; others take the tree.

        It is known from the committed text, so that nothing drawn decides.
        """
        return rows_found(self, found)


def rows_found(policy: TreePolicy, found: Sequence[Lookup]) -> tuple[int, ...]:
    """Return the rows for which something was looked up, if anything is to be drafted at all."""
    return tuple(row for row, one in enumerate(found) if one.parents) if policy.shape.counts else ()


@dataclass(frozen=True)
class Chain(TreePolicy):
    """One draft per node: `length` drafts in a row.

    Raises:
        InvalidParameter: a length that is no integer from 1 to 4095.
    """

    length: int

    def __post_init__(self) -> None:
        _chain(_positive("length", self.length))

    @property
    def shape(self) -> TreeShape:
        """A chain of `length` drafts."""
        return _chain(self.length)


def as_chain(policy: TreePolicy) -> TreePolicy:
    """Return a policy itself if its trees cannot branch, else the chain that is as deep as they are."""
    return policy if policy.shape.max_children <= 1 else Chain(policy.shape.depth)


@dataclass(frozen=True)
class Widths(TreePolicy):
    """Every node at depth i has `widths[i]` children: (4, 2, 1) gives 4, then 8, then 8 nodes.

    Raises:
        InvalidParameter: widths that are no integers of at least 1, or too many nodes.
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        _product(checked_widths(self.widths))

    @property
    def shape(self) -> TreeShape:
        """The full product tree."""
        return _product(tuple(self.widths))


@dataclass(frozen=True)
class TrunkThenBranch(TreePolicy):
    """A chain of `trunk` drafts, then `widths` below its end: (2, (3, 1)) is the tree of widths 1, 1, 3, 1.

    Worth it where draft and target agree at first and part later: drafts beside the trunk would be wasted. With widths
    (K, 1, ..., 1) these are K paths from one point ("delayed expansion", arXiv 2602.16994).

    Raises:
        InvalidParameter: a trunk or widths that are no integers of at least 1, or too many nodes.
    """

    trunk: int
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        _chain(_positive("the trunk", self.trunk))
        _product((1,) * self.trunk + checked_widths(self.widths))

    @property
    def shape(self) -> TreeShape:
        """The trunk with the full product tree below."""
        return _product((1,) * self.trunk + tuple(self.widths))


@dataclass(frozen=True)
class Fixed(TreePolicy):
    """A given shape, such as `EAGLE_25`, `MEDUSA_63` or the result of a shape search.

    Raises:
        InvalidParameter: no `TreeShape`.
    """

    shape: TreeShape  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        given = cast(object, self.shape)
        if not isinstance(given, TreeShape):
            raise InvalidParameter(f"A fixed tree needs a TreeShape, such as EAGLE_25, but has {shortened(given)}.")


@lru_cache(maxsize=256)
def _chain(length: int) -> TreeShape:
    if length >= MOST_NODES:
        raise InvalidParameter(f"The chain of {length} drafts has over {MOST_NODES} nodes.")
    return TreeShape(((1,),) * length)


@lru_cache(maxsize=256)
def _product(widths: tuple[int, ...]) -> TreeShape:
    counts: list[tuple[int, ...]] = []
    nodes = 1
    for width in widths:
        counts.append((width,) * nodes)
        nodes *= width
        if nodes > MOST_NODES or len(counts) > MOST_NODES:
            raise InvalidParameter(f"The tree of widths {shortened(widths)} has over {MOST_NODES} nodes.")
    return TreeShape(tuple(counts))


def _positive(name: str, value: int) -> int:
    if not is_whole(value) or value < 1:
        raise InvalidParameter(f"{name} of a tree must be an integer of at least 1, but is {value!r}.")
    return value


def checked_widths(widths: object) -> tuple[int, ...]:
    """Return numbers of children per depth as a tuple.

    Raises:
        InvalidParameter: they are no integers of at least 1.
    """
    listed = cast(Sequence[object], widths) if isinstance(widths, tuple | list) else (None,)
    if not all(is_whole(one) and cast(int, one) >= 1 for one in listed):
        found = shortened(cast(object, widths))
        raise InvalidParameter(f"Widths of a tree must be integers of at least 1, such as (4, 2, 1), but are {found}.")
    return tuple(cast(Sequence[int], listed))
