"""What is looked at in every token of a text: bounded functions of it whose means under the law are known.

Let p be the law of token x_t given everything before it. A feature f is chosen before x_t and lies in [0, 1]; its mean
mu_t = sum_x p(x) f(x) is known. A server that follows the law gives f(x_t) the mean mu_t in every place, so the sum of
f(x_t) - mu_t is a martingale, whatever the texts are. Features with a direction see biases of that direction in every
context:

* drafts: x is what followed the longest earlier match of the last tokens (a lookup), or the draft model gives it more
  than the law does. A verifier that is wrong errs towards its drafts; one that tests a draft with the number by which
  it was drawn from cumulated probabilities accepts those that come early.
* ranks: the mass of all likelier tokens plus a random share of x's own is uniform under the law; below .1 .. .95 it
  tells temperatures and nucleus filters; numbers of likelier tokens tell top-k, shares of the likeliest min-p.
* surprise: -log p(x), the direction of a temperature.
* halves of the vocabulary, drawn once.

Each is also taken by place: the first token, behind the end of a sentence, behind tokens of either half.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.probs import Noise

RANKS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
MOST_LIKELIER = (20, 40, 50, 100, 400)
"""Numbers of tokens that filters keep by default somewhere."""
SHARE = 0.05
"""llama.cpp's default for min-p."""
MOST_SURPRISE = 8.0
SHARED = "drafts that are accepted by the number they were drawn by"
HALVES = 4
LONGEST_MATCH = 4
OWN_SEEDS = 7_046_029_254_386_353_131
"""Seeds are counted from here: a server with the same generator and seed would draw the numbers that test it."""
PLACES = ("anywhere", "first token", "after a sentence", "after one half of tokens", "after the other half")
SENTENCE_ENDS = (".", "!", "?", "\n")


@dataclass(frozen=True, eq=False)
class Observations:
    """What the tokens of one text looked like.

    Args:
        values: f of each feature and token.
        means: its mean under the law.
        seen: which tokens a feature says something of.
        places: which tokens stand in which place.
        spreads: the law's own mean of every token of the vocabulary, summed over the tokens in each place.
    """

    values: Float[Tensor, "f t"]
    means: Float[Tensor, "f t"]
    seen: Bool[Tensor, "f t"]
    places: Bool[Tensor, "c t"]
    spreads: Float[Tensor, "c V"]


