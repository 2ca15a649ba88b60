"""Prompt lookup where the text repeats itself, another drafter elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session, drafts_name, finished, is_sound
from polydraft.drafters.text import LOOKUP, Bounds, Guess, NgramDrafter, given
from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.rows import parts, scratch
from polydraft.schemes import Scheme
from polydraft.trees import Draft, LearningPolicy, Lookup, Piece, Pieces, TreePolicy, in_pieces, restricted, rows_found

LEAST = 2
"""A continuation of one token is not worth a step."""


@dataclass(frozen=True, eq=False)
class LookupState:
    """The other drafter's state, the state of lookups, and in which rows the other drafter drafts now."""

    inner: Any = parts()
    lookups: Any = parts()
    asked: tuple[int, ...] = scratch(())


@dataclass(frozen=True, eq=False)
class LookupFirst(Drafter):
    """Continues a text as it went on after its last few tokens before; asks another drafter where they are new.

    A chain that is looked up costs no pass of a draft model and is long. Its tokens are fixed, which is to say drawn
    from one-hot rows, so that it is a draft under the other drafter's scheme, and every rule is exact for it. What the
    other drafter misses meanwhile it reads when it is asked again. Each row of a batch is looked up or not by its own
    text alone, and verified by itself, so that a seed gives it the text that it gives it alone.

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

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, Drafter):
            raise InvalidParameter(
                f"Lookups go before a drafter such as ModelDrafter(...), not before {shown(self.drafter)}."
            )
        object.__setattr__(self, "name", f"lookup-first ({self.drafter.name})")
        object.__setattr__(self, "needs", self.drafter.needs)
        numbers = (self.trusted, self.most)
        if not all(map(is_whole, numbers)) or min(numbers) < 1:
            told = " and ".join(map(shown, numbers))
            raise InvalidParameter(f"trusted and most must be whole numbers of at least 1, but are {told}.")

    @property
    def sound(self) -> bool:
        """Whether the other drafter's drafts are sound; chains that are looked up always are."""
        return is_sound(self.drafter)

    @property
    def own_name(self) -> str:
        """The other drafter's: what is looked up says so."""
        return drafts_name(self.drafter)

    def defaults(self, params: SamplingParams) -> Defaults | None:
        """Return what suits the other drafter."""
        return self.drafter.defaults(params)

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` where the other drafter does."""
        self.drafter.check(scheme)

    def start(self, text: Text, session: Session) -> LookupState:
        """Start lookups and the other drafter."""
        return LookupState(self.drafter.start(text, session), self._lookups.start(text, session))

    def read(self, state: LookupState, text: Text, features: Features | None) -> LookupState:
        """Let the other drafter read the prompts."""
        return replace(state, inner=self.drafter.read(state.inner, text, features))

    def draft(self, state: LookupState, request: DraftRequest) -> tuple[Draft | Pieces, LookupState]:
        """Look up the rows that can be, and ask the other drafter for the others."""
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        found, lookups = self._found(text, policy, state.lookups)
        state = replace(state, lookups=lookups)
        looked = _rows_looked_up(policy, found) if found else ()
        others = tuple(row for row in range(len(text.counts)) if row not in looked)
        if not others:
            return _looked_up(text, found, scheme), replace(state, asked=())
        # its draws for looked-up rows are nobody's, so that these rows' own streams stay where they are
        streams = noise.of([row if row in others else -1 for row in range(len(found))]) if looked else noise
        draft, inner = self.drafter.draft(state.inner, replace(request, noise=streams))
        after = replace(state, inner=inner, asked=others)
        if not looked:
            return draft, after
        own = Piece(looked, _looked_up(text.of(looked), [found[row] for row in looked], scheme))
        return Pieces((own, *restricted(in_pieces(draft), others))), after

    def commit(self, state: LookupState, step: Step) -> LookupState:
        """Tell the other drafter what was kept of its own drafts, if it was asked, and the features that it reads."""
        if not state.asked and not self.needs.layers:
            return state
        own = step if len(state.asked) == len(step.text.lengths) else step.only(state.asked)
        return replace(state, inner=self.drafter.commit(state.inner, own), asked=())

    def finish(self, state: LookupState, text: Text, row: int) -> LookupState:
        """Tell the other drafter."""
        return replace(state, inner=finished(self.drafter, state.inner, text, row))

    @property
    def _lookups(self) -> NgramDrafter:
        return NgramDrafter(self.trusted, self.trusted)

    def _found(self, text: Text, policy: TreePolicy, lookups: Any) -> tuple[list[Guess], Any]:
        """Return every row's chain: there is room for as many nodes as the policy's trees have.

        None at all if the policy wants nothing looked up.
        """
        if isinstance(policy, LearningPolicy) and not policy.uses_lookups:
            return [], lookups
        length = min(self.most, Bounds.of(policy).nodes)
        bounds = Bounds(length, length, 1)
        found, after = self._lookups.guesses(lookups, text, bounds)
        return [one.within(bounds, self._lookups.vocab_size(after)) for one in found], after


def _rows_looked_up(policy: TreePolicy, found: Sequence[Guess]) -> tuple[int, ...]:
    """Return the rows that take their continuations."""
    chains = [one.found_by(LOOKUP) for one in found]
    enough = [one if len(one.parents) >= LEAST else Lookup() for one in chains]
    return policy.rows_with_lookup(enough) if isinstance(policy, LearningPolicy) else rows_found(policy, enough)


def _looked_up(text: Text, found: Sequence[Guess], scheme: Scheme) -> Draft:
    """Return the continuations as a draft under the scheme."""
    return replace(given(text, found, scheme), source=LOOKUP)
