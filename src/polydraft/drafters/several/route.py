"""Routes: in each row one of several drafters, as prompt lookup where a text repeats itself and another elsewhere."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session, drafts_name, finished, is_sound
from polydraft.drafters.text.guess import LOOKUP, Bounds, Guess, TextDrafter, given
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.rows import parts, scratch, shared
from polydraft.schemes import Given, Scheme, require_scheme
from polydraft.trees import (
    BestFirst,
    Draft,
    LearningPolicy,
    Piece,
    Pieces,
    in_pieces,
    restricted,
    rows_found,
)

USUAL = BestFirst(8, depth=8, children=4)
"""The bounds of guesses where nobody names any: on two cores a pass over more tokens took longer than it brought."""
PLAIN, OTHER = -1, -2
"""What a row may take beside a member's guesses: no draft at all, and the other drafter's."""


class SeveralDrafters(Drafter):
    """Several text drafters, and another drafter or none; derive from it.

    Its state is a dataclass with `members`, the members' states, and `other`, the other drafter's.
    """

    members: tuple[TextDrafter, ...]
    other: Drafter | None

    def first_states(self, text: Text, session: Session) -> tuple[tuple[Any, ...], Any]:
        """Start the members and the other drafter."""
        members = tuple(one.start(text, session) for one in self.members)
        return members, None if self.other is None else self.other.start(text, session)

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        """Let all read the prompts."""
        members = tuple(one.read(own, text, None) for one, own in zip(self.members, state.members, strict=True))
        other = None if self.other is None else self.other.read(state.other, text, features)
        return replace(state, members=members, other=other)

    def guessed(self, state: Any, text: Text, bounds: Bounds) -> tuple[list[list[Guess]], tuple[Any, ...]]:
        """Return each member's guesses for all rows, and the members' states."""
        found = [one.guesses(own, text, bounds) for one, own in zip(self.members, state.members, strict=True)]
        return [guesses for guesses, _ in found], tuple(after for _, after in found)

    def taught(self, state: Any, step: Step) -> tuple[Any, ...]:
        """Return the members' states when they have learnt from a step."""
        return tuple(one.commit(own, step) for one, own in zip(self.members, state.members, strict=True))

    def finish(self, state: Any, text: Text, row: int) -> Any:
        """Tell all."""
        members = tuple(finished(one, own, text, row) for one, own in zip(self.members, state.members, strict=True))
        other = None if self.other is None else finished(self.other, state.other, text, row)
        return replace(state, members=members, other=other)


def sound_beside_guesses(drafter: SeveralDrafters) -> bool:
    """Tell whether the other drafter's drafts are sound; guesses always are."""
    return drafter.other is None or is_sound(drafter.other)


def check_several(drafter: SeveralDrafters, who: str) -> None:
    """Check that members can be asked for guesses that nobody has to score first, and what may draft beside them.

    Raises:
        InvalidParameter: there is no member, one is no text drafter or brings riders, or the other one is no drafter.
    """
    members: object = drafter.members
    if not isinstance(members, tuple) or not members:
        raise InvalidParameter(
            f"{who} needs a tuple of text drafters, such as (NgramDrafter(),), but its members are {shown(members)}."
        )
    for one in cast(tuple[object, ...], members):
        if not isinstance(one, TextDrafter) or one.needs.riders:
            raise InvalidParameter(f"{who} is of text drafters without riders, and a member {shown(one)} is none.")
    if not isinstance(drafter.other, Drafter | None):
        raise InvalidParameter(
            f"{who} takes a drafter such as ModelDrafter(...) as other, or None, not {shown(drafter.other)}."
        )


def written_by(step: Step) -> list[list[int]]:
    """Return the tokens that a step wrote, per row."""
    emitted = (step.whole or step.verdict).tokens(step.tree).tolist()
    return [[token for token in row if token >= 0] for row in emitted]


@dataclass(frozen=True, eq=False)
class RouteState:
    """The states of members and other drafter, and what holds in the step at hand.

    Args:
        members: the members'.
        other: the other drafter's; None without one.
        vocab_size: the target's number of tokens.
        rounds: per row, what it was offered; () where nobody guessed, or nobody judges.
        asked: the rows for which the other drafter drafts.
    """

    members: tuple[Any, ...] = parts()
    other: Any = parts()
    vocab_size: int = shared()
    rounds: tuple[Any, ...] = scratch(())
    asked: tuple[int, ...] = scratch(())


Choice = tuple[int, Guess]
"""A member's number, and its guesses; nothing for `PLAIN` or `OTHER`."""


