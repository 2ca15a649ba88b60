"""One of several drafters for every row and step, chosen by what each of them would have brought so far."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, isfinite, log
from typing import Any, TypeVar

from polydraft.drafters.contract import Drafter, DraftRequest, Needs, Session, owned_models, owned_networks
from polydraft.drafters.several.route import (
    OTHER,
    PLAIN,
    Choice,
    RouteDrafter,
    RouteState,
    check_several,
    sound_beside_guesses,
    written_by,
)
from polydraft.drafters.text.guess import Bounds, Guess, TextDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.drafters.text.recycling import RecyclingDrafter
from polydraft.drafters.text.suffix import SuffixDrafter
from polydraft.errors import InvalidParameter, is_number, shown
from polydraft.models import weight_bytes
from polydraft.reading import Step, Text
from polydraft.rows import per_row, shared

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
"""A member's number, `PLAIN` or `OTHER`, and the class of its promise."""


@dataclass(frozen=True)
class Standing:
    """What a row's text has shown of the experts: log weights, the other drafter's mean gain, and how often it drafted.

    An expert whose weight is not named has what it begins with.
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


@dataclass(frozen=True, eq=False, kw_only=True)
class RoutedState(RouteState):
    """The same, and what was learnt.

    Args:
        standings: the rows'.
        cost: of a pass of the other drafter, in passes of the target.
        trust: the share of `BELIEVED` that is believed.
    """

    standings: tuple[Standing, ...] = per_row(learnt=True)
    cost: float = shared()
    trust: float = shared()


@dataclass(frozen=True, eq=False)
class RoutedDrafter(RouteDrafter):
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
    sound = property(sound_beside_guesses)

    def __post_init__(self) -> None:
        check_several(self, "A route")
        numbers = (self.rate, self.sure, self.price, self.overhead)
        if not all(is_number(one) and isfinite(one) for one in numbers) or min(numbers[:2]) <= 0 or min(numbers) < 0:
            raise InvalidParameter(
                f"rate and sure must be positive, price and overhead not negative, but are "
                f"{', '.join(map(shown, numbers[:3]))} and {shown(self.overhead)}."
            )
        names, other = " or ".join(one.name for one in self.members), self.other
        name = f"route ({names})" if other is None else f"route-first ({names}, else {other.name})"
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "needs", Needs() if other is None else other.needs)

    def start(self, text: Text, session: Session) -> RoutedState:
        """Start all."""
        return RoutedState(
            *self.first_states(text, session),
            session.vocab_size,
            standings=(Standing(),) * len(text.counts),
            cost=relative_cost(self.other, session),
            trust=TRUST_WHEN_SAMPLING if session.params.temperature else 1.0,
        )

    def choose(self, state: RoutedState, request: DraftRequest) -> tuple[list[Choice], RoutedState]:
        """Let all members guess, and choose for every row."""
        scheme, policy, bounds = request.scheme, request.policy, Bounds.of(request.policy)
        if self.other is not None:
            bounds = replace(bounds, depth=max(bounds.depth, min(LONG, bounds.nodes)))
        if not (scheme.deterministic or scheme.several_rows):
            bounds = bounds.chains()
        offers, members = self._offers(state, request.text, bounds)
        draws = request.noise.fork(ROUTE_STREAM).uniform().tolist()
        passes = 0 if self.other is None else self.other.needs.passes
        passes = policy.shape.depth if passes is None else passes
        seconds = 1 + state.cost * passes + self.overhead + self.price * policy.most_drafts
        rows = zip(offers, state.standings, draws, strict=True)
        rounds = tuple(self._round(*row, seconds, state.trust) for row in rows)
        choices = [(one.choice[0], one.offers[one.choice]) for one in rounds]
        return choices, replace(state, members=members, rounds=rounds)

    def commit(self, state: RoutedState, step: Step) -> RoutedState:
        """Judge all experts by the text, let members learn, and tell the other drafter of its own drafts.

        There is nothing to judge in a step for which nobody asked this drafter, because another one had drafts for all
        rows; what a head has to read then comes all the same.
        """
        standings = list(state.standings)
        for row, (one, path) in enumerate(zip(state.rounds, written_by(step), strict=True) if state.rounds else ()):
            if row not in step.others:  # else whether it is told of the row hangs on the row's neighbours
                standings[row] = self._judged(one, path, row in state.asked)
        return replace(super().commit(state, step), standings=tuple(standings))

    def _offers(
        self, state: RoutedState, text: Text, bounds: Bounds
    ) -> tuple[list[dict[Expert, Guess]], tuple[Any, ...]]:
        offers: list[dict[Expert, Guess]] = [{} for _ in text.counts]
        found, states = self.guessed(state, text, bounds)
        for number, guesses in enumerate(found):
            for row, guess in enumerate(guesses):
                kept = guess.within(bounds, state.vocab_size)
                if len(kept):
                    offers[row][number, class_of(kept)] = kept
        return offers, states

    def _round(
        self, offers: dict[Expert, Guess], standing: Standing, draw: float, seconds: float, trust: float
    ) -> Offer:
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

    def _judged(self, one: Offer, path: Sequence[int], asked: bool) -> Standing:
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


def usual_members() -> tuple[TextDrafter, ...]:
    """Return prompt lookup, suffix decoding and token recycling, with nothing learnt from other texts.

    Suffix decoding drafts more than its authors' servers do, whose passes are full: it brought more of the tokens on
    both models that were measured (docs/drafting_without_training.md).
    """
    return NgramDrafter(), SuffixDrafter(factor=2, offset=1), RecyclingDrafter()


def route() -> RoutedDrafter:
    """Return a route between the usual text drafters."""
    return RoutedDrafter(usual_members())


def route_first(other: Drafter) -> RoutedDrafter:
    """Return a route between the usual text drafters and another drafter."""
    return RoutedDrafter(usual_members(), other)
