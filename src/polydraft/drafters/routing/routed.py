"""One of several drafters for every row and step, chosen by what each of them would have brought so far."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, isfinite, log
from typing import Any, TypeVar, cast

from polydraft.drafters.contract import (
    Defaults,
    Drafter,
    DraftRequest,
    Needs,
    Session,
    drafts_name,
    is_sound,
    owned_models,
    owned_networks,
)
from polydraft.drafters.routing.together import SeveralDrafters
from polydraft.drafters.text import Bounds, Guess, TextDrafter, given
from polydraft.errors import InvalidParameter, is_number, shown
from polydraft.models import weight_bytes
from polydraft.probs import SamplingParams
from polydraft.reading import Step, Text
from polydraft.rows import parts, per_row, scratch, shared
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

Sleeper = TypeVar("Sleeper")


def choice_law(weights: Mapping[Sleeper, float], awake: Collection[Sleeper]) -> dict[Sleeper, float]:
    """Return the law by which one of the experts that are awake is chosen: pi_e = w_e / sum of w over those awake.

    Args:
        weights: the logarithms of the experts' weights.
        awake: the experts that have something to say in this round, at least one.
    """
    most = max(weights[expert] for expert in awake)
    raw = {expert: exp(weights[expert] - most) for expert in awake}
    total = sum(raw.values())
    return {expert: value / total for expert, value in raw.items()}


def chosen(law: Mapping[Sleeper, float], uniform: float) -> Sleeper:
    """Draw an expert, by a number from [0, 1)."""
    for expert, share in law.items():
        uniform -= share
        if uniform < 0:
            return expert
    return next(reversed([*law]))


def hedged(weights: Mapping[Sleeper, float], gains: Mapping[Sleeper, float], rate: float) -> dict[Sleeper, float]:
    """Return the logarithms of weights after a round.

    With pi the choice law of those awake and g their gains, all in [0, 1],

        w_e <- w_e exp(rate (g_e - m)),   m = log(sum_e pi_e exp(rate g_e)) / rate,

    which leaves the sum of all weights as it is. So for every expert u that began with the share pi_u, over the rounds
    in which it is awake,

        sum (g_u - sum_e pi_e g_e)  <=  log(1 / pi_u) / rate + rate * rounds / 8:

    its weight never exceeds the sum, hence sum (g_u - m) <= log(1 / pi_u) / rate, and m is at most the mean gain plus
    rate / 8 (Hoeffding's lemma). With rate = sqrt(8 log(n) / rounds) this is sqrt(rounds log(n) / 2).

    Args:
        weights: the logarithms of all weights.
        gains: of the experts that were awake, also of those that were not chosen.
        rate: how fast weights move.

    Source: Freund, Schapire, Singer and Warmuth, STOC 1997 (experts that sleep); HedgeSpec, arXiv 2510.20064.
    """
    before = {expert: weights[expert] for expert in gains}
    after = {expert: weight + rate * gains[expert] for expert, weight in before.items()}
    mixed = (_log_sum(after.values()) - _log_sum(before.values())) / rate
    return {**weights, **{expert: weights[expert] + rate * (gain - mixed) for expert, gain in gains.items()}}


def _log_sum(values: Collection[float]) -> float:
    """Return log(sum(exp(v))), also where exp(v) is no number that there is room for."""
    most = max(values)
    return most + log(sum(exp(value - most) for value in values))


PLAIN, OTHER = -1, -2
"""Experts that are no text drafter: no draft at all, and the other drafter."""
CLASSES = (0.5, 1.0, 2.0, 4.0)
"""Between these promises, in expected tokens, a member counts as another expert."""
BELIEVED = (0.25, 0.35, 0.4, 0.6, 0.8)
"""The share of its promise that is believed of a guess at first, by the class of the promise: measured at temperature 0
on SmolLM2 and on the embedded pair, between what both kept. Guesses that promise little promise too much."""
MOST = 9.0
"""A value that counts as a gain of one."""
HOPE = 3.5
"""How many drafts of the other drafter are expected to be accepted before anything is known of it."""
PRIOR_STEPS = 2
"""How many steps this counts as."""
LONG = 12
"""Tokens of a guess where another drafter's trees, whose levels cost passes, are not as deep."""
TRUST_WHEN_SAMPLING = 0.5
"""The share of that which is believed above temperature 0: drawn text seldom repeats itself."""
LEAST_COST = 0.25
"""The least cost of a pass of the other drafter, in passes of the target: however few weights it has, its many small
operations take time. SmolLM2's head takes 0.27, the embedded draft model 0.12 a level."""
Expert = tuple[int, int]
"""A member's number, or one of the above, and the class of its promise."""


@dataclass(frozen=True)
class Standing:
    """What a row's text has shown of the experts.

    Args:
        weights: the logarithms of their weights; one that is not named has what it begins with.
        gain: the mean gain of the other drafter where it was asked.
        asked: how often that was.
    """

    weights: Mapping[Expert, float] = field(default_factory=dict)
    gain: float = 0.0
    asked: int = 0


@dataclass(frozen=True, eq=False)
class Offer:
    """What is offered to a row in the step at hand.

    Args:
        offers: by expert, what it guesses; nothing where somebody else drafts.
        standing: the row's, with the weights that experts begin with.
        law: the law of the choice.
        choice: the expert that is chosen.
        seconds: what a step with the other drafter takes, in passes of the target over the root alone.
    """

    offers: Mapping[Expert, Guess]
    standing: Standing
    law: Mapping[Expert, float]
    choice: Expert
    seconds: float


@dataclass(frozen=True, eq=False)
class RoutedState:
    """The members' states, the other drafter's, the rows' standings, and what is offered in the step at hand.

    Args:
        members: the members' states.
        other: the other drafter's; None without one.
        vocab_size: the target's number of tokens.
        standings: per row.
        cost: of a pass of the other drafter, in passes of the target.
        trust: the share of `BELIEVED` that is believed.
        rounds: per row, in the step at hand.
        asked: the rows for which the other drafter drafts in it.
    """

    members: tuple[Any, ...] = parts()
    other: Any = parts()
    vocab_size: int = shared()
    standings: tuple[Standing, ...] = per_row(learnt=True)
    cost: float = shared()
    trust: float = shared()
    rounds: tuple[Offer, ...] = scratch(())
    asked: tuple[int, ...] = scratch(())


@dataclass(frozen=True, eq=False)
class RoutedDrafter(SeveralDrafters):
    """Lets every member guess and takes the guesses of one of them, row by row: of those that would have brought most.

    Once a step is over, the text itself says what each member's guesses would have brought. So all are judged in every
    step, at no cost, and not only the one that was taken (full information). The value of guesses is
    (1 + accepted) / (1 + overhead + price * guesses), tokens for the time of a step; drafting nothing has the value 1.
    A member counts as another expert where its guesses promise more, and sleeps where it guesses nothing. Hedge
    (`hedged`) keeps the weights, which begin with what is promised.

    **What is judged by what happened, and what is not.** A member is judged in every step in which it guessed, whoever
    was chosen, by the tokens that the step wrote: what a guess would have brought beyond these nobody knows, and it
    counts as nothing. Drafting nothing is known to have the value 1. `other`, such as a draft model's drafter, drafts
    only where it is chosen, and the cost of its passes counts in its value; where it was not asked nobody knows what it
    would have drafted, and it is judged by the mean of the steps in which it was, so that the bound of `hedged` is not
    for it.

    **What the bound says.** A gain is a value over `MOST`, and an expert's first weight is at most rate * sure. So over
    the T steps in which a member guessed with its promise, its judged gains are above the mean of the choice's by at
    most log(n) / rate + sure + rate T / 8 in sum, where n experts were ever awake. No sum of T gains exceeds T, so that
    this says nothing for rates of 8 and more; values that differ by a token are a ninth of a gain apart, so it says
    that the member is found only for rates well below 1. The usual rate, 32, is far beyond both: it nearly follows who
    did best so far, which was measured to be better, and no bound is claimed for it.

    Exactness: the choice follows from finished steps, the committed text and random numbers that nothing else reads.
    Guesses are fixed tokens, drawn from one-hot rows; under a scheme whose siblings are drawn together they are cut to
    a path, so that each is its node's only child.

    Args:
        members: text drafters without riders.
        other: who else may draft; None for nobody.
        rate: how fast weights move.
        price: the cost of a scored guess, as a share of a pass over the root alone. A pass of SmolLM2 over two tokens
            takes 1.17 of one over one, over nine 1.42 and over seventeen 1.68, on two threads of a Xeon.
        overhead: the cost of scoring guesses at all, likewise: passes over several tokens run other kernels.
        sure: for how many rounds a promise counts.

    Raises:
        InvalidParameter: there is no member, one is no text drafter or brings riders, or a number is not positive.

    Source: HedgeSpec, arXiv 2510.20064.
    """

    members: tuple[TextDrafter, ...]
    other: Drafter | None = None
    rate: float = 32.0
    price: float = 0.03
    sure: float = 2.0
    overhead: float = 0.15
    name: str = field(init=False)
    needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        check_members(self.members, "A route")
        check_other(self.other, "A route")
        numbers = (self.rate, self.sure, self.price, self.overhead)
        if not all(is_number(one) and isfinite(one) for one in numbers) or min(numbers[:2]) <= 0 or min(numbers) < 0:
            raise InvalidParameter(
                f"rate and sure must be positive, price and overhead not negative, but are "
                f"{', '.join(map(shown, numbers[:3]))} and {shown(self.overhead)}."
            )
        names, other = names_of(self.members, " or "), self.other
        name = f"route ({names})" if other is None else f"route-first ({names}, else {other.name})"
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "needs", Needs() if other is None else other.needs)

    @property
    def sound(self) -> bool:
        """Whether the other drafter's drafts are sound; guesses always are."""
        return self.other is None or is_sound(self.other)

    @property
    def own_name(self) -> str:
        """The other drafter's: guesses name their member."""
        return self.name if self.other is None else drafts_name(self.other)

    def defaults(self, params: SamplingParams) -> Defaults | None:
        """Return what suits the other drafter; without one, trees of eight guesses."""
        if self.other is not None:
            return self.other.defaults(params)
        return Defaults(Given(), BestFirst(8, depth=8, children=4))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` where the other drafter does; without one, unless the scheme is `Given`."""
        if self.other is not None:
            self.other.check(scheme)
        else:
            require_scheme(scheme, (Given,), "A route between text drafters")

    def start(self, text: Text, session: Session) -> RoutedState:
        """Start all members and the other drafter."""
        members = tuple(one.start(text, session) for one in self.members)
        other = None if self.other is None else self.other.start(text, session)
        standings = (Standing(),) * len(text.counts)
        trust = TRUST_WHEN_SAMPLING if session.params.temperature else 1.0
        return RoutedState(members, other, session.vocab_size, standings, relative_cost(self.other, session), trust)

    def draft(self, state: RoutedState, request: DraftRequest) -> tuple[Draft | Pieces, RoutedState]:
        """Let all members guess, choose for every row, and let the other drafter draft where it was chosen."""
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        if isinstance(policy, LearningPolicy) and not policy.uses_lookups:
            return self._unlooked(state, request)
        bounds = Bounds.of(policy)
        if self.other is not None:
            bounds = replace(bounds, depth=max(bounds.depth, min(LONG, bounds.nodes)))
        if not (scheme.deterministic or scheme.several_rows):
            bounds = bounds.chains()
        offers, members = self._offers(state, text, bounds)
        draws = noise.fork(ROUTE_STREAM).uniform().tolist()
        passes = 0 if self.other is None else self.other.needs.passes or policy.shape.depth
        seconds = 1 + state.cost * passes + self.overhead + self.price * policy.most_drafts
        rows = zip(offers, state.standings, draws, strict=True)
        rounds = tuple(self._round(*row, seconds, state.trust) for row in rows)
        sources = [self.members[one.choice[0]].name if one.choice[0] >= 0 else "" for one in rounds]
        found = [one.offers[one.choice].found_by(source) for one, source in zip(rounds, sources, strict=True)]
        looked = policy.rows_with_lookup(found) if isinstance(policy, LearningPolicy) else rows_found(policy, found)
        return self._drafted(replace(state, members=members, rounds=rounds), request, looked)

    def commit(self, state: RoutedState, step: Step) -> RoutedState:
        """Judge all experts by the text, let members learn, and tell the other drafter of its own drafts.

        There is nothing to judge in a step for which nobody asked this drafter, because another one had drafts for all
        rows; what a head has to read then comes all the same. Where nothing was to be looked up, members do not learn
        either: that takes time too.
        """
        unlooked = bool(state.asked) and not state.rounds
        pairs = zip(self.members, state.members, strict=True)
        members = state.members if unlooked else tuple(one.commit(own, step) for one, own in pairs)
        other, seen = state.other, step if len(state.asked) == len(step.text.counts) else step.only(state.asked)
        if self.other is not None and (state.asked or self.needs.layers):
            other = self.other.commit(state.other, seen)
        emitted = (step.whole or step.verdict).tokens(step.tree).tolist()
        standings = list(state.standings)
        for row, (one, path) in enumerate(zip(state.rounds, emitted, strict=True) if state.rounds else ()):
            if row not in step.others:  # else whether it is told of the row hangs on the row's neighbours
                standings[row] = self._judged(one, [token for token in path if token >= 0], row in state.asked)
        return replace(state, members=members, other=other, standings=tuple(standings), rounds=(), asked=())

    def _offers(
        self, state: RoutedState, text: Text, bounds: Bounds
    ) -> tuple[list[dict[Expert, Guess]], tuple[Any, ...]]:
        """Return what each row is offered, and the members' states."""
        offers: list[dict[Expert, Guess]] = [{} for _ in text.counts]
        states = list[Any]()
        for number, (one, own) in enumerate(zip(self.members, state.members, strict=True)):
            found, after = one.guesses(own, text, bounds)
            states.append(after)
            for row, guess in enumerate(found):
                kept = guess.within(bounds, state.vocab_size)
                if len(kept):
                    offers[row][number, class_of(kept)] = kept
        return offers, tuple(states)

    def _round(
        self, offers: dict[Expert, Guess], standing: Standing, draw: float, seconds: float, trust: float
    ) -> Offer:
        """Choose for a row."""
        hopes = {
            expert: self._value(trust * BELIEVED[expert[1]] * guess.promise, len(guess))
            for expert, guess in offers.items()
        }
        nothing = Guess.nothing()
        every = {**offers, (PLAIN, 0): nothing}
        hopes[PLAIN, 0] = 1.0
        if self.other is not None:
            every[OTHER, 0], hopes[OTHER, 0] = nothing, (1 + HOPE) / seconds
        first = {expert: self.rate * self.sure * _gain(value) for expert, value in hopes.items()}
        weights = {**first, **standing.weights}
        law = choice_law(weights, every)
        return Offer(every, replace(standing, weights=weights), law, chosen(law, draw), seconds)

    def _unlooked(self, state: RoutedState, request: DraftRequest) -> tuple[Draft | Pieces, RoutedState]:
        """Let the other drafter draft for all rows, and nobody guess: there is nothing to judge in this step."""
        if self.other is None:
            nothing = Draft.nothing(request.text.last(), apart=request.scheme.several_rows)
            return nothing, replace(state, rounds=(), asked=())
        draft, inner = self.other.draft(state.other, request)
        return draft, replace(state, other=inner, rounds=(), asked=tuple(range(len(request.text.counts))))

    def _drafted(
        self, state: RoutedState, request: DraftRequest, looked: Collection[int]
    ) -> tuple[Draft | Pieces, RoutedState]:
        """Return the guesses of the rows that take some, and the other drafter's drafts for those that are its own."""
        own: dict[int, list[int]] = {}
        for row, one in enumerate(state.rounds):
            unasked = PLAIN if self.other is None or one.choice[0] == PLAIN else OTHER
            own.setdefault(one.choice[0] if row in looked else unasked, []).append(row)
        asked = tuple(own.pop(OTHER, ()))
        pieces = [self._piece(number, rows, state.rounds, request) for number, rows in own.items()]
        inner = state.other
        if asked and self.other is not None:
            # its draws for other rows are nobody's, so that these rows' own streams stay where they are
            rows = [row if row in asked else -1 for row in range(len(state.rounds))]
            theirs = replace(request, noise=request.noise.of(rows)) if own else request
            draft, inner = self.other.draft(inner, theirs)
            pieces += restricted(in_pieces(draft), asked)
        after = replace(state, other=inner, asked=asked)
        return (pieces[0].draft if len(pieces) == 1 else Pieces(tuple(pieces))), after

    def _piece(self, number: int, rows: Sequence[int], rounds: Sequence[Offer], request: DraftRequest) -> Piece:
        """Return the guesses of one member for the rows that take them; of none, roots alone."""
        text, scheme = request.text, request.scheme
        own = text if len(rows) == len(rounds) else text.of(rows)
        if number == PLAIN:
            return Piece(tuple(rows), Draft.nothing(own.last(), apart=scheme.several_rows))
        draft = given(own, [rounds[row].offers[rounds[row].choice] for row in rows], scheme)
        return Piece(tuple(rows), replace(draft, source=self.members[number].name))

    def _judged(self, one: Offer, path: Sequence[int], asked: bool) -> Standing:
        """Return a row's standing after a step."""
        standing, gains = one.standing, dict[Expert, float]()
        for expert, guess in one.offers.items():
            gains[expert] = _gain(self._value(guess.followed(path), len(guess)))
        if (OTHER, 0) in gains:
            if asked:
                gain, count = _gain(len(path) / one.seconds), standing.asked + 1
                standing = replace(standing, asked=count, gain=standing.gain + (gain - standing.gain) / count)
            hope, told = _gain((1 + HOPE) / one.seconds), standing.asked
            gains[OTHER, 0] = (PRIOR_STEPS * hope + told * standing.gain) / (PRIOR_STEPS + told)
        return replace(standing, weights=hedged(standing.weights, gains, self.rate))

    def _value(self, accepted: float, guesses: int) -> float:
        """Return tokens for the time of a step, in passes over the root alone."""
        return (1 + accepted) / (1 + (self.overhead if guesses else 0.0) + self.price * guesses)


ROUTE_STREAM = 0x526F757465
"""Names the random numbers by which rows choose. No decoder inside a drafter may read the same ones: its drafts would
not be draws from their rows, given that it was chosen."""


def class_of(guess: Guess) -> int:
    """Return the class of a guess's promise."""
    return sum(guess.promise >= bound for bound in CLASSES)


def _gain(value: float) -> float:
    return min(value, MOST) / MOST


def relative_cost(other: Drafter | None, session: Session) -> float:
    """Return the expected cost of a pass of a drafter in passes of the target, from the bytes of their weights."""
    if other is None or session.target is None:
        return LEAST_COST
    sizes, whole = [weight_bytes(model) for model in owned_models(other)], weight_bytes(session.target.model)
    sizes += [sum(one.numel() * one.element_size() for one in net.parameters()) for net in owned_networks(other)]
    known = whole and sizes and all(sizes)
    return max(LEAST_COST, sum(sizes) / whole) if known else LEAST_COST


def check_members(members: object, who: str) -> None:
    """Check that drafters can be asked for guesses that nobody has to score first.

    Raises:
        InvalidParameter: there is none, or one is no text drafter or brings riders.
    """
    if not isinstance(members, tuple) or not members:
        raise InvalidParameter(
            f"{who} needs a tuple of text drafters, such as (NgramDrafter(),), but its members are {shown(members)}."
        )
    for one in cast(tuple[object, ...], members):
        if not isinstance(one, TextDrafter) or one.needs.riders:
            raise InvalidParameter(f"{who} is of text drafters without riders, and a member {shown(one)} is none.")


def check_other(other: object, who: str) -> None:
    """Check that what may draft beside text drafters is a drafter.

    Raises:
        InvalidParameter: it is something else.
    """
    if not isinstance(other, Drafter | None):
        raise InvalidParameter(
            f"{who} takes a drafter such as ModelDrafter(...) as other, or None, not {shown(other)}."
        )


def names_of(drafters: Sequence[Drafter], between: str) -> str:
    """Return the drafters' names."""
    return between.join(one.name for one in drafters)
