"""The rows that heads learn from: the target's, made of its frozen ends, and losses that give one value per position.

Every row has two laws: the head's q over its own tokens, and the target's p over all tokens, of which only the head's
are given. What p has elsewhere can never be accepted.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.probs import UNFILTERED, SamplingParams, to_probs

STATES = 512
"""Of how many states all of the target's logits are made at a time."""
ROWS = 8192
"""For how many tokens at a time, where these are added up."""
MOST_HELD = 2**26
"""Numbers of rows that a step holds at a time, a quarter of a GB; losses and gradients take some ten times as much."""


@dataclass(frozen=True, eq=False)
class TargetEnds:
    """A target's embedding and the rows of its output head that a head drafts from.

    Args:
        embedding: all input embeddings.
        rows: the output rows of the head's tokens.
        tokens: the head's tokens, rising; None for all.
        scale: what embeddings are multiplied by.
        every: all output rows, where `rows` are of some tokens; None where nobody asks for the target's own choice.
        filters: of the target's laws, at temperature 1.
    """

    embedding: Float[Tensor, "V d"]
    rows: Float[Tensor, "v d"]
    tokens: Int[Tensor, " v"] | None = None
    scale: float = 1.0
    every: Float[Tensor, "V d"] | None = None
    filters: SamplingParams = UNFILTERED

    @classmethod
    def of(cls, target: PreTrainedModel, tokens: Int[Tensor, " v"] | None = None) -> "TargetEnds":
        """Take the ends of a target.

        Raises:
            UnsupportedModel: its output head is no plain product, or its embedding no plain table.
        """
        embed, head = target.get_input_embeddings(), target.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or head.bias is not None or type(embed) is not torch.nn.Embedding:
            raise UnsupportedModel(f"Heads cannot be trained for {type(target).__name__} yet: its ends are no tables.")
        every = head.weight.detach()
        rows = (every if tokens is None else every[tokens]).float()
        return cls(embed.weight.detach().float(), rows, tokens, every=None if tokens is None else every)

    def copied_rows(self) -> nn.Linear:
        """Return output rows of a head's own, which begin as the target's and are trained."""
        made = nn.Linear(self.rows.shape[1], len(self.rows), bias=False)
        with torch.no_grad():
            made.weight.copy_(self.rows)
        return made.to(self.rows.device)

    def embed(self, ids: Int[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
        """Return input embeddings."""
        return self.embedding[ids] * self.scale

    def output(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Return logits of final hidden states, of the head's tokens."""
        return states @ self.rows.mT

    @torch.no_grad()
    def laws(self, final: Float[Tensor, "*b d"], total: Float[Tensor, "*b"]) -> Float[Tensor, "*b v"]:
        """Return the target's probabilities of the head's tokens.

        Args:
            total: log of the sum of exp of all its logits; used where the head has fewer tokens, and all are allowed.
        """
        if self.filters != UNFILTERED:
            kept = slice(None) if self.tokens is None else self.tokens
            every = self._all_rows().float().mT
            parts = final.float().flatten(0, -2).split(STATES)
            laws = torch.cat([to_probs(part @ every, self.filters)[:, kept] for part in parts])
            return laws.view(*final.shape[:-1], -1)
        logits = self.output(final)
        if self.tokens is None:
            return logits.softmax(-1)
        whole = torch.maximum(total, logits.logsumexp(-1))  # states are kept rounded, and a law may not exceed 1
        return torch.exp(logits - whole.unsqueeze(-1))

    @torch.no_grad()
    def likeliest_known(self, final: Float[Tensor, "*b d"]) -> Bool[Tensor, "*b"]:
        """Tell where the target's likeliest token is one of the head's.

        All logits of a token are as many as the target's tokens, so they are made of few states at a time.

        Raises:
            InvalidParameter: the head has fewer tokens, and the target's other rows were not given.
        """
        if self.tokens is None:
            return torch.ones(final.shape[:-1], dtype=torch.bool, device=final.device)
        every = self._all_rows()
        best = torch.cat([(part.to(every) @ every.mT).argmax(-1) for part in final.flatten(0, -2).split(STATES)])
        return (self.place_of(best) >= 0).view(final.shape[:-1])

    def _all_rows(self) -> Float[Tensor, "V d"]:
        """Return the output rows of all of the target's tokens."""
        if self.tokens is None:
            return self.rows
        if self.every is None:
            raise InvalidParameter("What the target makes of all its tokens follows from all output rows; give every.")
        return self.every

    @torch.no_grad()
    def totals(self, final: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """Return the log of the sum of exp of all of the target's logits, which are made of few states at a time."""
        every = self._all_rows()
        wide = torch.promote_types(every.dtype, torch.float32)
        flat, found = final.to(wide).flatten(0, -2), list[Tensor]()
        for rows in every.split(ROWS):
            own = rows.to(wide).mT
            found.append(torch.cat([(part @ own).logsumexp(-1) for part in flat.split(STATES)]))
        return torch.stack(found).logsumexp(0).view(final.shape[:-1])

    @torch.no_grad()
    def chances_of(self, ids: Int[Tensor, "b n"], final: Float[Tensor, "b n d"], heat: float) -> Float[Tensor, "b n"]:
        """Return p(x), the target's chance of each token by the state before it, at a temperature above 0."""
        every = self._all_rows()
        chosen = (final * every[ids].to(final)).sum(-1) / heat
        return torch.exp(chosen - self.totals(final / heat))

    def place_of(self, ids: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        """Return the head's places of tokens; -1 where it has none."""
        if self.tokens is None:
            return ids
        places = torch.searchsorted(self.tokens, ids).clamp_max(len(self.tokens) - 1)
        return places.where(self.tokens[places] == ids, -1)


Logits = Callable[[Int[Tensor, " m"], Int[Tensor, " m"]], Float[Tensor, "m v"]]
Rows = Float[Tensor, "*b V"]
Values = Float[Tensor, "*b"]


def cross_entropy(logits: Rows, tokens: Int[Tensor, "*b"]) -> Values:
    """Return -log q(token); 0 where the head has no such token (-1)."""
    flat = functional.cross_entropy(logits.flatten(0, -2), tokens.flatten(), reduction="none", ignore_index=-1)
    return flat.view(tokens.shape)


def chances(logits: Rows, tokens: Int[Tensor, "*b"]) -> Values:
    """Return q(token); 0 where the head has no such token (-1), which it can never draft."""
    return torch.exp(-cross_entropy(logits, tokens)) * (tokens >= 0)


def soft_cross_entropy(logits: Rows, target: Rows) -> Values:
    """Return -sum_x p(x) log q(x): the divergence from p to q but for p's own entropy."""
    return -(target * logits.log_softmax(-1)).sum(-1)


def forward_divergence(logits: Rows, target: Rows) -> Values:
    """Return KL(p || q) = sum_x p(x) log(p(x) / q(x)), p being the target's."""
    return soft_cross_entropy(logits, target) + torch.xlogy(target, target).sum(-1)


def agreement(logits: Rows, target: Rows) -> Values:
    """Return alpha = sum_x min(p(x), q(x)), the chance that one draft is accepted (arXiv 2211.17192, theorem 3.5)."""
    return torch.minimum(logits.softmax(-1), target).sum(-1)


def total_variation(logits: Rows, target: Rows) -> Values:
    """Return 1 - alpha, DSpark's main term."""
    return 1 - agreement(logits, target)


def accepted_loss(logits: Rows, target: Rows) -> Values:
    """Return 0.1 of the soft cross entropy and 1.8 of the total variation: DSpark's loss, without the text's tokens."""
    return 0.1 * soft_cross_entropy(logits, target) + 1.8 * total_variation(logits, target)


def lk_alpha(logits: Rows, target: Rows) -> Values:
    """Return -log alpha (LK loss, SpecForge): its gradient lives where the overlap is small."""
    return -agreement(logits, target).clamp_min(1e-5).log()


def lk_lambda(logits: Rows, target: Rows, scale: float = 1.0, decay: float = 3.0) -> Values:
    """Return w KL(p || q) + (1 - w)(1 - alpha) with w = scale exp(-decay alpha), w detached (LK loss, hybrid form)."""
    alpha = agreement(logits, target)
    weight = scale * torch.exp(-decay * alpha.detach())
    return weight * forward_divergence(logits, target) + (1 - weight) * (1 - alpha)


def smooth_l1(states: Float[Tensor, "*b d"], wanted: Float[Tensor, "*b d"]) -> Values:
    """Return the mean over channels of d^2 / 2 if |d| < 1, else |d| - 1/2: EAGLE-1's distance of features."""
    return functional.smooth_l1_loss(states, wanted, reduction="none").mean(-1)


def decaying(depth: int, rate: float, like: Tensor) -> Float[Tensor, " D"]:
    """Return exp(-i / rate) for drafts i = 0, 1, ...: later drafts count less, as they are reached less often."""
    return torch.exp(-torch.arange(depth, device=like.device, dtype=like.dtype) / rate)


def d_pace(chances: Float[Tensor, "*b D"], valid: Bool[Tensor, "*b D"], share: float = 0.5) -> Float[Tensor, "*b D"]:
    """Return D-PACE's weights: the detached suffix sums of the chances to come so far.

    s_i = (1 - A) q_i(label) + A, P_i = s_1 ... s_i, w_i = sum_{m >= i} P_m, with A = `share`. Drafts that are not valid
    have s = 1, count in no sum, and weigh nothing.
    """
    kept = ((1 - share) * chances.detach() + share).where(valid, 1.0)
    reached = kept.cumprod(-1) * valid
    return reached.flip(-1).cumsum(-1).flip(-1) * valid


def unsure(sure: Values, overlap: Values) -> Values:
    """Return the binary cross entropy of what a confidence head says, in (0, 1), against the overlap, detached."""
    kept = sure.clamp(1e-6, 1 - 1e-6)
    return functional.binary_cross_entropy(kept, overlap.detach().clamp(0, 1), reduction="none")


def weighted(values: Float[Tensor, "*b D"], weights: Float[Tensor, "*b D"]) -> Float[Tensor, ""]:
    """Return the weighted mean over all positions; 0 if nothing counts."""
    return (values * weights).sum() / weights.sum().clamp_min(1e-6)


@dataclass(frozen=True, eq=False)
class HeadBatch:
    """Texts that the target wrote and what it made of them, as in shards (`Shards`)."""

    ids: Int[Tensor, "b t"]
    valid: Shaped[Tensor, "b t"]
    features: Float[Tensor, "b t r"]
    final: Float[Tensor, "b t d"]
    lse: Float[Tensor, "b t"]
    heat: Float[Tensor, " b"] | None = None

    def heats(self) -> Float[Tensor, " b"]:
        """Return the temperature that each text was written at; 1 where shards were not asked for it."""
        return self.ids.new_ones(len(self.ids), dtype=torch.float32) if self.heat is None else self.heat


class Learner(nn.Module):
    """What the training loop trains: a batch of texts in, the loss and what drafts are like out; derive from it.

    `forward` takes what is in the shards, by name. It returns the `loss`, and per draft the mean `overlap` with the
    target and the `count` of how often each was asked for; if `held` is not 0, also the `weight` by which the losses of
    parts of a step are averaged.

    Attributes:
        shortest: how many tokens its texts have at least.
        heated: whether shards are to tell the temperature of each text.
        held: how many numbers the rows of a text are, where all rows of a step are held for the gradient and its texts
            may be taken in parts.
        sparing: whether few rows are held at a time, however many texts a step has.
    """

    shortest: int = 2
    heated: bool = False
    held: int = 0
    sparing: bool = False

    def parts(self, texts: int) -> int:
        """Return in how many equal parts a step takes its texts, so that few rows are held at a time."""
        return next(count for count in range(1, texts + 1) if texts % count == 0 and self._fits(texts // count))

    def _fits(self, texts: int) -> bool:
        return texts == 1 or texts * self.held <= MOST_HELD

    def begin(self, steps: int) -> None:
        """Know how many steps the run has that begins or goes on; this loss does not depend on that."""

    def slow(self) -> Sequence[nn.Parameter]:
        """Return the parameters that learn at a quarter of the rate; here there are none."""
        return ()


class RowsAlong(NamedTuple):
    """Rows of a head along texts: the text of each, the place of the last token before its chain, and its logits.

    All are of one depth: so many of the chain's drafts, which are the text's tokens, stand above them.
    """

    texts: Int[Tensor, " m"]
    roots: Int[Tensor, " m"]
    depth: int
    logits: Float[Tensor, "m v"]


class HeadTraining(Learner, ABC):
    """A head with its losses; derive from it.

    Args:
        target: the target's embedding and output rows, frozen; of the head's tokens, if it has fewer.

    Attributes:
        follows: whether it gives the rows of the chains at all places of texts (`along`).
    """

    follows: bool = False

    def __init__(self, target: TargetEnds) -> None:
        super().__init__()
        self.target = (target,)  # a tuple, so that the target is no part of what is trained and saved

    def forward(
        self,
        ids: Int[Tensor, "b t"],
        valid: Shaped[Tensor, "b t"],
        features: Float[Tensor, "b t r"],
        final: Float[Tensor, "b t d"],
        lse: Float[Tensor, "b t"],
        heat: Float[Tensor, " b"] | None = None,
    ) -> dict[str, Tensor]:
        """Return the `loss`, and per draft the mean `overlap` with the target and how often each was asked for.

        Raises:
            InvalidParameter: it is told of temperatures, and learns at temperature 1 alone.
        """
        if heat is not None and not self.heated:
            raise InvalidParameter(f"{type(self).__name__} learns at temperature 1; read its shards without heats.")
        return self.learn(HeadBatch(ids, valid, features, final, lse, heat))

    @abstractmethod
    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the `loss`, `overlap` and `count` of a batch."""

    def along(self, batch: HeadBatch, length: int) -> Iterator[RowsAlong]:
        """Yield the rows of the chains behind all places of texts that a token of the target's follows, part by part.

        Args:
            batch: the texts.
            length: the most drafts of a chain; heads that know fewer depths give fewer.
        """
        raise NotImplementedError

    @torch.no_grad()
    def ratios(self, batch: HeadBatch, heat: float, length: int) -> tuple[Float[Tensor, "b n g"], Int[Tensor, "b"]]:
        """Return q(x) / p(x) of the drafts of the chain at each place that the target wrote, which are the text's.

        At temperature 0 a draft is accepted while its likeliest token is the text's: then these are 1, and 0 else.

        Args:
            batch: texts that were written at one temperature.
            heat: this.
            length: the drafts of a chain; 0 stands where a head gives fewer, and behind the texts' ends.

        Returns:
            the ratios, each text's from its first written place on; and how many places it has.
        """
        (target,), asked = self.target, batch.valid[:, 1:].bool()
        (texts, places), device = asked.shape, asked.device
        chances_there = target.chances_of(batch.ids[:, 1:], batch.final[:, :-1], heat) if heat else None
        found = torch.zeros(texts, places, length, device=device)
        for rows in self.along(batch, length):
            known = (rows.roots + rows.depth).clamp_max(places - 1)
            inside = (rows.roots + rows.depth < places) & asked[rows.texts, known]
            tokens = target.place_of(batch.ids[rows.texts, known + 1])
            if chances_there is None:
                values = (rows.logits.argmax(-1) == tokens).float()
            else:
                own = chances_there[rows.texts, known].clamp_min(torch.finfo(torch.float32).tiny)
                values = chances(rows.logits.float() / heat, tokens) / own
            found[rows.texts, rows.roots, rows.depth] = values.where(inside, 0.0)
        written = asked.sum(-1)
        order = torch.arange(places, device=device)
        moved = (asked.int().argmax(-1).unsqueeze(-1) + order).clamp_max(places - 1)
        found = found.gather(1, moved.unsqueeze(-1).expand_as(found))
        return found.where((order < written.unsqueeze(-1)).unsqueeze(-1), 0.0).double().cpu(), written.cpu()


def places_behind(batch: HeadBatch, first: int = 0) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Return the texts and places, from one on, behind which a token of the target's stands."""
    texts, roots = batch.valid[:, 1:].bool().nonzero().unbind(-1)
    return texts[roots >= first], roots[roots >= first]


def in_parts(texts: Int[Tensor, " m"], roots: Int[Tensor, " m"], depth: int, logits: Logits) -> Iterator[RowsAlong]:
    """Yield rows of a depth, `STATES` at a time, where `logits` gives those of some of these texts and places."""
    for some, own in zip(texts.split(STATES), roots.split(STATES), strict=True):
        yield RowsAlong(some, own, depth, logits(some, own))


def few_at_a_time(rows: Callable[..., tuple[Tensor, ...]], *given: Shaped[Tensor, "m ..."]) -> tuple[Tensor, ...]:
    """Return what is made of places, `STATES` at most at a time, and again for the gradient, so that few rows are held.

    Parts are equally long, since some losses compare the rows of a part: one row alone would tell them nothing.
    """
    count = max(1, -(-len(given[0]) // STATES))
    parts = [
        cast(tuple[Tensor, ...], checkpoint(rows, *part, use_reentrant=False))
        for part in zip(*(one.tensor_split(count) for one in given), strict=True)
    ]
    return tuple(torch.cat(found) for found in zip(*parts, strict=True))


def summed(losses: Sequence[Tensor], overlaps: Sequence[Tensor], counts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return what a head is trained by, of each draft's loss, mean overlap and count."""
    return {"loss": torch.stack([*losses]).sum(), "overlap": torch.stack([*overlaps]), "count": torch.stack([*counts])}


def step_of(
    training: nn.Module,
    parts: Iterable[Mapping[str, Tensor]],
    backward: Callable[[Tensor], None] = lambda loss: loss.backward(),
) -> Float[Tensor, ""]:
    """Leave the gradient of a step whose texts come in parts, and return its loss: the mean of theirs by their weights.

    Args:
        parts: the `loss` and `weight` of each, made one after the other, so that few rows are held at a time.
        backward: adds the gradient of a loss; there is none before.
    """
    loss, total = 0.0, 0.0
    for part in parts:
        backward(part["loss"] * part["weight"])
        loss, total = loss + part["loss"].detach() * part["weight"], total + part["weight"]
    whole = torch.as_tensor(total).clamp_min(1e-6)
    for one in training.parameters():
        if one.grad is not None:
            one.grad /= whole
    return loss / whole


def same_tokens(one: Int[Tensor, " v"] | None, other: Int[Tensor, " v"] | None) -> bool:
    """Tell whether two lists of a head's tokens are the same; None is all of the target's."""
    if one is None or other is None:
        return one is other
    return torch.equal(one.cpu(), other.cpu())
