"""Held-out text of the target by temperature, and what a draft that learns is worth on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel
from polydraft.probs import UNFILTERED, SamplingParams
from polydraft.training.alignment.draft_losses import CHAIN
from polydraft.training.alignment.draft_training import DraftTraining
from polydraft.training.alignment.draft_worth import DraftWorth, joined
from polydraft.training.alignment.forms.boosting import BoostTraining
from polydraft.training.alignment.own_text import OwnTexts, chains_of_text
from polydraft.training.heads.losses.row_losses import HeadBatch
from polydraft.training.heads.new_heads import NewHead
from polydraft.training.heads.shards import HEAT, Shards

TEXTS = 32
"""How many texts of each temperature are asked about."""
ROWS = 8
"""How many texts are read at a time."""
PLACES = 48
"""Of how many tokens of each text a head is asked, which is done place by place."""


@dataclass(frozen=True, eq=False)
class HeldOutTexts:
    """Texts that choose among drafts, by the temperature that they were written at.

    Args:
        target: the target.
        rows: the texts of each temperature, as in shards.
        filters: of what the target drew.
    """

    target: HuggingFaceModel
    rows: Mapping[float, Sequence[dict[str, Tensor]]]
    filters: SamplingParams = UNFILTERED

    @classmethod
    def of(
        cls,
        target: HuggingFaceModel,
        files: Sequence[Path],
        heats: Sequence[float],
        filters: SamplingParams = UNFILTERED,
    ) -> "HeldOutTexts":
        """Read the texts of these temperatures that have a token of the target's.

        Raises:
            InvalidParameter: there is none, since the target ends its texts at once.
        """
        texts = Shards([*files], heats=True)
        found: dict[float, list[dict[str, Tensor]]] = {heat: [] for heat in heats}
        for number in range(len(texts)):
            row = texts[number]
            own = found.get(round(float(row.pop(HEAT)), 6))
            if own is not None and len(own) < TEXTS and bool(row["valid"].any()):
                own.append(row)
        if not any(found.values()):
            raise InvalidParameter("The target writes nothing behind the prompts to choose by; give other prompts.")
        return cls(target, {heat: rows for heat, rows in found.items() if rows}, filters)

    def first(self, texts: int) -> "HeldOutTexts":
        """Return the same with so many texts of each temperature at most."""
        return replace(self, rows={heat: rows[:texts] for heat, rows in self.rows.items()})

    def worth(self, draft: NewHead) -> dict[float, DraftWorth]:
        """Return what a draft is worth on the texts, by temperature; of heads the texts' beginnings count."""
        was = draft.training.training
        draft.training.eval()
        try:
            return {heat: self._worth(draft, heat) for heat in self.rows}
        finally:
            draft.training.train(was)

    def _worth(self, draft: NewHead, heat: float) -> DraftWorth:
        rows, parts, device = self.rows[heat], list[DraftWorth](), self.target.device
        for first in range(0, len(rows), ROWS):
            some = rows[first : first + ROWS]
            batch = HeadBatch(**{name: torch.stack([one[name] for one in some]).to(device) for name in some[0]})
            if isinstance(draft.training, DraftTraining | BoostTraining):
                chains = draft.training.chains(batch, heat, CHAIN)
            else:
                valid = batch.valid.cpu()
                texts = OwnTexts(batch.ids.cpu(), valid.int().argmax(-1), valid.int().sum(-1)).first(PLACES)
                params = replace(self.filters, temperature=heat)
                chains = chains_of_text(self.target, draft.drafter, texts, params, CHAIN)
            parts.append(DraftWorth.of(chains))
        return joined(parts)


def tokens_per_call(found: Mapping[float, DraftWorth]) -> dict[float, float]:
    """Return the tokens per target call of chains of five, verified as a block, by temperature."""
    return {heat: one.tokens_per_call["as a block"][-1] for heat, one in found.items()}


def score(calls: Mapping[float, float]) -> float:
    """Return the one number that drafts are chosen by: the geometric mean over temperatures."""
    return prod(calls.values()) ** (1 / len(calls))