class TextFeatures:
    """The features of a vocabulary, fixed before the first text.

    Args:
        size: of the vocabulary.
        ends: tokens whose text ends a sentence.
        filtered: whether the law has zeros, so that a token outside it is an observation of its own.
        drafted: whether rows of a draft model are given.
        seed: of the halves, and of the random part of ranks.
    """

    def __init__(self, size: int, ends: Sequence[int] = (), *, filtered: bool, drafted: bool, seed: int = 0) -> None:
        self.filtered, self.drafted = filtered, drafted
        self._noise, halves = Noise.from_seed(OWN_SEEDS + seed, 2).generators
        self.halves = torch.randint(0, 2, (HALVES, size), generator=halves).double()
        self.ends = torch.zeros(size, dtype=torch.bool)
        self.ends[list(ends)] = True
        self.names = tuple(self._names())

    def _names(self) -> list[str]:
        return [
            "what followed an earlier match (n-gram and suffix drafts)",
            *(f"the likeliest tokens that hold {share:.0%} of the law" for share in RANKS),
            "the likeliest token",
            *(f"tokens with {count} likelier ones or more" for count in MOST_LIKELIER),
            f"tokens less likely than {SHARE:.0%} of the likeliest",
            "surprise (the direction of a temperature)",
            *(f"half {number + 1} of the vocabulary" for number in range(HALVES)),
            *(["tokens outside the filters"] if self.filtered else []),
            *(
                ["tokens that the draft model favours", "the draft model's share of a token", SHARED]
                if self.drafted
                else []
            ),
        ]

    def observe(
        self,
        prompt: Sequence[int],
        text: Sequence[int],
        law: Float[Tensor, "t V"],
        draft: Float[Tensor, "t V"] | None = None,
    ) -> Observations:
        """Return what the tokens of a text looked like.

        Args:
            prompt: the tokens before it.
            text: its tokens.
            law: the target's law at each of them, in double precision.
            draft: the draft model's.
        """
        tokens = torch.tensor(text)
        own = law.gather(-1, tokens.unsqueeze(-1))
        lookups = [_lookup([*prompt, *text[:place]]) for place in range(len(text))]
        found = torch.tensor([-1 if one is None else one for one in lookups])
        rows = [self._of_lookup(found, tokens, law), *self._of_ranks(law, own)]
        rows += [self._of_surprise(law, own), *((half[tokens], law @ half) for half in self.halves)]
        if self.filtered:
            rows.append(((own == 0).double().squeeze(-1), torch.zeros(len(text), dtype=torch.float64)))
        if self.drafted and draft is not None:
            rows += self._of_draft(law, draft, tokens)
        values, means = (torch.stack(one) for one in zip(*rows, strict=True))
        seen = torch.ones_like(values, dtype=torch.bool)
        seen[0] = found >= 0
        places = self._places(prompt, tokens)
        return Observations(values, means, seen, places, places.double() @ law)

    @staticmethod
    def _of_lookup(found: Tensor, tokens: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
        means = law.gather(-1, found.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return (found == tokens).double(), means

    def _of_ranks(self, law: Tensor, own: Tensor) -> list[tuple[Tensor, Tensor]]:
        uniform = torch.rand(len(own), generator=self._noise, dtype=torch.float64)
        above = (law * (law > own)).sum(-1) + uniform * (law * (law == own)).sum(-1)
        rows = [((above < share).double(), torch.full_like(above, share)) for share in RANKS]
        best = law.max(dim=-1, keepdim=True).values
        rows.append(((own == best).double().squeeze(-1), (law * (law == best)).sum(-1)))
        ordered = law.topk(min(max(MOST_LIKELIER), law.shape[-1]), dim=-1).values
        for count in MOST_LIKELIER:
            least = ordered[:, min(count, ordered.shape[-1]) - 1].unsqueeze(-1)
            rows.append(((own < least).double().squeeze(-1), (law * (law < least)).sum(-1)))
        least = SHARE * best
        return [*rows, ((own < least).double().squeeze(-1), (law * (law < least)).sum(-1))]

    @staticmethod
    def _of_surprise(law: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        surprise = (-law.log() / MOST_SURPRISE).clamp(0, 1)
        return (-own.log() / MOST_SURPRISE).clamp(0, 1).squeeze(-1), (law * surprise).sum(-1)

    @staticmethod
    def _of_draft(law: Tensor, draft: Tensor, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        share = draft / (law + draft).clamp_min(1e-300)
        begins, size = draft.cumsum(dim=-1) - draft, draft.clamp_min(1e-300)
        shared = ((law / size - begins) / size).clamp(0, 1)  # of a token's numbers those below law / draft
        return [
            (one.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), (law * one).sum(-1))
            for one in ((draft > law).double(), share, shared)
        ]

    def _places(self, prompt: Sequence[int], tokens: Int[Tensor, " t"]) -> Bool[Tensor, "c t"]:
        before = torch.tensor([prompt[-1], *tokens[:-1].tolist()])
        first = torch.zeros(len(tokens), dtype=torch.bool)
        first[0] = True
        half = self.halves[0][before] > 0
        return torch.stack([torch.ones_like(first), first, self.ends[before], half, ~half])


def _lookup(tokens: Sequence[int]) -> int | None:
    """Return what followed the newest earlier match of the longest run of last tokens that occurs before; else None."""
    for length in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
        last = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == last:
                return tokens[start + length]
    return None
