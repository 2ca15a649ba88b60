"""Training EAGLE's heads: whole texts at a time, and drafted paths by passes over the same text.

Pass 0 reads the target's own hidden states, as a head does after every step; pass j reads what pass j - 1 made, shifted
by one, as a head does j tokens below the root. So index i of pass j is the node at depth j below the root t_{i+1} on
the path of the text itself: its pair is (t_{i+1+j}, h'), its position i + j, and it sees the pairs up to i of pass 0
and its own ancestors, which stand at index i of the passes before.

HASS trains EAGLE-1's head by such passes as well, and stops gradients between them. Its authors write pass j over all
places of the text: place i then reads what pass j - 1 made at place i - 1, and the keys that are d < j places away are
those of pass j - d. That is index i - j here. Their first j places, which repeat pass j - 1, have no index.

Sources: EAGLE (arXiv 2401.15077, section 4.2), EAGLE-3 (2503.01840, section 3.2, "training-time test"),
SafeAILab/EAGLE; HASS (2408.15766), HArmonizedSS/HASS (`model/cnets_hass.py`, `train/main_hass.py`), whose masks
multiply scores by 0 where these hide keys.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.drafters.heads.eagle_head import EagleHead, PairHead
from polydraft.errors import InvalidParameter
from polydraft.training.heads.losses.row_losses import (
    HeadBatch,
    HeadTraining,
    RowsAlong,
    TargetEnds,
    agreement,
    cross_entropy,
    in_parts,
    lk_alpha,
    lk_lambda,
    places_behind,
    same_tokens,
    smooth_l1,
    soft_cross_entropy,
    summed,
    weighted,
)

Values = Float[Tensor, "b n"]
RowLoss = Callable[[Float[Tensor, "b n v"], Float[Tensor, "b n v"], Int[Tensor, "b n"]], Values]


def _mixed(logits: Tensor, laws: Tensor, labels: Tensor) -> Tensor:
    return 0.1 * cross_entropy(logits, labels) + 1.8 * (1 - agreement(logits, laws))


def _renormed(logits: Tensor, laws: Tensor, labels: Tensor) -> Tensor:
    whole = laws.sum(-1, keepdim=True).clamp_min(torch.finfo(laws.dtype).tiny)
    return soft_cross_entropy(logits, laws / whole)


PUBLISHED = "published"
ROW_LOSSES: Mapping[str, RowLoss] = {
    PUBLISHED: _renormed,
    "entropy": lambda logits, laws, labels: soft_cross_entropy(logits, laws),
    "acceptance": _mixed,
    "lk-alpha": lambda logits, laws, labels: lk_alpha(logits, laws),
    "lk-lambda": lambda logits, laws, labels: lk_lambda(logits, laws),
}
"""What a row may cost: soft cross entropy, with the target's law over the head's tokens alone or as it is; 0.1 cross
entropy + 1.8 total variation; or one of the LK losses."""


LIKELIEST = 10
"""Of how many of the target's tokens HASS has a loss of their own."""


@dataclass(frozen=True)
class EagleLoss:
    """The weights of the losses.

    Args:
        rows: which of `ROW_LOSSES` compares rows.
        decay: pass j counts decay^j.
        states: of the distance between foretold and true states, for EAGLE-1.
        entropy: of what its rows cost.
        likeliest: of the soft cross entropy over the target's `LIKELIEST` tokens alone, for HASS.
        noise: how far at most EAGLE-1's states are moved while it learns: uniformly, by noise * 256 / t in texts of t
            tokens.

    Raises:
        InvalidParameter: another loss.
    """

    rows: str = "entropy"
    decay: float = 0.8
    states: float = 1.0
    entropy: float = 0.1
    likeliest: float = 0.0
    noise: float = 0.2

    def __post_init__(self) -> None:
        if self.rows not in ROW_LOSSES:
            raise InvalidParameter(f"Rows may cost {', '.join(ROW_LOSSES)}, not {self.rows!r}.")


