"""Test whether any callable that generates tokens follows the target's law, by a sequential test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, log

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.conformance.evidence import (
    SMALLEST,
    Evidence,
    JointLaw,
    NextLaw,
    detectable_distance,
    distance,
    distance_by_chance,
    joint_law,
)
from polydraft.errors import InvalidParameter, is_number, is_whole
from polydraft.probs import SamplingParams

ROUND = 32
"""Samples per prompt between two looks at the evidence, where the callable gives one text at a time."""
LARGEST_LOG = 700
"""The exponential of more is no float."""
Tokens = Sequence[int] | Int[Tensor, " s"]
Generate = Callable[[list[int], int], Tokens]
"""Gives the tokens that follow a prompt, for a seed."""
GenerateMany = Callable[[list[list[int]], list[int]], Sequence[Tokens] | Int[Tensor, "b s"]]
"""Gives the tokens that follow each prompt, for a seed each."""


@dataclass(frozen=True)
class Outcome:
    """How often one beginning of the text was expected and observed, as shares of all samples."""

    tokens: tuple[int, ...]
    expected: float
    observed: float


@dataclass(frozen=True)
class PromptReport:
    """What the samples after one prompt looked like.

    Args:
        prompt: its token ids.
        total_variation: between the observed frequencies of whole outcomes and the law.
        by_chance: what a perfect sampler shows on average with as many samples.
        detectable: the total variation that would have been caught with probability 0.95, whatever its direction.
        worst: the beginning of the text whose frequency speaks most against the law.
    """

    prompt: tuple[int, ...]
    total_variation: float
    by_chance: float
    detectable: float
    worst: Outcome


@dataclass(frozen=True)
class LawReport:
    """The result of `check`.

    Args:
        verdict: "passed" or "deviates".
        samples: texts generated, over all prompts.
        e_value: the evidence against the law when the test stopped; "deviates" means that it reached
            1 / false_alarm.
        false_alarm: at most this is the probability of "deviates" for a callable that does follow the law.
        prompts: details per prompt.
    """

    verdict: str
    samples: int
    e_value: float
    false_alarm: float
    prompts: tuple[PromptReport, ...]

    @property
    def passed(self) -> bool:
        """Whether the samples are consistent with the law."""
        return self.verdict == "passed"

    @property
    def worst(self) -> PromptReport:
        """The prompt whose worst outcome is furthest from what chance allows."""
        return max(self.prompts, key=lambda one: one.total_variation - one.by_chance)

    def __str__(self) -> str:
        one = self.worst
        found = (
            f"{self.verdict} after {self.samples} samples: e-value {self.e_value:.3g} "
            f"(deviates from {1 / self.false_alarm:.3g} on, false-alarm rate {self.false_alarm:g}); "
            f"after prompt {list(one.prompt)} total variation {one.total_variation:.4f} where chance gives "
            f"{one.by_chance:.4f}; most unlike the law is {list(one.worst.tokens)}, "
            f"expected {one.worst.expected:.4%}, observed {one.worst.observed:.4%}"
        )
        caught = max(one.detectable for one in self.prompts)
        seen = f"; a total variation of {caught:.4f} would have been caught with probability 0.95"
        return f"{found}{seen if self.passed else ''}."


def check(
    generate: Generate | GenerateMany,
    target: nn.Module | NextLaw,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 3,
    params: SamplingParams | None = None,
    batch_size: int | None = None,
    most_samples: int = 10_000,
    false_alarm: float = 1e-6,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> LawReport:
    """Test whether the next tokens that a callable generates follow the target's law.

    The law of the first `new_tokens` tokens after each prompt is computed from the target by enumeration, texts are
    generated, and the evidence against the law (see `conformance.evidence`) is looked at after every round: a biased
    callable is usually caught long before `most_samples`, and a correct one is called "deviates" with probability
    at most `false_alarm`, over the whole run. At temperature 0 the law has one outcome, so this is token identity,
    and one round is enough.

    Args:
        generate: called as `generate(prompt, seed)`, it returns the new tokens, at least `new_tokens` of them,
            without the prompt. With `batch_size` it is called as `generate(prompts, seeds)` with that many prompts
            of equal length and as many different seeds, and returns one row per prompt; an engine that takes one
            seed per batch may use the first. Texts must be independent of each other.
        target: a causal model (its logits are read by ordinary passes), or a function from a context to the next
            token's probabilities.
        prompts: token ids; the law is tested after each, half of the weight being on bias that all share.
        new_tokens: n; the target's vocabulary to this power may be at most 100000.
        params: the temperature and filters that the callable is meant to apply; the default is temperature 1.
        batch_size: texts per call; None calls for one at a time.
        most_samples: per prompt; a callable that is still consistent with the law then has passed.
        false_alarm: the largest probability of calling a correct callable wrong.
        seed: of the first text; text i has seed + i.
        on_progress: called after every round with the texts generated so far and the most that there can be.

    Raises:
        InvalidParameter: an argument outside its range, a vocabulary or `new_tokens` too large to enumerate, or a
            callable that returns too few tokens or tokens outside the vocabulary.
    """
    _check_range(prompts, batch_size, most_samples, false_alarm)
    laws = [joint_law(target, prompt, new_tokens, params or SamplingParams()) for prompt in prompts]
    evidence = Evidence(laws)
    counts = [torch.zeros_like(law.probs).flatten() for law in laws]
    per_round = batch_size or ROUND
    certain = all(float(law.probs.max()) > 1 - 1e-9 for law in laws)
    rounds = 1 if certain else -(-most_samples // per_round)
    threshold, log_e, drawn = -log(false_alarm), 0.0, 0
    for _ in range(rounds):
        for prompt, law, seen in zip(prompts, laws, counts, strict=True):
            wanted = min(per_round, most_samples - int(seen.sum()))
            seen += law.counted(_draw(generate, list(prompt), seed + drawn, wanted, batch_size, law.probs.shape))
            drawn += wanted
        log_e = float(evidence.log_e(counts))
        if on_progress is not None:
            on_progress(drawn, most_samples * len(laws))
        if log_e >= threshold:
            break
    deviates = log_e >= threshold
    details = tuple(
        _detailed(prompt, law, seen, threshold + log(2 * len(laws)))
        for prompt, law, seen in zip(prompts, laws, counts, strict=True)
    )
    e_value = exp(log_e) if log_e < LARGEST_LOG else inf
    return LawReport("deviates" if deviates else "passed", drawn, e_value, false_alarm, details)


def _check_range(
    prompts: Sequence[Sequence[int]], batch_size: int | None, most_samples: int, false_alarm: float
) -> None:
    if not is_number(false_alarm) or not 0 < false_alarm < 1:
        raise InvalidParameter(f"false_alarm must lie between 0 and 1, but is {false_alarm!r}.")
    for name, value in (("batch_size", batch_size), ("most_samples", most_samples), ("prompts", len(prompts))):
        if value is not None and (not is_whole(value) or value < 1):
            raise InvalidParameter(f"{name} must be at least 1, but is {value!r}.")


def _detailed(prompt: Sequence[int], law: JointLaw, counts: Float[Tensor, " x"], threshold: float) -> PromptReport:
    whole, samples = law.probs.flatten(), int(counts.sum())
    return PromptReport(
        tuple(prompt),
        float(distance(counts, whole)),
        distance_by_chance(whole, samples),
        detectable_distance(whole, samples, threshold, law.probs.dim() + 1),
        _worst(law, counts),
    )


def _worst(law: JointLaw, counts: Float[Tensor, " x"]) -> Outcome:
    """Return the beginning, of any length, whose own count has the largest divergence from what was expected."""
    candidates: list[tuple[float, Outcome]] = []
    size = law.probs.shape[0]
    for tokens in range(1, law.probs.dim() + 1):
        expected = law.of_first(tokens)
        observed = counts.view(len(expected), -1).sum(dim=-1) / counts.sum()
        score = _divergence(observed, expected) + _divergence(1 - observed, 1 - expected)
        score = score.masked_fill((observed > 0) & (expected < SMALLEST), inf)
        place = int(score.argmax())
        text = tuple(place // size**power % size for power in range(tokens - 1, -1, -1))
        candidates.append((float(score[place]), Outcome(text, float(expected[place]), float(observed[place]))))
    return max(candidates, key=lambda one: one[0])[1]


def _divergence(observed: Float[Tensor, " x"], expected: Float[Tensor, " x"]) -> Float[Tensor, " x"]:
    return torch.special.xlogy(observed, observed / expected.clamp_min(SMALLEST))


def _draw(
    generate: Generate | GenerateMany,
    prompt: list[int],
    first_seed: int,
    samples: int,
    batch_size: int | None,
    shape: Sequence[int],
) -> Int[Tensor, "s n"]:
    """Generate texts with successive seeds and return their first n tokens; `shape` is the vocabulary's size, n times.

    Raises:
        InvalidParameter: too few tokens or rows come back, or tokens outside the vocabulary.
    """
    seeds = list(range(first_seed, first_seed + samples))
    rows: Sequence[Tokens] | Tensor
    if batch_size is None:
        rows = [generate(list(prompt), seed) for seed in seeds]  # type: ignore[arg-type]
    else:
        rows = generate([list(prompt) for _ in seeds], seeds)  # type: ignore[arg-type]
    if len(rows) != samples:
        raise InvalidParameter(f"generate was given {samples} prompts, but returned {len(rows)} rows.")
    first = [[int(token) for token in row[: len(shape)]] for row in rows]
    shortest = min(first, key=len)
    if len(shortest) < len(shape):
        raise InvalidParameter(
            f"generate must return at least {len(shape)} new tokens, but returned {shortest} after prompt {prompt}: "
            "turn end-of-text and stop conditions off, or take fewer new_tokens."
        )
    texts = torch.tensor(first)
    outside = texts[(texts < 0) | (texts >= shape[0])]
    if len(outside):
        raise InvalidParameter(
            f"generate returned token {int(outside[0])}, but the target's vocabulary has {shape[0]} tokens."
        )
    return texts
