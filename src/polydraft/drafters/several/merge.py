"""Several drafters in one tree: the guesses of text drafters side by side, and another drafter's tree beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.several.hedge import RoutedDrafter, usual_members
from polydraft.drafters.several.route import USUAL, SeveralDrafters, check_several, sound_beside_guesses, written_by
from polydraft.drafters.text.guess import Bounds, Guess, TextDrafter, given, merged
from polydraft.errors import InvalidParameter, UnpairedScheme, is_number, shown
from polydraft.probs import SamplingParams
from polydraft.reading import Step, Text
from polydraft.rows import parts, per_row, scratch, shared
from polydraft.schemes import Given, Product, Scheme, require_scheme
from polydraft.trees import (
    Branches,
    Chain,
    Draft,
    Fixed,
    GrowingPolicy,
    Piece,
    Pieces,
    TreePolicy,
    TreeShape,
    branched,
    cut,
    in_pieces,
    restricted,
)

PRIOR_DRAFTS = 4
"""How many drafts the hope counts as, beside those that were tried."""


@dataclass(frozen=True)
class RowHistory:
    """What finished steps of a row have shown of the other drafter.

    Args:
        tried: how many of its drafts were compared with the text: those that stood where the text came by.
        kept: how many of them the text went on with.
    """

    tried: int = 0
    kept: int = 0

    def chance(self, hope: float) -> float:
        """Return the chance that the next draft is kept, from 0.01 to 0.99 in steps of a hundredth."""
        chance = (PRIOR_DRAFTS * hope + self.kept) / (PRIOR_DRAFTS + self.tried)
        return min(99, max(1, round(100 * chance))) / 100

    def after(self, both: Branches, row: int, written: Sequence[int]) -> "RowHistory":
        """Return the same after a step.

        Args:
            both: the joint draft, the other drafter's nodes being the first's.
            row: the row in it.
            written: the tokens that the step wrote.
        """
        tree = both.draft.tree
        mine, parents, tokens = (one[row].tolist() for one in (both.first & tree.valid, tree.parents, tree.tokens))
        at, tried, kept = 0, self.tried, self.kept
        for token in written:
            below = [node for node, own in enumerate(mine) if node and own and parents[node] == at]
            place = next((place for place, node in enumerate(below) if tokens[node] == token), -1)
            tried += place + 1 if place >= 0 else len(below)
            if place < 0:
                break
            at, kept = below[place], kept + 1
        return RowHistory(tried, kept)


def best_split(own: Sequence[tuple[int, float]], guesses: Sequence[float], nodes: int) -> int:
    """Return how many nodes the other drafter gets: as many as bring most together with the guesses beside them.

    Args:
        own: the sizes that its tree may have, rising, and how many of its drafts are expected to be accepted then.
        guesses: the chances of the guesses, falling.
        nodes: the nodes of both.
    """
    beside = [0.0, *accumulate(guesses)]
    worth = [value + beside[min(nodes - size, len(guesses))] for size, value in own]
    return own[max(range(len(own)), key=lambda place: (worth[place], place))][0]


@lru_cache(maxsize=1024)
def worth_of_levels(shape: TreeShape, chance: float) -> tuple[tuple[int, float], ...]:
    """Return the sizes of a shape's first 1, 2, ... levels, and how many drafts of each are expected to be accepted.

    A draft is accepted with the chance `chance`, where the one above it was and its earlier siblings were not.
    """
    reached, found, size, value = [1.0], list[tuple[int, float]](), 0, 0.0
    for level in shape.counts:
        reached = [
            above * chance * (1 - chance) ** rank
            for above, count in zip(reached, level, strict=False)
            for rank in range(count)
        ]
        size, value = size + len(reached), value + sum(reached)
        found.append((size, value))
    return tuple(found)


@lru_cache(maxsize=1024)
def worth_of_budgets(nodes: int, depth: int, children: int, chance: float) -> tuple[tuple[int, float], ...]:
    """Return the budgets 1, 2, ... and how many drafts of a tree grown with each are expected to be accepted, likewise.

    The rows that the tree will follow are not known yet; it is taken to have the places that are best on average.
    """
    waiting, found, value = [(-chance, 1, 0)], list[tuple[int, float]](), 0.0
    while waiting and len(found) < nodes:
        worth, level, rank = heappop(waiting)
        value -= worth
        found.append((len(found) + 1, value))
        if level < depth:
            heappush(waiting, (worth * chance, level + 1, 0))
        if rank + 1 < children:
            heappush(waiting, (worth * (1 - chance), level, rank + 1))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class MergedState:
    """The states of members and other drafter, the target's number of tokens, and what is known of the rows.

    Args:
        kept: per row, what finished steps have shown of the other drafter.
        joint: the step's joint trees by rows.
    """

    members: tuple[Any, ...] = parts()
    other: Any = parts()
    vocab_size: int = shared()
    kept: tuple[RowHistory, ...] = per_row(learnt=True)
    joint: tuple[tuple[tuple[int, ...], Branches], ...] = scratch(())


@dataclass(frozen=True, eq=False)
class Split:
    """The other drafter's trees for all rows, and per row how many nodes of these count, and the most children of one.

    Those of its first levels count, or as many as its tree may grow.
    """

    own: TreePolicy
    drafts: tuple[int, ...]
    most_children: tuple[int, ...]
    grows: bool


@dataclass(frozen=True, eq=False)
class MergedDrafter(SeveralDrafters):
    """Puts the guesses of several text drafters, and the tree of another drafter, below the same roots.

    What several guess is scored once. The policy's nodes are split row by row, before anything is drawn, so that as
    many as possible are expected to be accepted. A guess has the chance that its member gives it. A draft of the other
    drafter is accepted with a chance q where the one above it was and its earlier siblings were not; q begins as `hope`
    and is learnt from the row's finished steps (`RowHistory`). Of trees of a fixed shape the other drafter gets the
    first levels, of trees that grow a budget, and at least the first level or draft, so that there is something to
    learn from; the likeliest guesses get the rest.

    Exactness: guesses are fixed tokens. Beside drawn ones they are siblings under `Product`, each with a one-hot row of
    its own; under a deterministic scheme the union of both is what the scheme takes from one list. The split follows
    from the committed text, which guesses and their chances follow from, from finished steps, and from the policy: all
    of it is known before the first child is drawn, so that for a given past the step is one with a fixed budget, and
    exact. A batch's rows draft as deep as the deepest wants; what is more than a row's share is nobody's draw (`cut`),
    so that no row's text depends on its neighbours.

    Args:
        members: text drafters without riders.
        other: who else drafts into the tree; None for nobody.
        hope: the chance that a draft of the other drafter is kept, before anything is known of it.

    Raises:
        InvalidParameter: there is no member, one is no text drafter or brings riders, so does the other drafter, or
            `hope` is no chance.
    """

    members: tuple[TextDrafter, ...]
    other: Drafter | None = None
    hope: float = 0.7
    name: str = field(init=False)
    needs: Needs = field(init=False)
    sound = property(sound_beside_guesses)

    def __post_init__(self) -> None:
        check_several(self, "A merge")
        if not is_number(self.hope) or not 0 < self.hope < 1:
            raise InvalidParameter(f"hope must be between 0 and 1, but is {shown(self.hope)}.")
        if self.other is not None and self.other.needs.riders:
            raise InvalidParameter(f"A merge has no place for the riders of {self.other.name}.")
        other = self.other
        names = " and ".join(one.name for one in (*self.members, *([other] if other else [])))
        name = f"merge ({names})" if other is None else f"merge-beside ({names})"
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "needs", Needs() if other is None else replace(other.needs, branches=True))

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give trees of eight guesses; with another drafter its own, under `Product` where its drafts are drawn."""
        if self.other is None:
            return Defaults(Given(), USUAL)
        usual = self.other.defaults(params)
        if params.temperature and not (usual and usual.scheme == Given()):
            return Defaults(Product(), Chain(8) if usual is None else usual.policy)
        return usual or Defaults(Given(), Chain(12))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` unless fixed tokens may stand beside the other drafter's under the scheme."""
        if self.other is None:
            require_scheme(scheme, (Given,), "A merge of text drafters")
            return
        self.other.check(scheme)
        if not (scheme.deterministic or scheme.several_rows):
            raise UnpairedScheme(
                f"A merge with {self.other.name} works with drafts that are deterministic or {Product().name}, not "
                f"{scheme.name}."
            )

    def start(self, text: Text, session: Session) -> MergedState:
        """Start all."""
        return MergedState(*self.first_states(text, session), session.vocab_size, (RowHistory(),) * len(text.counts))

    def draft(self, state: MergedState, request: DraftRequest) -> tuple[Draft | Pieces, MergedState]:
        """Let all draft, and put it into one tree for each row."""
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        if not policy.shape.counts:
            return Draft.nothing(text.last(), apart=scheme.several_rows), state
        bounds = Bounds.of(policy)
        found, members = self.guessed(state, text, bounds)
        guesses = [merged(row).within(bounds, state.vocab_size) for row in zip(*found, strict=True)]
        after = replace(state, members=members)
        if self.other is None:
            return given(text, guesses, scheme), after
        split = self._split(policy, bounds, state.kept, guesses)
        # streams of its own: how much a neighbour has drawn must not move the numbers that verify a row
        draft, inner = self.other.draft(state.other, replace(request, policy=split.own, noise=noise.fork(MERGE_STREAM)))
        pieces, joint = list[Piece](), list[tuple[tuple[int, ...], Branches]]()
        for piece, drafts in _shares(draft, split):
            own = [guesses[row].first(bounds.nodes - drafts) for row in piece.rows]
            both = branched(piece.draft, given(text.of(piece.rows), own, scheme), scheme)
            joint.append((piece.rows, both))
            pieces.append(Piece(piece.rows, both.draft))
        after = replace(after, other=inner, joint=tuple(joint))
        return (pieces[0].draft if len(pieces) == 1 else Pieces(tuple(pieces))), after

    def commit(self, state: MergedState, step: Step) -> MergedState:
        """Let members learn from the whole step, and the other drafter from what was kept of its own nodes."""
        members = self.taught(state, step)
        if self.other is None:
            return replace(state, members=members)
        own, learnt = step, list(state.kept)
        if state.joint:
            written = written_by(step)
            path, length = step.verdict.path.new_full(step.verdict.path.shape, -1), step.verdict.length.clone()
            for rows, both in state.joint:
                for place, row in enumerate(rows):
                    if row not in step.others:
                        learnt[row] = learnt[row].after(both, place, written[row])
                kept, _ = both.verdicts(step.verdict.of(rows))
                places = list(rows)
                path[places, : kept.path.shape[-1]], length[places] = kept.path, kept.length
            verdict = replace(step.verdict, path=path, length=length)
            own = replace(step, verdict=verdict, whole=step.whole or step.verdict)
        other = self.other.commit(state.other, own)
        return replace(state, members=members, other=other, kept=tuple(learnt), joint=())

    def _split(self, policy: TreePolicy, whole: Bounds, kept: Sequence[RowHistory], guesses: Sequence[Guess]) -> Split:
        chances = [one.chance(self.hope) for one in kept]
        shape, grows = policy.largest, isinstance(policy, GrowingPolicy)
        worth = [
            worth_of_budgets(whole.nodes, whole.depth, whole.children, one) if grows else worth_of_levels(shape, one)
            for one in chances
        ]
        pairs = zip(worth, guesses, strict=True)
        drafts = tuple(best_split(own, guess.chances.tolist(), whole.nodes) for own, guess in pairs)
        if isinstance(policy, GrowingPolicy):
            return Split(policy.with_budgets(drafts), drafts, (whole.children,) * len(drafts), grows)
        sizes = [size for size, _ in worth[0]]
        levels = [TreeShape(shape.counts[: 1 + sizes.index(one)]) for one in drafts]
        deepest = max(levels, key=lambda one: one.depth)
        return Split(Fixed(deepest), drafts, tuple(one.max_children for one in levels), grows)


MERGE_STREAM = 0x4D65726765
"""Names the random numbers that the other drafter draws from."""


def _shares(draft: Draft | Pieces, split: Split) -> list[tuple[Piece, int]]:
    """Return the other drafter's draft by rows that have as many nodes, without what is more than that."""
    found = list[tuple[Piece, int]]()
    for piece in in_pieces(draft):
        for drafts in sorted({split.drafts[row] for row in piece.rows}):
            (own,) = restricted([piece], [row for row in piece.rows if split.drafts[row] == drafts])
            most = own.draft.most_children and min(own.draft.most_children, split.most_children[own.rows[0]])
            found.append((Piece(own.rows, cut(own.draft, drafts, most, counted=split.grows)), drafts))
    return found


def merge() -> MergedDrafter:
    """Return the usual text drafters in one tree."""
    return MergedDrafter(usual_members())


def merge_beside(other: Drafter) -> MergedDrafter:
    """Return the usual text drafters and another drafter in one tree."""
    return MergedDrafter(usual_members(), other)


def route_before(first: TextDrafter, drafter: Drafter) -> RoutedDrafter:
    """Return a route between a text drafter and any other, which is a member if it can be."""
    if isinstance(drafter, RoutedDrafter) or (isinstance(drafter, MergedDrafter) and drafter.other is None):
        return RoutedDrafter((first, *drafter.members), drafter.other)
    if isinstance(drafter, TextDrafter) and not drafter.needs.riders:
        return RoutedDrafter((first, drafter))
    return RoutedDrafter((first,), drafter)