class PairTraining(HeadTraining):
    """What all kinds share: the passes, and what each of them may be asked for.

    Args:
        passes: how many; as many drafts are measured.
        ends: what the head has of its own at its ends, such as output rows that are trained; None for nothing.
    """

    follows = True
    through = True
    """Whether gradients flow from pass to pass."""

    def __init__(
        self,
        head: PairHead,
        target: TargetEnds,
        passes: int = 5,
        weights: EagleLoss = EagleLoss(),
        ends: HeadEnds | None = None,
    ) -> None:
        super().__init__(target)
        if passes < 1:
            raise InvalidParameter(f"A head is trained by at least one pass, not {passes}.")
        self.head, self.passes, self.weights, self.ends = head, passes, weights, ends or HeadEnds(tokens=target.tokens)
        if not same_tokens(self.ends.tokens, target.tokens):
            raise InvalidParameter("The head's tokens are not those that the target's rows are given for.")

    def embedded(self, ids: Int[Tensor, "b *n"]) -> Float[Tensor, "b *n d"]:
        """Return input embeddings."""
        own = self.ends.embed_tokens
        return self.target[0].embed(ids) if own is None else own(ids) * self.ends.scale

    def logits(self, made: Float[Tensor, "b *n d"]) -> Float[Tensor, "b *n v"]:
        """Return the rows that follow from what the head made."""
        states = self.head.before_output(made)
        return self.target[0].output(states) if self.ends.lm_head is None else self.ends.lm_head(states)

    def drafted(
        self, batch: HeadBatch, features: Float[Tensor, "b t r"], passes: int, cost: Callable[..., Values]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return each pass's mean loss and overlap, and how often it was asked for.

        Args:
            features: the hidden states that the head reads.
            cost: a loss for each index, of the pass's number, its states and logits, the target's laws and the labels.
        """
        losses, overlaps, counts = list[Tensor](), list[Tensor](), list[Tensor]()
        made = unrolled(self.head, self.embedded, batch.ids, features, passes, through=self.through)
        for depth, states in enumerate(made):
            laws, labels, there = self._asked(depth, batch)
            logits = self.logits(states)
            losses.append(weighted(cost(depth, states, logits, laws, labels), there.float()))
            overlaps.append(weighted(agreement(logits, laws), there.float()).detach())
            counts.append(there.sum())
        return losses, overlaps, counts

    def along(self, batch: HeadBatch, length: int) -> Iterator[RowsAlong]:
        """Yield the rows of the passes behind every place that has a pair."""
        texts, roots = places_behind(batch, self.head.opens)
        features = batch.final if self.head.reads == ("final",) else batch.features
        made = unrolled(self.head, self.embedded, batch.ids, features, length, through=False)
        for depth, states in enumerate(made):

            def logits(some: Tensor, own: Tensor, states: Tensor = states) -> Tensor:
                return self.logits(states[some, own - self.head.opens])

            yield from in_parts(texts, roots, depth, logits)

    def _asked(
        self, depth: int, batch: HeadBatch
    ) -> tuple[Float[Tensor, "b n v"], Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
        """Return the target's laws and the text's tokens at the indices of a pass, and which of them count."""
        (target,), length = self.target, batch.ids.shape[1]
        known = torch.arange(
            self.head.opens + depth, length + depth, device=batch.ids.device
        )  # of the last token that a node knows
        there = (known + 1 < length) & batch.valid[:, (known + 1).clamp_max(length - 1)].bool()
        known = known.clamp_max(length - 1)
        labels = target.place_of(batch.ids[:, (known + 1).clamp_max(length - 1)])
        return target.laws(batch.final[:, known], batch.lse[:, known]), labels, there


class Eagle1Training(PairTraining):
    """EAGLE-1's head with its losses: SmoothL1 of the foretold states, and what their rows cost.

    It reads the target's final states. Measured are all passes, where the module does not train.

    Args:
        learnt: how many passes are learnt from, all with the same weight: EAGLE-1's one, or HASS's three.

    Raises:
        InvalidParameter: more are learnt from than there are, or none.
    """

    through = False

    def __init__(
        self,
        head: EagleHead,
        target: TargetEnds,
        passes: int = 5,
        weights: EagleLoss = EagleLoss(),
        ends: HeadEnds | None = None,
        learnt: int = 1,
    ) -> None:
        super().__init__(head, target, passes, weights, ends)
        if not 1 <= learnt <= passes:
            raise InvalidParameter(f"A head of {passes} passes learns from 1 to {passes} of them, not {learnt}.")
        self.learnt = learnt

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the losses of the passes that are learnt from."""
        own, final, learnt = self.weights, batch.final, self.learnt
        given = final
        if self.training and own.noise:
            given = final + (torch.rand_like(final) - 0.5) * own.noise * 512 / batch.ids.shape[1]

        def cost(depth: int, states: Tensor, logits: Tensor, laws: Tensor, labels: Tensor) -> Values:
            if depth >= learnt:  # measured alone
                return logits.new_zeros(labels.shape)
            wanted = final[:, 1 + depth :]
            away = nn.functional.pad(smooth_l1(states[:, : wanted.shape[1]], wanted), (0, depth))
            rows = own.entropy * ROW_LOSSES[own.rows](logits, laws, labels)
            if own.likeliest:
                rows = rows + own.likeliest * soft_cross_entropy(logits, _of_likeliest(laws))
            return own.states * away + rows

        losses, overlaps, counts = self.drafted(batch, given, learnt if self.training else self.passes, cost)
        found, missing = summed(losses[:learnt], overlaps, counts), self.passes - len(counts)
        return {name: one if name == "loss" else nn.functional.pad(one, (0, missing)) for name, one in found.items()}


def _of_likeliest(laws: Float[Tensor, "b n v"]) -> Float[Tensor, "b n v"]:
    """Return a law's likeliest tokens with their chances, and 0 elsewhere."""
    best = laws.topk(min(LIKELIEST, laws.shape[-1]))
    return torch.zeros_like(laws).scatter(-1, best.indices, best.values)


class Eagle3Training(PairTraining):
    """EAGLE-3's head with its losses: rows alone, in several passes over what the head itself made.

    Its authors count a row as 0 in the mean where the target's likeliest token is none of the head's.
    """

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the losses of all passes."""
        (target,), row_loss, inside = self.target, ROW_LOSSES[self.weights.rows], None
        if self.weights.rows == PUBLISHED and target.tokens is not None:
            inside = target.likeliest_known(batch.final)

        def cost(depth: int, states: Tensor, logits: Tensor, laws: Tensor, labels: Tensor) -> Values:
            values = row_loss(logits, laws, labels)
            return values if inside is None else values * nn.functional.pad(inside[:, 1 + depth :], (0, depth))

        losses, overlaps, counts = self.drafted(batch, batch.features, self.passes, cost)
        return summed([self.weights.decay**depth * one for depth, one in enumerate(losses)], overlaps, counts)


class MtpTraining(PairTraining):
    """An MTP module with FastMTP's loss: rows alone, pass k of K weighing decay^k, and all weights together 1.

    The authors compare rows with the text's tokens. Every pass of theirs has keys of its own; here older pairs keep
    those of the first pass, as they do in use.

    Source: FastMTP (arXiv 2509.18362, equation 2), vllm-project/speculators.
    """

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the losses of all passes."""
        row_loss, published = ROW_LOSSES[self.weights.rows], self.weights.rows == PUBLISHED

        def cost(depth: int, states: Tensor, logits: Tensor, laws: Tensor, labels: Tensor) -> Values:
            return cross_entropy(logits, labels) if published else row_loss(logits, laws, labels)

        losses, overlaps, counts = self.drafted(batch, batch.final, self.passes, cost)
        weights = [self.weights.decay**depth for depth in range(self.passes)]
        return summed([w / sum(weights) * one for w, one in zip(weights, losses, strict=True)], overlaps, counts)


def own_rows(target: TargetEnds) -> HeadEnds:
    """Return ends with output rows of the head's own (EAGLE-3)."""
    return HeadEnds(lm_head=target.copied_rows(), tokens=target.tokens)


def unrolled(
    head: PairHead,
    embedded: Callable[[Int[Tensor, "b n"]], Float[Tensor, "b n d"]],
    ids: Int[Tensor, "b t"],
    features: Float[Tensor, "b t r"],
    passes: int,
    *,
    through: bool = True,
) -> list[Float[Tensor, "b n d"]]:
    """Return what a head makes in every pass over texts of t = n + 1 tokens, or of n if it reads the first as well.

    Tokens behind a text's end are its last, and nothing may be asked of their pairs.

    Args:
        features: the target's own hidden states, which the head reads.
        through: whether gradients flow from a pass into the states that it reads of the pass before.
    """
    last, device = ids.shape[1] - 1, ids.device
    indices = torch.arange(len(ids[0]) - head.opens, device=device)
    hidden = head.fused(features[:, :-1])
    hidden = hidden if head.opens else nn.functional.pad(hidden, (0, 0, 1, 0))
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(head.depth)]
    causal, own = indices.unsqueeze(-1) >= indices, torch.eye(len(indices), dtype=torch.bool, device=device)
    found = list[Tensor]()
    for depth in range(passes):
        tokens = ids[:, (indices + head.opens + depth).clamp_max(last)]
        near = causal & head.sees(indices + depth, indices)
        mask = torch.cat([near, *[own] * depth], dim=1).unsqueeze(0).expand(len(ids), -1, -1)
        seen = [kept_behind(layer) for layer in kept]
        states = head(embedded(tokens), hidden, (indices + depth).expand(len(ids), -1), seen, mask)
        found.append(states)
        hidden = head.recycled(states if through else states.detach())
    return found


def kept_behind(kept: list[tuple[Tensor, Tensor]]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return what keeps a pass's keys and values behind those of the passes before, and shows all of them."""

    def seen(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        kept.append((keys, values))
        return torch.cat([one for one, _ in kept], dim=2), torch.cat([one for _, one in kept], dim=2)

    return seen
