"""A target's law of the next tokens, the evidence that samples do not follow it, and how much a test can see.

The evidence is a test martingale, valid whenever one stops to look at it.

Let p be the law of the next n tokens and let N(x) count the samples equal to x. For any other law r, fixed before the
samples are seen, the likelihood ratio prod_x (r(x) / p(x))^N(x) has mean one under p, and so has every mixture of such
ratios; each is a martingale in the number of samples. So by Ville's inequality

    Pr[the evidence ever reaches 1 / alpha | samples follow p] <= alpha,

however often one looks and whenever one stops. The alternatives that are mixed here:

* For every prefix length j <= n: the law of the first j tokens is drawn from a Dirichlet distribution centred on the
  target's, with concentrations from 10 to 655360. The ratio is in closed form, for counts N and concentration c
  prod_x [Gamma(c p(x) + N(x)) / (Gamma(c p(x)) p(x)^N(x))] Gamma(c) / Gamma(c + N).
  A large concentration tests against laws close by, as needed for many samples.
* The target at another temperature, ten of them from 0.5 to 2.

Several prompts are taken together in two ways, half the weight each: the product over prompts for every alternative
(a bias that all prompts share), and the average over prompts (a bias of one prompt).

Source: Ville's inequality and test martingales, arXiv 1906.07801; Dirichlet mixtures, arXiv 2011.03567.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, log

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.errors import InvalidParameter, is_whole
from polydraft.probs import Noise, SamplingParams, check_probs, to_probs

CONCENTRATIONS = tuple(10.0 * 4**power for power in range(9))
TEMPERATURES = (0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0)
SMALLEST = 1e-300
"""Outcomes less likely than this count as impossible."""
MOST_OUTCOMES = 100_000
ROWS_PER_PASS = 2048
TRIALS = 40
PROBABILITY = 0.95
STEPS = 12
NextLaw = Callable[[list[int]], Float[Tensor, " V"]]
"""Gives the next token's probabilities after a context of token ids."""


@dataclass(frozen=True, eq=False)
class JointLaw:
    """The law of the next n tokens after one prompt.

    Args:
        probs: one axis of the vocabulary's size per token.
    """

    probs: Float[Tensor, "..."]

    def of_first(self, tokens: int) -> Float[Tensor, " x"]:
        """Return the law of the first few tokens, as a vector."""
        return self.probs.reshape(self.probs.shape[0] ** tokens, -1).sum(dim=-1)

    def at_temperature(self, temperature: float) -> Float[Tensor, " x"]:
        """Return the joint law if every next-token law were taken at another temperature, as a vector."""
        size = self.probs.shape[0]
        tempered = torch.ones(1, dtype=torch.float64)
        for tokens in range(1, self.probs.dim() + 1):
            rows = self.of_first(tokens).view(-1, size)
            rows = (rows / rows.sum(dim=-1, keepdim=True).clamp_min(SMALLEST)) ** (1 / temperature)
            rows = rows / rows.sum(dim=-1, keepdim=True).clamp_min(SMALLEST)
            tempered = (tempered.unsqueeze(-1) * rows).flatten()
        return tempered

    def counted(self, texts: Int[Tensor, "s n"]) -> Float[Tensor, " x"]:
        """Return how often each outcome is among texts of n tokens."""
        powers = self.probs.shape[0] ** torch.arange(texts.shape[1] - 1, -1, -1)
        return (texts * powers).sum(dim=-1).bincount(minlength=self.probs.numel()).double()


def dirichlet_evidence(
    law: Float[Tensor, " x"], counts: Float[Tensor, "*b x"], concentration: float
) -> Float[Tensor, "*b"]:
    """Return the log likelihood ratio of counts: a Dirichlet mixture centred on the law, against the law itself.

    Infinite where an impossible outcome occurred.
    """
    prior = concentration * law.clamp_min(SMALLEST)
    gained = torch.lgamma(prior + counts) - torch.lgamma(prior) - counts * law.clamp_min(SMALLEST).log()
    total = counts.sum(dim=-1)
    size = torch.tensor(concentration, dtype=torch.float64)
    ratio = gained.sum(dim=-1) - torch.lgamma(size + total) + torch.lgamma(size)
    impossible = ((counts > 0) & (law < SMALLEST)).any(dim=-1)
    return ratio.masked_fill(impossible, inf)


