"""Several draft models that learn to cover what those before them miss, and draft one tree together.

A place of the text counts for draft m by the chance that drafts 1 to m - 1 miss it: prod_{j < m} (1 - prod_i q_j(x_i))
over the places i of its sample, which are as many as `span` says. With one place a sample this is a filter by token.
With more it is the expectation of boost tuning's filter by sample, which drops every sample that a draft before
reproduces. All learn at once, each by what those before it miss by now, so that one run makes them.

On held-out text: the first level of a tree has one draft of each, looked at one after the other (SpecInfer's rule), and
below it the first draft goes on. So a text's token x is kept at the first level with t(x) / p(x), t being the part of
the target's law that this rule gives to accepted drafts.

Source: SpecInfer (arXiv 2305.09781, section 3), whose drafts learn in turn.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.drafters import MEMBERS_FILE, BoostedDrafter, member_folders, owned_models
from polydraft.models import HuggingFaceModel, module_of
from polydraft.training.alignment.draft_training import DraftTraining, from_start, written
from polydraft.training.alignment.own_text import ChainsOfText
from polydraft.training.heads.losses.masked_training import with_copies, without_copies, write_model
from polydraft.training.heads.losses.row_losses import HeadBatch, HeadTraining, summed


def missed(chances: Float[Tensor, "b n"], span: int) -> Float[Tensor, "b n"]:
    """Return the chance that a draft misses the sample of each place, samples being so many places one after another.

    Args:
        chances: q(x) of the text's tokens; behind a text's end 0.
    """
    rest = -chances.shape[1] % span
    samples = nn.functional.pad(chances, (0, rest)).unflatten(1, (-1, span))
    return (1 - samples.prod(-1)).repeat_interleave(span, 1)[:, : chances.shape[1]]


def given_to_drafts(target: Float[Tensor, "*b V"], drafts: Sequence[Float[Tensor, "*b V"]]) -> Float[Tensor, "*b V"]:
    """Return t(x), the chance that x is an accepted draft where one draft of each row is looked at after the other.

    A draft of row q is accepted by min(1, r(x) / q(x)), r being the target's law and then what is left of it.
    """
    left, mass = target, torch.ones_like(target[..., :1])
    found = torch.zeros_like(target)
    for row in drafts:
        kept = torch.minimum(left, row)
        found = found + mass * kept
        rejected = 1 - kept.sum(-1, keepdim=True)
        mass = mass * rejected
        left = (left - kept) / rejected.clamp_min(torch.finfo(target.dtype).tiny)
    return found


class BoostTraining(HeadTraining):
    """Draft models that learn together, each where those before it miss the text.

    The loss is sum_m (sum_i w_mi L_mi) / sum_i w_mi over drafts m and places i of all texts: L_mi is what the row of
    draft m costs, and w_mi the chance that drafts 1 to m - 1 miss the sample of the place (`missed`), through which no
    gradient goes; w_1i is 1.

    Args:
        members: the draft models, each with its loss of rows.
        span: how many places one after another a sample has.
    """

    heated = True
    sparing = True

    def __init__(self, members: Sequence[DraftTraining], span: int = 1) -> None:
        super().__init__(*members[0].target)
        self.members, self.span = nn.ModuleList(members), span
        self.register_state_dict_post_hook(without_copies)
        self.register_load_state_dict_pre_hook(with_copies)

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the `loss`, and of each draft the mean `overlap` and the `count` of places."""
        members, heats = self.drafts(), batch.heats()
        at = heats.where(heats > 0, members[0].heat)
        losses, overlaps = list[Tensor](), list[Tensor]()
        weights = torch.ones(int(batch.valid[:, 1:].bool().sum()), device=at.device)
        for one in members:
            asked, rows = one.places(batch, at)
            losses.append((weights * rows.values).sum() / weights.sum().clamp_min(1e-6))
            overlaps.append(rows.overlap.detach().mean() if len(rows.values) else rows.overlap.sum())
            weights = weights * missed(from_start(asked, rows.chance.detach()), self.span)[written(asked)]
        return summed(losses, overlaps, [torch.tensor(len(weights), device=at.device)] * len(members))

    def drafts(self) -> list[DraftTraining]:
        """Return the draft models with their losses."""
        return [cast(DraftTraining, one) for one in self.members]

    @torch.no_grad()
    def chains(self, batch: HeadBatch, heat: float, length: int) -> ChainsOfText:
        """Return what becomes of trees at every place of texts: a draft of each, and chains of the first below them."""
        first, *others = members = self.drafts()
        alone = first.chains(batch, heat, length)
        ratio, overlap = alone.ratio.clamp_max(1), alone.overlap.clone()  # trees are verified token by token
        if not heat:  # where both are 1 or 0
            for other in others:
                right = other.chains(batch, heat, 1).ratio[..., 0]
                ratio[..., 0] = overlap[..., 0] = torch.maximum(ratio[..., 0], right)
            return ChainsOfText(ratio, overlap, alone.written)
        asked = batch.valid[:, 1:].bool()
        tokens = batch.ids[:, 1:][asked]
        rows = zip(*(one.laws_of(batch, heat) for one in members), strict=True)
        kept, share, at = list[Tensor](), list[Tensor](), 0
        for parts in rows:
            drafts, target = [draft for draft, _ in parts], parts[0][1]
            given = given_to_drafts(target, drafts)
            own = tokens[at : at + len(target)]
            known = own < target.shape[-1]  # what no draft has is never kept
            place = own.where(known, 0).unsqueeze(-1)
            kept.append((given.gather(-1, place) / target.gather(-1, place).clamp_min(1e-30)).squeeze(-1) * known)
            share.append(given.sum(-1))
            at += len(target)
        for values, into in ((kept, ratio), (share, overlap)):
            into[..., 0] = from_start(asked, torch.cat(values)).double().cpu()
        return ChainsOfText(ratio, overlap, alone.written)


def write_boosted(drafter: BoostedDrafter, folder: Path, target: HuggingFaceModel, *, card: str = "") -> None:
    """Write a folder with a folder of each draft model.

    Raises:
        OSError: the files cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    models = owned_models(drafter)
    for model, own in zip(models, member_folders(folder, len(models)), strict=True):
        write_model(cast(PreTrainedModel, module_of(model)), own, target, card)
    (folder / "README.md").write_text(card)
    (folder / MEMBERS_FILE).write_text(json.dumps({"members": len(models)}))
