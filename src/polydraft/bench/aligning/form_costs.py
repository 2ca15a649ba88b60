"""What steps with a draft take on this machine, and how often its drafts would have to be right to pay."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from warnings import catch_warnings, simplefilter

import torch

from polydraft.drafters import Drafter
from polydraft.engine import stream
from polydraft.engine.choices import default_verifier
from polydraft.engine.measured import measured
from polydraft.errors import InvalidDraft
from polydraft.models import HuggingFaceModel
from polydraft.probs import SamplingParams
from polydraft.theory import tokens_per_call
from polydraft.training.alignment.draft_losses import CHAIN
from polydraft.trees import Chain, TreeShape

PAYS, REACHABLE = 1.05, 0.95
"""A draft pays if it is this much faster than plain decoding with an overlap that training can reach."""
FINE = 1000
TRIED = 2
"""What could not be timed drafts for so many tokens, which tells slow passes from drafts that fail."""


@dataclass(frozen=True)
class FormCost:
    """What steps with chains of 1, 2, ... drafts take, in steps of plain decoding.

    Args:
        steps: for each length; () where passes could not be timed, most often since they are slow, and then drafts
            nearly always pay.
        level: one draft pass, in passes of the target.
    """

    steps: tuple[float, ...] = ()
    level: float | None = None

    def speed(self, overlap: float) -> float:
        """Return how much faster than plain decoding the best chain is if each draft is accepted so often."""
        if not self.steps:
            return tokens_per_call(overlap, CHAIN)
        return max(tokens_per_call(overlap, length) / step for length, step in enumerate(self.steps, 1))

    def needed(self, speed: float) -> float | None:
        """Return the least overlap that makes a chain that much faster; None where none would, or nobody knows."""
        if not self.steps:
            return None
        return next((place / FINE for place in range(FINE + 1) if self.speed(place / FINE) >= speed), None)

    @property
    def pays(self) -> bool:
        """Whether it can pay."""
        needed = self.needed(PAYS)
        return not self.steps or (needed is not None and needed <= REACHABLE)

    def value(self, tokens: float) -> float:
        """Return what chains of all drafts are worth that bring so many tokens a call, to compare forms."""
        return tokens / self.steps[-1] if self.steps else tokens

    def in_words(self) -> str:
        """Say what a draft costs and what it needs."""
        if self.level is None:
            return "passes could not be timed, most often since they are slow; such drafts are taken to pay"
        needed = self.needed(PAYS)
        told = f"a draft pass takes {self.level:.2f} of the target's"
        if needed is None:
            return f"{told}: chains of up to {CHAIN} are no faster than plain decoding whatever is accepted"
        return f"{told}, which needs an overlap of {needed:.2f} to be {PAYS}x of plain decoding"

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "FormCost":
        """Return what values by name say."""
        return cls(tuple(values["steps"]), values["level"])


def none_pays(costs: Mapping[str, FormCost]) -> str:
    """Say that no form of draft can pay, and which of those that were looked at comes closest."""
    if not costs:
        return "This target can have no form of draft that learns so."
    word, cost = min(costs.items(), key=lambda one: -one[1].speed(1.0))
    told = f"Of {len(costs)} forms that were looked at {word} comes closest" if len(costs) > 1 else word
    return f"No form of draft can pay on this machine. {told}: {cost.in_words()}."


def cost_of(target: HuggingFaceModel, drafter: Drafter, heat: float) -> FormCost:
    """Time passes, drafts and steps of a drafter for its target; what was measured before is known.

    Args:
        heat: the temperature that texts are watched at.

    Raises:
        InvalidDraft: it cannot draft for this target.
    """
    params = SamplingParams(temperature=heat)
    found = measured(target, drafter, default_verifier(drafter, params), Chain(CHAIN), heat)
    if found is None:
        _check_drafts(target, drafter, heat)
        return FormCost()
    costs, plain = found.costs, found.costs.of(TreeShape(()))
    steps = tuple(costs.of(TreeShape(((1,),) * length)) / plain for length in range(1, CHAIN + 1))
    return FormCost(steps, found.level / found.passes[0][1])


def _check_drafts(target: HuggingFaceModel, drafter: Drafter, heat: float) -> None:
    """Let a drafter whose passes could not be timed draft: passes that are slow are no fault of its drafts."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    text = {"attention_mask": torch.ones_like(token), "max_new_tokens": TRIED}
    with catch_warnings():
        simplefilter("ignore", RuntimeWarning)  # the same is raised below
        run = stream(
            target.model, token, drafter=drafter, policy=Chain(CHAIN), do_sample=True, temperature=heat, **text
        )
        why = run.exhaust().statistics.fallback
    if why:
        raise InvalidDraft(f"The drafter {drafter.name} cannot draft for this target ({why}).")
