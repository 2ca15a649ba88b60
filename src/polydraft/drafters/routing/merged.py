"""Several drafters in one tree: the guesses of text drafters side by side, and another drafter's tree beside them."""

from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from polydraft.drafters.protocol import Defaults, Drafter, Session, is_sound
from polydraft.drafters.routing.routed import check_members, check_other, names_of
from polydraft.drafters.routing.together import Together
from polydraft.drafters.text import Bounds, Guess, TextDrafter, given, merged
from polydraft.errors import InvalidParameter, UnpairedScheme, is_number, shown
from polydraft.models import Layer
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Step, Text
from polydraft.schemes import Given, Product, Scheme, require_scheme
from polydraft.trees import (
    BestFirst,
    Branches,
    BudgetPolicy,
    Chain,
    Draft,
    Fixed,
    Piece,
    Pieces,
    TreePolicy,
    TreeShape,
    branched,
    in_pieces,
    is_dynamic,
    largest_shape,
)

USUAL = BestFirst(8, depth=8, children=4)
"""The bounds of guesses where nobody names any: on two cores a pass over more tokens took longer than it brought."""
LEAST = 0.1
"""The other drafter gets no level that is expected to be reached less often than this."""


@dataclass(frozen=True, eq=False)
class MergedState:
    """The members' states, the other drafter's, the target's number of tokens, and the step's joint trees by rows."""

    members: tuple[Any, ...]
    other: Any
    vocab_size: int
    joint: tuple[tuple[tuple[int, ...], Branches], ...] = ()