class RouteDrafter(SeveralDrafters):
    """Drafts in each row the guesses of one member, those of the other drafter, or nothing; derive, and give `choose`.

    What the other drafter misses meanwhile it reads when it is asked again. Each row is verified by itself, so that a
    seed gives it the text that it gives it alone.
    """

    @property
    def own_name(self) -> str:
        """The other drafter's: guesses say where they come from."""
        return self.name if self.other is None else drafts_name(self.other)

    def defaults(self, params: SamplingParams) -> Defaults | None:
        """Return what suits the other drafter; without one, trees of eight guesses."""
        return Defaults(Given(), USUAL) if self.other is None else self.other.defaults(params)

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` where the other drafter does; without one, unless the scheme is `Given`."""
        if self.other is None:
            require_scheme(scheme, (Given,), "A route between text drafters")
        else:
            self.other.check(scheme)

    def start(self, text: Text, session: Session) -> Any:
        """Start all members and the other drafter."""
        return RouteState(*self.first_states(text, session), session.vocab_size)

    def choose(self, state: Any, request: DraftRequest) -> tuple[list[Choice], Any]:
        """Let members guess, and return what each row may take, and the state with which the step goes on."""
        raise NotImplementedError

    def source_of(self, number: int) -> str:
        """Return the source under which a member's guesses count."""
        return self.members[number].name

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft | Pieces, Any]:
        """Let all members guess, choose for every row, and let the other drafter draft where nothing is taken."""
        choices, looked, state = self._chosen(state, request)
        takers: dict[int, list[int]] = {}
        for row, (number, _) in enumerate(choices):
            unasked = PLAIN if self.other is None or number == PLAIN else OTHER
            takers.setdefault(number if row in looked else unasked, []).append(row)
        asked = tuple(takers.pop(OTHER, ()))
        pieces = [self._piece(number, rows, choices, request) for number, rows in takers.items()]
        inner = state.other
        if asked and self.other is not None:
            # its draws for other rows are nobody's, so that these rows' own streams stay where they are
            rows = [row if row in asked else -1 for row in range(len(choices))]
            theirs = replace(request, noise=request.noise.of(rows)) if pieces else request
            draft, inner = self.other.draft(inner, theirs)
            if not pieces:
                return draft, replace(state, other=inner, asked=asked)
            pieces += restricted(in_pieces(draft), asked)
        after = replace(state, other=inner, asked=asked)
        return (pieces[0].draft if len(pieces) == 1 else Pieces(tuple(pieces))), after

    def commit(self, state: Any, step: Step) -> Any:
        """Let members learn, and tell the other drafter of its own drafts, and of the features that it reads.

        Where nothing was to be looked up, members do not learn either: that takes time too.
        """
        members = state.members if state.asked and not state.rounds else self.taught(state, step)
        other = state.other
        if self.other is not None and (state.asked or self.needs.layers or self.needs.queries):
            seen = step if len(state.asked) == len(step.text.counts) else step.only(state.asked)
            other = self.other.commit(state.other, seen)
        return replace(state, members=members, other=other, rounds=(), asked=())

    def _chosen(self, state: Any, request: DraftRequest) -> tuple[list[Choice], Collection[int], Any]:
        """Return what each row may take, in which rows it is taken, and the state with which the step goes on."""
        policy = request.policy
        if isinstance(policy, LearningPolicy) and not policy.uses_lookups:
            return [(OTHER, Guess.nothing())] * len(request.text.counts), (), state
        choices, state = self.choose(state, request)
        sources = [self.source_of(number) if number >= 0 else "" for number, _ in choices]
        found = [guess.found_by(source) for (_, guess), source in zip(choices, sources, strict=True)]
        looked = policy.rows_with_lookup(found) if isinstance(policy, LearningPolicy) else rows_found(policy, found)
        return choices, looked, state

    def _piece(self, number: int, rows: Sequence[int], choices: Sequence[Choice], request: DraftRequest) -> Piece:
        """Return the guesses of one member for the rows that take them; of none, roots alone."""
        text, scheme = request.text, request.scheme
        own = text if len(rows) == len(choices) else text.of(rows)
        if number == PLAIN:
            return Piece(tuple(rows), Draft.nothing(own.last(), apart=scheme.several_rows))
        draft = given(own, [choices[row][1] for row in rows], scheme)
        return Piece(tuple(rows), replace(draft, source=self.source_of(number)))


LEAST = 2
"""A continuation of one token is not worth a step."""


@dataclass(frozen=True, eq=False)
class LookupFirst(RouteDrafter):
    """Continues a text as it went on after its last few tokens before; asks another drafter where they are new.

    A chain that is looked up costs no pass of a draft model and is long. Its tokens are fixed, which is to say drawn
    from one-hot rows, so that it is a draft under the other drafter's scheme, and every rule is exact for it. Each row
    of a batch is looked up or not by its own text alone.

    Args:
        drafter: the other drafter.
        trusted: how many last tokens must have occurred before in the same order.
        most: the longest chain; never more than the policy's trees have nodes.

    Raises:
        InvalidParameter: one of the numbers is below one.

    Source: prompt lookup decoding (`NgramDrafter`); the combination with a draft model is common in servers.
    """

    drafter: Drafter
    trusted: int = 3
    most: int = 12
    name: str = field(init=False)
    needs: Needs = field(init=False)
    members: tuple[TextDrafter, ...] = field(init=False, repr=False)
    other: Drafter | None = field(init=False, repr=False)
    sound = property(sound_beside_guesses)

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, Drafter):
            raise InvalidParameter(
                f"Lookups go before a drafter such as ModelDrafter(...), not before {shown(self.drafter)}."
            )
        numbers = (self.trusted, self.most)
        if not all(map(is_whole, numbers)) or min(numbers) < 1:
            told = " and ".join(map(shown, numbers))
            raise InvalidParameter(f"trusted and most must be whole numbers of at least 1, but are {told}.")
        object.__setattr__(self, "name", f"lookup-first ({self.drafter.name})")
        object.__setattr__(self, "needs", self.drafter.needs)
        object.__setattr__(self, "members", (NgramDrafter(self.trusted, self.trusted),))
        object.__setattr__(self, "other", self.drafter)

    def choose(self, state: RouteState, request: DraftRequest) -> tuple[list[Choice], RouteState]:
        """Look every row's chain up: there is room for as many nodes as the policy's trees have."""
        length = min(self.most, Bounds.of(request.policy).nodes)
        bounds = Bounds(length, length, 1)
        (found,), members = self.guessed(state, request.text, bounds)
        chains = [one.within(bounds, state.vocab_size) for one in found]
        choices = [(0, one) if len(one) >= LEAST else (OTHER, Guess.nothing()) for one in chains]
        return choices, replace(state, members=members)

    def source_of(self, number: int) -> str:
        """Return the source of what is looked up."""
        return LOOKUP