class Evidence:
    """What the counts of several prompts say against their laws; alternatives are weighed up front.

    Args:
        laws: the target's joint law after every prompt, all of one shape.
    """

    def __init__(self, laws: Sequence[JointLaw]) -> None:
        self.laws = laws
        self.tokens = laws[0].probs.dim()
        families = self.tokens + 1
        prefixes = [1 / families / len(CONCENTRATIONS)] * (self.tokens * len(CONCENTRATIONS))
        tempered = [1 / families / len(TEMPERATURES)] * len(TEMPERATURES)
        self.log_weights = torch.tensor([*prefixes, *tempered], dtype=torch.float64).log()
        self.tilts = [self._tilts(law) for law in laws]

    def log_e(self, counts: Sequence[Float[Tensor, "*b x"]]) -> Float[Tensor, "*b"]:
        """Return the logarithm of the evidence: below log(1 / alpha) at all times, but for a chance of alpha.

        Args:
            counts: per prompt, how often each outcome occurred, in one or several experiments.
        """
        each = torch.stack([self._alternatives(*one) for one in zip(self.laws, self.tilts, counts, strict=True)])
        impossible = each.isposinf().any(dim=-1).any(dim=0)
        each = each.masked_fill(impossible.unsqueeze(-1), 0.0)  # infinite ones would meet others in sums
        shared = torch.logsumexp(self.log_weights + each.sum(dim=0), dim=-1)
        alone = torch.logsumexp(self.log_weights + each, dim=-1)
        average = torch.logsumexp(alone, dim=0) - log(len(counts))
        return (torch.logaddexp(shared, average) - log(2)).masked_fill(impossible, inf)

    @staticmethod
    def _tilts(law: JointLaw) -> Float[Tensor, "t x"]:
        base = law.probs.flatten().clamp_min(SMALLEST).log()
        tempered = torch.stack([law.at_temperature(value) for value in TEMPERATURES])
        return tempered.clamp_min(SMALLEST).log() - base

    def _alternatives(
        self, law: JointLaw, tilts: Float[Tensor, "t x"], counts: Float[Tensor, "*b x"]
    ) -> Float[Tensor, "*b a"]:
        ratios: list[Tensor] = []
        for tokens in range(1, self.tokens + 1):
            marginal = law.of_first(tokens)
            seen = counts.unflatten(-1, (len(marginal), -1)).sum(dim=-1)
            ratios += [dirichlet_evidence(marginal, seen, value) for value in CONCENTRATIONS]
        return torch.cat([torch.stack(ratios, dim=-1), counts @ tilts.T], dim=-1)


def joint_law(target: nn.Module | NextLaw, prompt: Sequence[int], new_tokens: int, params: SamplingParams) -> JointLaw:
    """Return the law of the next tokens by asking the target about every continuation of the prompt.

    Args:
        target: a causal model, whose logits `params` turn into probabilities, or a function that gives the next
            token's probabilities after a context, which are taken as they are.
        prompt: token ids, at least one.
        new_tokens: n; V ** n outcomes are listed.
        params: temperature and filters for a model's logits.

    Raises:
        InvalidParameter: V ** n is over 100000, an empty prompt or one with tokens outside the vocabulary, or
            `params` for a target that gives probabilities.
        InvalidProbabilities: rows that are no distributions.
    """
    _check_request(target, prompt, new_tokens, params)
    law = torch.ones(1, dtype=torch.float64)
    size = 1
    for length in range(new_tokens):
        contexts = [[*prompt, *text] for text in product(range(size), repeat=length)]
        rows = _model_rows(target, contexts, params) if isinstance(target, nn.Module) else _rows(target, contexts)
        if length == 0:
            size = rows.shape[-1]
            _check_size(size, new_tokens, prompt)
        law = (law.unsqueeze(-1) * rows / rows.sum(dim=-1, keepdim=True)).flatten()
    return JointLaw(law.view([size] * new_tokens))


def _check_request(target: nn.Module | NextLaw, prompt: Sequence[int], new_tokens: int, params: SamplingParams) -> None:
    if not is_whole(new_tokens) or new_tokens < 1:
        raise InvalidParameter(f"new_tokens must be at least 1, but is {new_tokens!r}.")
    if not prompt or min(prompt) < 0:
        raise InvalidParameter(f"A prompt must be token ids, at least one and none negative, but is {list(prompt)}.")
    if not isinstance(target, nn.Module) and params != SamplingParams():
        raise InvalidParameter(
            f"{params} applies to a model's logits, but the target is a function that gives probabilities; "
            "let it apply them."
        )