@dataclass(frozen=True, eq=False)
class MergedDrafter(Together):
    """Puts the guesses of several text drafters, and the tree of another drafter, below the same roots.

    What several guess is scored once. The policy's budget is split before anything is drawn: the other drafter gets the
    first levels of its tree, down to the one that is reached with a chance of `LEAST` if each level is kept with the
    chance `hope`; the rest goes to the guesses, the likeliest first.

    Exactness: guesses are fixed tokens. Beside drawn ones they are siblings under `Product`, each with a one-hot row of
    its own; under a deterministic scheme the union of both is what the scheme takes from one list.

    Args:
        members: text drafters without riders.
        other: who else drafts into the tree; None for nobody.
        hope: the chance that the other drafter's draft is kept where the one above it was.

    Raises:
        InvalidParameter: there is no member, one is no text drafter or brings riders, so does the other drafter, or
            `hope` is no chance.
    """

    members: tuple[TextDrafter, ...]
    other: Drafter | None = None
    hope: float = 0.7
    name: str = field(init=False)
    reads: tuple[Layer, ...] = field(init=False)
    shares: bool = field(init=False)

    def __post_init__(self) -> None:
        check_members(self.members, "A merge")
        check_other(self.other, "A merge")
        if not is_number(self.hope) or not 0 < self.hope < 1:
            raise InvalidParameter(f"hope must be between 0 and 1, but is {shown(self.hope)}.")
        if self.other is not None and self.other.riders:
            raise InvalidParameter(f"A merge has no place for the riders of {self.other.name}.")
        other = self.other
        told = {
            "name": names_of([*self.members, *([other] if other else [])], " and "),
            "reads": () if other is None else other.reads,
            "shares": other is not None and other.shares,
        }
        for name, value in told.items():
            object.__setattr__(self, name, value)

    @property
    def sound(self) -> bool:
        """Whether the other drafter's drafts are sound; guesses always are."""
        return self.other is None or is_sound(self.other)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give trees of eight guesses; with another drafter its own trees, under `Product` above temperature 0."""
        if self.other is None:
            return Defaults(Given(), USUAL)
        usual = self.other.defaults(params)
        if params.temperature:
            return Defaults(Product(), Chain(8) if usual is None else usual.policy)
        return usual or Defaults(Given(), Chain(12))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` unless fixed tokens may stand beside the other drafter's under the scheme."""
        if self.other is None:
            require_scheme(scheme, (Given,), "A merge of text drafters")
            return
        self.other.check(scheme)
        if not (scheme.deterministic or scheme == Product()):
            raise UnpairedScheme(
                f"A merge with {self.other.name} works with drafts that are deterministic or {Product().name}, not "
                f"{scheme.name}."
            )

    def start(self, text: Text, session: Session) -> MergedState:
        """Start everybody."""
        members = tuple(one.start(text, session) for one in self.members)
        return MergedState(members, None if self.other is None else self.other.start(text, session), session.vocab_size)

    def draft(
        self, state: MergedState, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise
    ) -> tuple[Draft | Pieces, MergedState]:
        """Let everybody draft, and put it into one tree for each row."""
        if not policy.shape.counts:
            return Draft.nothing(text.last(), apart=scheme == Product()), state
        own, bounds = self._split(policy)
        guesses, members = self._guessed(state, text, bounds)
        after = replace(state, members=members)
        if self.other is None:
            return given(text, guesses, scheme), after
        draft, inner = self.other.draft(state.other, text, scheme, own, noise)
        pieces, joint = list[Piece](), list[tuple[tuple[int, ...], Branches]]()
        for piece in in_pieces(draft):
            beside = given(text.of(piece.rows), [guesses[row] for row in piece.rows], scheme)
            both = branched(piece.draft, beside, scheme)
            joint.append((piece.rows, both))
            pieces.append(Piece(piece.rows, both.draft))
        after = replace(after, other=inner, joint=tuple(joint))
        return (pieces[0].draft if len(pieces) == 1 else Pieces(tuple(pieces))), after

    def commit(self, state: MergedState, step: Step) -> MergedState:
        """Let members learn from the whole step, and the other drafter from what was kept of its own nodes."""
        members = tuple(one.commit(own, step) for one, own in zip(self.members, state.members, strict=True))
        if self.other is None:
            return replace(state, members=members)
        own = step
        if state.joint:
            path, length = step.verdict.path.new_full(step.verdict.path.shape, -1), step.verdict.length.clone()
            for rows, both in state.joint:
                kept, _ = both.verdicts(step.verdict.of(rows))
                places = list(rows)
                path[places, : kept.path.shape[-1]], length[places] = kept.path, kept.length
            verdict = replace(step.verdict, path=path, length=length)
            own = replace(step, verdict=verdict, whole=step.whole or step.verdict)
        return replace(state, members=members, other=self.other.commit(state.other, own), joint=())

    def join(self, state: MergedState, row: int, other: MergedState) -> MergedState:
        """Take over the newcomer."""
        members = self.joined(state, row, other)
        inner = None if self.other is None else self.other.join(state.other, row, other.other)
        return replace(state, members=members, other=inner, joint=())

    def rewind(self, state: MergedState, row: int, length: int) -> MergedState:
        """Let everybody forget."""
        inner = None if self.other is None else self.other.rewind(state.other, row, length)
        return replace(state, members=self.rewound(state, row, length), other=inner)

    def continues(self, state: object) -> bool:
        """Ask the other drafter; members that cannot go on begin anew."""
        if not isinstance(state, MergedState) or len(state.members) != len(self.members):
            return False
        return self.other is None or self.other.continues(state.other)

    def untaught(self, state: MergedState) -> MergedState:
        """Ask everybody."""
        return self.told(state, lambda one, own: one.untaught(own))

    def _guessed(self, state: MergedState, text: Text, bounds: Bounds) -> tuple[list[Guess], tuple[Any, ...]]:
        """Return every row's guesses within their budget, and the members' states."""
        found, states = list[list[Guess]](), list[Any]()
        for one, own in zip(self.members, state.members, strict=True):
            guesses, after = one.guesses(own, text, bounds)
            found.append(guesses)
            states.append(after)
        rows = [merged(row).within(bounds, state.vocab_size) for row in zip(*found, strict=True)]
        return rows, tuple(states)

    def _split(self, policy: TreePolicy) -> tuple[TreePolicy, Bounds]:
        """Return the other drafter's trees, and the bounds of the guesses beside them."""
        whole = Bounds.of(policy)
        if self.other is None:
            return policy, whole
        own = _halved(policy) if is_dynamic(policy) else self._cut(largest_shape(policy))
        left = whole.nodes - Bounds.of(own).nodes
        return own, Bounds(left, whole.depth, max(1, min(whole.children, left)))

    def _cut(self, shape: TreeShape) -> TreePolicy:
        """Return the first levels of a shape, as many as are expected to be reached; one at least, and not all."""
        levels = max(1, sum(self.hope**depth >= LEAST for depth in range(1, shape.depth + 1)))
        return Fixed(TreeShape(shape.counts[: min(levels, max(1, shape.depth - 1))]))


def _halved(policy: TreePolicy) -> TreePolicy:
    """Return a policy that grows trees of a budget, with half of it.

    Raises:
        InvalidParameter: it has no budget that could be split.
    """
    if not (isinstance(policy, BudgetPolicy) and is_dataclass(policy)):
        raise InvalidParameter(
            f"A merge splits trees of a fixed shape or of a budget of drafts, such as best-first:16, not {policy!r}."
        )
    return replace(policy, drafts=max(1, policy.drafts // 2))
