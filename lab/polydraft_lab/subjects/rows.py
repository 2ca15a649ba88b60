"""Rows of both models along texts that the target has written, for rules at single nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes import Scheme
from polydraft_lab.limits import Models
from polydraft_lab.limits.positions import generate_sample, rows_on_atoms
from polydraft_lab.subjects.rules import RulesSettings


@dataclass(frozen=True, eq=False)
class Rows:
    """Draft and target rows at the positions of some texts, on the draft's likeliest tokens and the tail.

    Args:
        temperature: of both models.
        draft: the draft rows.
        target: the target rows.
    """

    temperature: float
    draft: Float[Tensor, "m A"]
    target: Float[Tensor, "m A"]

    def spread(self, count: int) -> "Rows":
        """Return so many of the positions, evenly spread over the texts; some come twice if there are fewer."""
        chosen = torch.linspace(0, len(self.draft) - 1, count).long().to(self.draft.device)
        return Rows(self.temperature, self.draft[chosen], self.target[chosen])

    def precise(self) -> "Rows":
        """Return the rows in double precision, each with a sum of one."""
        draft, target = self.draft.double(), self.target.double()
        return Rows(
            self.temperature, draft / draft.sum(dim=-1, keepdim=True), target / target.sum(dim=-1, keepdim=True)
        )


def rows_of_texts(
    models: Models, prompts: Sequence[Int[Tensor, "1 _"]], temperature: float, settings: RulesSettings
) -> Rows:
    """Let the target continue the prompts alone, the n-th with the seed plus n, and return both models' rows.

    Raises:
        ContextOverflow: a prompt leaves no room for a token.
    """
    both: list[tuple[Tensor, Tensor]] = []
    for number, ids in enumerate(prompts):
        sample = generate_sample(models, ids, temperature, settings.max_tokens, settings.seed + number, 0)
        both.append(rows_on_atoms(sample, temperature, temperature, settings.shortlist))
    draft, target = (torch.cat(rows) for rows in zip(*both, strict=True))
    return Rows(temperature, draft, target)


def rows_for(scheme: Scheme, draft: Float[Tensor, "m A"]) -> Float[Tensor, "m *J A"]:
    """Return draft rows as a scheme takes them: for `Product` a second row beside each, at half the temperature."""
    if not scheme.several_rows:
        return draft
    sharp = draft.double() ** 2
    return torch.stack([draft, (sharp / sharp.sum(dim=-1, keepdim=True)).to(draft)], dim=1)
