"""Training EAGLE's heads: whole texts at a time, and drafted paths by passes over the same text.

Pass 0 reads the target's own hidden states, as a head does after every step; pass j reads what pass j - 1 made, shifted
by one, as a head does j tokens below the root. So index i of pass j is the node at depth j below the root t_{i+1} on
the path of the text itself: its pair is (t_{i+1+j}, h'), its position i + j, and it sees the pairs up to i of pass 0
and its own ancestors, which stand at index i of the passes before.

Sources: EAGLE (arXiv 2401.15077, section 4.2), EAGLE-3 (2503.01840, section 3.2, "training-time test"),
SafeAILab/EAGLE.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.drafters.heads.eagle_head import EagleHead
from polydraft.drafters.heads.ends import HeadEnds
from polydraft.errors import InvalidParameter
from polydraft.training.heads.row_losses import (
    agreement,
    cross_entropy,
    lk_alpha,
    lk_lambda,
    smooth_l1,
    soft_cross_entropy,
    weighted,
)
from polydraft.training.heads.targets import TargetEnds

Values = Float[Tensor, "b n"]
RowLoss = Callable[[Float[Tensor, "b n v"], Float[Tensor, "b n v"], Int[Tensor, "b n"]], Values]


def _mixed(logits: Tensor, laws: Tensor, labels: Tensor) -> Tensor:
    return 0.1 * cross_entropy(logits, labels) + 1.8 * (1 - agreement(logits, laws))


def _renormed(logits: Tensor, laws: Tensor, labels: Tensor) -> Tensor:
    whole = laws.sum(-1, keepdim=True).clamp_min(torch.finfo(laws.dtype).tiny)
    return soft_cross_entropy(logits, laws / whole)


RENORMED = "renormed"
ROW_LOSSES: Mapping[str, RowLoss] = {
    RENORMED: _renormed,
    "soft": lambda logits, laws, labels: soft_cross_entropy(logits, laws),
    "mixed": _mixed,
    "lk_alpha": lambda logits, laws, labels: lk_alpha(logits, laws),
    "lk_lambda": lambda logits, laws, labels: lk_lambda(logits, laws),
}
"""What a row may cost: soft cross entropy, with the target's law over the head's tokens alone or as it is; 0.1 cross
entropy + 1.8 total variation; or one of the LK losses."""


@dataclass(frozen=True)
class EagleLoss:
    """The weights of the losses.

    Args:
        rows: which of `ROW_LOSSES` compares EAGLE-3's rows.
        decay: pass j counts decay^j.
        states: of the distance between foretold and true states, for EAGLE-1.
        entropy: of the soft cross entropy of its rows.
        noise: how far at most EAGLE-1's states are moved while it learns: uniformly, by noise * 256 / t in texts of t
            tokens.

    Raises:
        InvalidParameter: another loss.
    """

    rows: str = "soft"
    decay: float = 0.8
    states: float = 1.0
    entropy: float = 0.1
    noise: float = 0.2

    def __post_init__(self) -> None:
        if self.rows not in ROW_LOSSES:
            raise InvalidParameter(f"Rows may cost {', '.join(ROW_LOSSES)}, not {self.rows!r}.")


class _Training(nn.Module):
    """What both kinds share: the passes, and what each of them may be asked for.

    Args:
        head: what is trained.
        target: the target's embedding and output rows, frozen.
        passes: how many; as many drafts are measured.
        weights: of the losses.
        ends: what the head has of its own at its ends; None for nothing.
    """

    def __init__(
        self,
        head: EagleHead,
        target: TargetEnds,
        passes: int = 5,
        weights: EagleLoss = EagleLoss(),
        ends: HeadEnds | None = None,
    ) -> None:
        super().__init__()
        if passes < 1:
            raise InvalidParameter(f"A head is trained by at least one pass, not {passes}.")
        self.head, self.passes, self.weights, self.ends = head, passes, weights, ends or HeadEnds(tokens=target.tokens)
        own = self.ends.tokens
        same = (own is None) == (target.tokens is None)
        if not same or (target.tokens is not None and not torch.equal(self.ends.get_buffer("tokens"), target.tokens)):
            raise InvalidParameter("The head's tokens are not those that the target's rows are given for.")
        self.target = (target,)  # a tuple, so that the target is no part of what is trained and saved

    def embedded(self, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """Return input embeddings."""
        own = self.ends.embed_tokens
        return self.target[0].embed(ids) if own is None else own(ids) * self.ends.scale

    def logits(self, made: Float[Tensor, "b n d"]) -> Float[Tensor, "b n v"]:
        """Return the rows that follow from what the head made."""
        states = self.head.before_output(made)
        return self.target[0].output(states) if self.ends.lm_head is None else self.ends.lm_head(states)

    def asked(
        self,
        depth: int,
        ids: Int[Tensor, "b t"],
        valid: Int[Tensor, "b t"],
        final: Float[Tensor, "b t d"],
        lse: Float[Tensor, "b t"],
    ) -> tuple[Float[Tensor, "b n v"], Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
        """Return the target's laws and the text's tokens at the indices of a pass, and which of them count."""
        (target,) = self.target
        length = ids.shape[1]
        known = torch.arange(1 + depth, length + depth, device=ids.device)  # of the last token that a node knows
        there = (known + 1 < length) & valid[:, (known + 1).clamp_max(length - 1)].bool()
        known = known.clamp_max(length - 1)
        labels = target.place_of(ids[:, (known + 1).clamp_max(length - 1)])
        return target.laws(final[:, known], lse[:, known]), labels, there


class Eagle1Training(_Training):
    """EAGLE-1's head with its losses: SmoothL1 of the foretold states, and soft cross entropy of their rows.

    One pass is learnt from. Measured are all passes, where the module does not train.

    Args:
        head: what is trained.
        target: as for `Eagle3Training`.
        passes: how many drafts are measured.
        weights: of the losses.
        ends: as for `Eagle3Training`.
    """

    def forward(
        self,
        ids: Int[Tensor, "b t"],
        valid: Int[Tensor, "b t"],
        features: Float[Tensor, "b t r"],
        final: Float[Tensor, "b t d"],
        lse: Float[Tensor, "b t"],
    ) -> dict[str, Tensor]:
        """Return the `loss`, and per draft the mean `overlap` with the target and how often each was asked for.

        The head reads `final`; `features`, which other heads read, are left alone.
        """
        own, given = self.weights, final
        if self.training and own.noise:
            given = final + (torch.rand_like(final) - 0.5) * own.noise * 512 / ids.shape[1]
        made = unrolled(self.head, self.embedded, ids, given, 1 if self.training else self.passes)
        losses, overlaps, counts = list[Tensor](), list[Tensor](), list[Tensor]()
        for depth, states in enumerate(made):
            laws, _, there = self.asked(depth, ids, valid, final, lse)
            logits = self.logits(states)
            if depth == 0:
                values = own.states * smooth_l1(states, final[:, 1:])
                losses.append(weighted(values + own.entropy * soft_cross_entropy(logits, laws), there.float()))
            overlaps.append(weighted(agreement(logits, laws), there.float()).detach())
            counts.append(there.sum())
        short = self.passes - len(overlaps)
        measured = nn.functional.pad(torch.stack(overlaps), (0, short))
        return {"loss": losses[0], "overlap": measured, "count": nn.functional.pad(torch.stack(counts), (0, short))}


class Eagle3Training(_Training):
    """EAGLE-3's head with its losses: rows alone, in several passes over what the head itself made.

    Args:
        head: what is trained.
        target: the target's embedding and output rows, frozen; of the head's tokens, if it has fewer.
        passes: how many; as many drafts are measured.
        weights: of the losses.
        ends: what the head has of its own at its ends, such as output rows that are trained; None for the target's.
    """

    def forward(
        self,
        ids: Int[Tensor, "b t"],
        valid: Int[Tensor, "b t"],
        features: Float[Tensor, "b t r"],
        final: Float[Tensor, "b t d"],
        lse: Float[Tensor, "b t"],
    ) -> dict[str, Tensor]:
        """Return the `loss`, and per draft the mean `overlap` with the target and how often each was asked for."""
        cost, inside = ROW_LOSSES[self.weights.rows], self._inside(final)
        losses, overlaps, counts = list[Tensor](), list[Tensor](), list[Tensor]()
        for depth, states in enumerate(unrolled(self.head, self.embedded, ids, features, self.passes)):
            laws, labels, there = self.asked(depth, ids, valid, final, lse)
            logits = self.logits(states)
            values = cost(logits, laws, labels)
            if inside is not None:
                values = values * nn.functional.pad(inside[:, 1 + depth :], (0, depth))
            losses.append(self.weights.decay**depth * weighted(values, there.float()))
            overlaps.append(weighted(agreement(logits, laws), there.float()).detach())
            counts.append(there.sum())
        return {"loss": torch.stack(losses).sum(), "overlap": torch.stack(overlaps), "count": torch.stack(counts)}

    def _inside(self, final: Float[Tensor, "b t d"]) -> Bool[Tensor, "b t"] | None:
        """Tell behind which tokens rows cost something; None for all.

        EAGLE-3's authors count a row as 0 in the mean where the target's likeliest token is none of the head's.
        """
        (target,) = self.target
        asked = self.weights.rows == RENORMED and target.tokens is not None
        return target.likeliest_known(final) if asked else None


def own_rows(target: TargetEnds) -> HeadEnds:
    """Return ends with output rows of the head's own, which begin as the target's and are trained (EAGLE-3)."""
    made = nn.Linear(target.rows.shape[1], len(target.rows), bias=False)
    with torch.no_grad():
        made.weight.copy_(target.rows)
    return HeadEnds(lm_head=made.to(target.rows.device), tokens=target.tokens)


def unrolled(
    head: EagleHead,
    embedded: Callable[[Int[Tensor, "b n"]], Float[Tensor, "b n d"]],
    ids: Int[Tensor, "b t"],
    features: Float[Tensor, "b t r"],
    passes: int,
) -> list[Float[Tensor, "b n d"]]:
    """Return what a head makes in every pass over texts of t = n + 1 tokens.

    Tokens behind a text's end are its last, and nothing may be asked of their pairs.

    Args:
        head: the head.
        embedded: gives input embeddings.
        ids: the texts.
        features: the target's own hidden states, which the head reads.
        passes: how many.
    """
    width, device = ids.shape[1] - 1, ids.device
    indices = torch.arange(width, device=device)
    hidden = head.fused(features[:, :-1])
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(head.depth)]
    causal, own = indices.unsqueeze(-1) >= indices, torch.eye(width, dtype=torch.bool, device=device)
    found = list[Tensor]()
    for depth in range(passes):
        tokens = ids[:, (indices + 1 + depth).clamp_max(width)]
        mask = torch.cat([causal, *[own] * depth], dim=1).unsqueeze(0).expand(len(ids), -1, -1)
        seen = [_seen(layer) for layer in kept]
        states = head(embedded(tokens), hidden, (indices + depth).expand(len(ids), -1), seen, mask)
        found.append(states)
        hidden = head.recycled(states)
    return found


def _seen(kept: list[tuple[Tensor, Tensor]]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return what keeps a pass's keys and values behind those of the passes before, and shows all of them."""

    def seen(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        kept.append((keys, values))
        return torch.cat([one for one, _ in kept], dim=2), torch.cat([one for _, one in kept], dim=2)

    return seen
