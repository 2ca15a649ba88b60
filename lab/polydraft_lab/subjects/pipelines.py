"""PPD and SPEED, simulated: a token begins on a guess of its predecessor's early layer, on workers that are not there.

The target writes its own text, one pass a token, so the text is plain decoding's whatever is guessed. Recorded is, for
every token, how many tokens an exit behind layer E found likelier. Time follows from a cost model, by a formula and by
a simulation of events. Measured are only trees of the same guesses.

Source: PPD, arXiv 2307.05908; SPEED, arXiv 2310.12072; neither has code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import count
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.drafters import NoDraft, SelfDrafter, View
from polydraft.engine import compare, stream
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, LayerSet
from polydraft.probs import Noise
from polydraft.trees import Widths
from polydraft.verifiers import SharedNoise
from polydraft.verifiers.trees.shared_noise import times_of
from polydraft_lab.subjects.clock import Progress, unseen


@dataclass(frozen=True)
class PipelineSettings:
    """What is simulated.

    Args:
        exits: the layers behind which guesses are made; none for a quarter, half and three quarters.
        guesses: how many tokens PPD guesses, each for a worker of its own; SPEED guesses one.
        layer_ms: the time of a layer for one token; embedding and head are left out.
        hand_over_ms: the time from an exit to the begin of its guess: head, choice and moving.
        temperatures: of the target; above 0 target and exit share their Gumbel noise.
        max_new_tokens: tokens of every text.
        repeats: how often trees of the same guesses are timed on this machine; 0 for not at all.
        seed: of the texts.

    Raises:
        InvalidParameter: a number outside its range.
    """

    exits: tuple[int, ...] = ()
    guesses: tuple[int, ...] = (1, 3)
    layer_ms: float = 1.0
    hand_over_ms: tuple[float, ...] = (0.0, 1.0)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int = 96
    repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.layer_ms > 0 or not min(self.hand_over_ms) >= 0:
            raise InvalidParameter(f"layer_ms must be above 0 and hand_over_ms at least 0, unlike in {self}.")
        if min((*self.guesses, *self.exits), default=1) < 1 or self.max_new_tokens < 2:
            raise InvalidParameter(f"exits and guesses start at 1, and max_new_tokens at 2, unlike in {self}.")


@dataclass(frozen=True)
class PipelineCosts:
    """The cost model of N layers with an exit behind layer E: what a layer takes, and what a hand-over takes."""

    exit_layer: int
    layers: int
    layer_ms: float = 1.0
    hand_over_ms: float = 0.0

    def by_formula(self, right: float) -> float:
        """Return the milliseconds of a token if guesses are right with this chance and hand-overs cost nothing.

        Behind a right guess a token is done E layers after its predecessor, else N: N (1 - a (1 - E / N)) in the mean.
        It holds where each exit may hand over at once: always for a chain of guesses, for one in flight if 2 E >= N.
        """
        return self.layer_ms * self.layers * (1 - right * (1 - self.exit_layer / self.layers))


@dataclass(frozen=True)
class PipelineTime:
    """What a pipeline takes by the cost model.

    Args:
        system: PPD or SPEED, and that it is simulated.
        temperature: of the text.
        guesses: how many tokens an exit guesses.
        costs: the cost model.
        tokens: how many tokens were guessed.
        right: the share that was among the guesses.
        formula_ms: of a token, without hand-overs; None where the formula does not hold.
        simulated_ms: of a token, by the simulation of events.
        passes: what all workers run for a token, wrong guesses among it, in passes of the target.
        tree: measured, not simulated: the speed-up of trees of the same guesses on this machine; None if not timed.
    """

    system: str
    temperature: float
    guesses: int
    costs: PipelineCosts
    tokens: int
    right: float
    formula_ms: float | None
    simulated_ms: float
    passes: float
    tree: float | None


@dataclass(eq=False)
class _Pass:
    token: int
    right: bool
    begun: float
    waits: bool = False


class Pipeline:
    """A text as events: a pass reaches its exit, its guess is handed over and begins, the pass ends.

    Args:
        hits: for each token, whether it is among the guesses made for it; the first one's does not count.
        costs: the cost model.
        guesses: the workers that begin with different guesses of one token.
        in_flight: the most tokens that have begun on guesses that are not confirmed; None for any number.

    Attributes:
        ended: when each token was known.
        layers_run: by all workers.
    """

    def __init__(self, hits: Sequence[bool], costs: PipelineCosts, guesses: int = 1, in_flight: int | None = None):
        self._hits, self._costs, self._guesses, self._in_flight = hits, costs, guesses, in_flight
        self._events, self._numbers = list[tuple[float, int, Any, _Pass]](), count()
        self._running = list[_Pass]()
        self.ended, self.layers_run = list[float](), 0.0
        self._begin(0.0, 0, right=True)
        while self._events:
            at, _, happens, one = heappop(self._events)
            if one in self._running:  # else its guess was wrong
                happens(at, one)

    def _after(self, at: float, happens: Any, one: _Pass) -> None:
        heappush(self._events, (at, next(self._numbers), happens, one))

    def _begin(self, at: float, token: int, *, right: bool) -> None:
        if token < len(self._hits):
            self._running.append(one := _Pass(token, right, at))
            self._after(at + self._costs.exit_layer * self._costs.layer_ms, self._exits, one)
            self._after(at + self._costs.layers * self._costs.layer_ms, self._ends, one)

    def _exits(self, at: float, one: _Pass) -> None:
        one.waits = self._in_flight is not None and len(self._running) > self._in_flight
        if not one.waits:
            self._after(at + self._costs.hand_over_ms, self._hands_over, one)

    def _hands_over(self, at: float, one: _Pass) -> None:
        self._begin(at, one.token + 1, right=one.right and all(self._hits[one.token + 1 : one.token + 2]))

    def _ends(self, at: float, one: _Pass) -> None:
        """Note a token, and stop what began on wrong guesses of the next one."""
        self.ended.append(at)
        self._running.remove(one)
        run = [(at - other.begun) / self._costs.layer_ms for other in self._running]
        self.layers_run += self._costs.layers + (self._guesses - 1) * sum(run[:1])
        if not self._running or not self._running[0].right:
            self.layers_run += sum(run)
            self._running.clear()
            self._begin(at, one.token + 1, right=True)
        elif self._running[-1].waits:
            self._running[-1].waits = False
            self._after(at + self._costs.hand_over_ms, self._hands_over, self._running[-1])


@dataclass(frozen=True, eq=False)
class RecordedText:
    """What the target wrote, and for each exit how many tokens it found likelier than each of these."""

    tokens: Int[Tensor, " n"]
    ranks: dict[int, Int[Tensor, " n"]]


@torch.inference_mode()
def record(
    target: HuggingFaceModel, prompt: Int[Tensor, "1 t"], exits: Sequence[int], temperature: float, new: int, seed: int
) -> RecordedText:
    """Let the target write, and rank its tokens by its exits; all N layers are an exit too, which finds none likelier.

    Above temperature 0 the token of place i is argmax(logits / T + Gumbel noise of place i), for exits as for the text.

    Raises:
        InvalidParameter: an exit that the model has not.
    """
    models = {exit: target.variant(layers=LayerSet(exit=exit)) for exit in exits}
    options: dict[str, Any] = {**_options(temperature), "max_new_tokens": new, "seed": seed}
    text = stream(target.model, prompt, drafter=NoDraft(), **options).exhaust().sequences(prompt, 0)
    begin, ranks = prompt.shape[1], dict[int, Tensor]()
    for exit, model in models.items():
        scores = model.model(text[:, :-1], use_cache=False).logits[0, begin - 1 :].double()
        if temperature:
            noise = (Noise.from_seed(seed, 1).at(0, torch.tensor([begin + place])) for place in range(len(scores)))
            scores = (scores / temperature).softmax(-1) / torch.cat([times_of(scores[:1], 0, own) for own in noise])
        ranks[exit] = (scores > scores.gather(-1, text[0, begin:].unsqueeze(-1))).sum(dim=-1)
    return RecordedText(text[0, begin:], ranks)


def _options(temperature: float) -> dict[str, Any]:
    return {"temperature": temperature} | ({"verifier": SharedNoise(), "top_k": 0} if temperature else {})


def simulate_pipelines(
    target: HuggingFaceModel,
    prompts: Sequence[Int[Tensor, "1 _"]],
    settings: PipelineSettings,
    on_progress: Progress = unseen,
) -> Iterator[PipelineTime]:
    """Record texts, simulate both systems on them, and time trees of the same guesses on this machine."""
    new, n = settings.max_new_tokens, target.layers
    exits = settings.exits or tuple(sorted({max(1, part * n // 4) for part in (1, 2, 3)}))

    @cache
    def tree(heat: float, exit: int, guesses: int) -> float:
        drafts = {"drafter": SelfDrafter(View(layers=LayerSet(exit=exit))), "policy": Widths((guesses,))}
        options: dict[str, Any] = {**_options(heat), **drafts, "max_new_tokens": new, "seed": settings.seed}
        return compare(target.model, prompts, repeats=settings.repeats, **options).speedup

    for heat in settings.temperatures:
        texts = list[RecordedText]()
        for number, prompt in enumerate(prompts):
            texts.append(record(target, prompt, exits, heat, new, settings.seed + number))
            on_progress("texts", len(texts), len(prompts))
        for exit in exits:
            for system, guesses in (("SPEED", 1), *(("PPD", guesses) for guesses in settings.guesses)):
                hits = [(text.ranks[exit] < guesses).tolist() for text in texts]
                for hand_over in settings.hand_over_ms:
                    costs = PipelineCosts(exit, n, settings.layer_ms, hand_over)
                    speed_up = tree(heat, exit, guesses) if settings.repeats else None
                    yield pipeline_time(system, heat, guesses, hits, costs, speed_up)


def pipeline_time(
    system: str, heat: float, guesses: int, hits: Sequence[Sequence[bool]], costs: PipelineCosts, tree: float | None
) -> PipelineTime:
    """Simulate texts of which it is known what was guessed right; PPD has one guess in flight, SPEED any number."""
    one, tokens = system == "PPD", sum(len(text) - 1 for text in hits)
    right = fmean(hit for text in hits for hit in text[1:])
    done = [Pipeline(text, costs, guesses, 1 if one else None) for text in hits]
    return PipelineTime(
        f"{system}, simulated",
        heat,
        guesses,
        costs,
        tokens,
        right,
        None if one and 2 * costs.exit_layer < costs.layers else costs.by_formula(right),
        sum(own.ended[-1] - own.ended[0] for own in done) / tokens,
        sum(own.layers_run for own in done) / costs.layers / sum(map(len, hits)),
        tree,
    )
