"""Tree policies: how many children each node gets, decided before they are drawn.

**The number of children at a node is decided before they are drawn**, from its ancestors and draft row, or from
anything else that was drawn earlier (`trees.dynamic.policy` has the proof). **Pruning after sampling is allowed only
under a deterministic scheme**: dropping a sampled child because of what it is changes the law of those that remain, and
verification is then biased (drawing two and keeping the likelier one misses the target law by 0.05 to 0.19).

The policies here fix the shape of every tree in advance; those of `trees.dynamic` shape each tree as it grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from polydraft.errors import InvalidParameter, is_whole, shortened
from polydraft.trees.shape import MOST_NODES, TreeShape


@runtime_checkable
class TreePolicy(Protocol):
    """A rule for the shape of trees: one fixed shape, or more to go by (`DynamicPolicy`)."""

    @property
    def shape(self) -> TreeShape:
        """The shape of the next tree; of a dynamic policy, bounds on its nodes, its depth and its nodes' children."""
        ...


@runtime_checkable
class ChoosingPolicy(TreePolicy, Protocol):
    """A policy that chooses another shape for every tree, knowing none of its tokens."""

    @property
    def largest(self) -> TreeShape:
        """The largest shape that it may choose."""
        ...


@dataclass(frozen=True)
class Found:
    """A continuation of a row's text that was looked up, as a tree without its tokens.

    Args:
        parents: by node, the place of the node above it, an earlier one; -1 below the root. () if nothing
            was found.
        source: who found it.
    """

    parents: tuple[int, ...] = ()
    source: str = ""


@runtime_checkable
class TakingPolicy(ChoosingPolicy, Protocol):
    """A policy that chooses between its trees and continuations that were looked up in the text (`LookupFirst`)."""

    def looks(self) -> bool:
        """Tell whether continuations are looked up for the next tree; finished steps decide."""
        ...

    def takes(self, found: Sequence[Found]) -> tuple[int, ...]:
        """Return the rows that take what was found for them, given its shape and who found it; others take the tree.

        It is known from the committed text, so that nothing drawn decides.
        """
        ...


def is_looked_up(policy: TreePolicy) -> bool:
    """Tell whether continuations are to be looked up for a policy's next tree."""
    return not isinstance(policy, TakingPolicy) or policy.looks()


def rows_taken(policy: TreePolicy, found: Sequence[Found], least: int) -> tuple[int, ...]:
    """Return the rows that take what was looked up for them: those of so many tokens, or fewer rows.

    Args:
        policy: of the trees that they could take instead.
        found: by row.
        least: fewer tokens are not worth a step.
    """
    enough = [one if len(one.parents) >= least else Found() for one in found]
    if isinstance(policy, TakingPolicy):
        return policy.takes(enough)
    return tuple(row for row, one in enumerate(enough) if one.parents) if policy.shape.counts else ()


def largest_shape(policy: TreePolicy) -> TreeShape:
    """Return the largest shape that a policy's trees can have."""
    return policy.largest if isinstance(policy, ChoosingPolicy) else policy.shape


@runtime_checkable
class BudgetPolicy(TreePolicy, Protocol):
    """A policy whose trees have at most `drafts` drafts, wherever they are."""

    @property
    def drafts(self) -> int:
        """The most drafts of one tree."""
        ...


@runtime_checkable
class RationedPolicy(BudgetPolicy, Protocol):
    """A budget policy that can give each row of a batch a budget of its own."""

    def rationed(self, budgets: tuple[int, ...]) -> TreePolicy:
        """Return the same for a batch whose rows have these budgets, none larger than `drafts`.

        A row's tree follows from its own budget alone, not from its neighbours'.
        """
        ...


def most_drafts(policy: TreePolicy) -> int:
    """Return the most drafts that one of a policy's trees can have."""
    return policy.drafts if isinstance(policy, BudgetPolicy) else largest_shape(policy).size - 1


class FixedShape:
    """A policy whose next tree has its `shape`, whatever is drawn, and that learns nothing from verdicts.

    Asking for this class is quick, and asked in every step; asking for a protocol is not.

    One that `stops` is asked at every depth whether growth goes on. This is not asked on a device, which would have to
    be waited for.
    """

    __slots__ = ()

    @property
    def stops(self) -> bool:
        """Whether growth may end before the shape is full."""
        return False

    def goes_on(self, depth: int, chances: Float[Tensor, "b c"]) -> bool:
        """Tell whether the nodes of a depth get children, in all rows of the batch.

        It may look at all that was drawn so far (`trees.dynamic.policy` has the proof), and is asked once for every
        depth but the last, from 1 on.

        Args:
            depth: the depth that was just drawn.
            chances: the draft probabilities of its nodes' tokens, in node order.
        """
        return True


def stopping(policy: TreePolicy) -> FixedShape | None:
    """Return a policy of fixed shapes whose growth may end before they are full; None for all others."""
    return policy if isinstance(policy, FixedShape) and policy.stops else None


@dataclass(frozen=True)
class Chain(FixedShape):
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
class Widths(FixedShape):
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
class TrunkThenBranch(FixedShape):
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
class Fixed(FixedShape):
    """A given shape, such as `EAGLE_25`, `MEDUSA_63` or the result of a shape search.

    Raises:
        InvalidParameter: no `TreeShape`.
    """

    shape: TreeShape

    def __post_init__(self) -> None:
        _require_shape(self.shape)


def _require_shape(value: object) -> None:
    if not isinstance(value, TreeShape):
        raise InvalidParameter(f"A fixed tree needs a TreeShape, such as EAGLE_25, but has {shortened(value)}.")


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