def _check_size(size: int, new_tokens: int, prompt: Sequence[int]) -> None:
    if size**new_tokens > MOST_OUTCOMES:
        raise InvalidParameter(
            f"A vocabulary of {size} tokens has {size**new_tokens} continuations of {new_tokens} tokens; at most "
            f"{MOST_OUTCOMES} can be listed: take fewer new_tokens, or a model with a smaller vocabulary."
        )
    if max(prompt) >= size:
        raise InvalidParameter(f"The prompt has token {max(prompt)}, but the target's vocabulary has {size} tokens.")


@torch.no_grad()
def _model_rows(model: nn.Module, contexts: list[list[int]], params: SamplingParams) -> Float[Tensor, "b V"]:
    """Score contexts of one length by ordinary passes, without a cache."""
    device = next(model.parameters()).device
    rows: list[Tensor] = []
    for first in range(0, len(contexts), ROWS_PER_PASS):
        ids = torch.tensor(contexts[first : first + ROWS_PER_PASS], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        rows.append(to_probs(logits, params).double().cpu())
    return torch.cat(rows)


def _rows(next_law: NextLaw, contexts: list[list[int]]) -> Float[Tensor, "b V"]:
    rows = torch.stack([torch.as_tensor(next_law(context)).double().cpu().flatten() for context in contexts])
    check_probs(rows, "The target's law")
    return rows


def distance(counts: Float[Tensor, "*b x"], law: Float[Tensor, " x"]) -> Float[Tensor, "*b"]:
    """Return the total variation between observed frequencies and a law."""
    frequency = counts / counts.sum(dim=-1, keepdim=True).clamp_min(1)
    return (frequency - law).abs().sum(dim=-1) / 2


def distance_by_chance(law: Float[Tensor, " x"], samples: int) -> float:
    """Return the total variation that frequencies of a perfect sampler show on average (by simulation)."""
    return float(distance(_simulated(law, samples), law).mean())


def detectable_distance(law: Float[Tensor, " x"], samples: int, threshold: float, families: int) -> float:
    """Return the smallest total variation that `samples` samples would have shown with probability 0.95.

    The deviation is the one that is hardest to see for its size: all outcomes of one half of the probability gain by
    one factor and all others lose by one. Any other deviation of this total variation has a larger chi-square
    distance, since that is at least four times its square. Simulated with 40 samplers per size; only the evidence
    on the whole joint law counts, and only once all samples are there, so the test itself sees a little more.

    Args:
        law: the target's joint law.
        samples: per prompt.
        threshold: the log evidence at which the test stops.
        families: the number by which the weight of the joint law's alternatives is divided in the test.

    Returns:
        The total variation; 1 where not even the largest such deviation would be caught.
    """
    if float(law.max()) > 1 - 1e-9:  # any other token is impossible, so one is enough
        return 1 - (1 - PROBABILITY) ** (1 / samples)
    rising = _likeliest_half(law)
    most = min(float(law[rising].sum()), float(law[~rising].sum()))
    needed = threshold + log(families * len(CONCENTRATIONS))
    if not _caught(_shifted(law, rising, most), law, samples, needed):
        return 1.0
    low, high = 0.0, most
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _caught(_shifted(law, rising, middle), law, samples, needed) else (middle, high)
    return high


def _simulated(law: Float[Tensor, " x"], samples: int) -> Float[Tensor, "t x"]:
    generator = Noise.from_seed(0, 1).generators[0]
    return torch.poisson((law * samples).expand(TRIALS, -1), generator=generator)


def _likeliest_half(law: Float[Tensor, " x"]) -> Tensor:
    """Choose outcomes whose mass is close to one half, taking the likeliest first as long as they fit."""
    chosen, mass = torch.zeros_like(law, dtype=torch.bool), 0.0
    values, order = law.sort(descending=True)
    for value, place in zip(values.tolist(), order.tolist(), strict=True):
        if mass + value <= 0.5 or not mass:
            chosen[place], mass = True, mass + value
    return chosen


def _shifted(law: Float[Tensor, " x"], rising: Tensor, moved: float) -> Float[Tensor, " x"]:
    """Move so much mass from the others to the rising outcomes, in proportion to what they have."""
    up, down = law * rising, law * ~rising
    return law + moved * (up / up.sum() - down / down.sum())


def _caught(biased: Float[Tensor, " x"], law: Float[Tensor, " x"], samples: int, needed: float) -> bool:
    """Simulate samplers of a biased law; tell whether enough of them are caught."""
    counts = _simulated(biased.clamp_min(0), samples)
    seen = counts.any(dim=0)  # outcomes that never came add nothing to the sum
    logs = torch.stack([dirichlet_evidence(law[seen], counts[:, seen], value) for value in CONCENTRATIONS])
    return float((torch.logsumexp(logs, dim=0) >= needed).double().mean()) >= PROBABILITY
