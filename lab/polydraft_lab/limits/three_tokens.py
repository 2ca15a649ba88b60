"""Acceptance over an alphabet of three tokens, where the whole family of draft laws can be drawn."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.bench.style import COLOURS, panels
from polydraft.schemes import IID
from polydraft.theory import optimal_acceptance
from polydraft.verifiers import ImportanceWeighted, KSeq, NodeVerifier, RecursiveRejection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULES: dict[str, NodeVerifier] = {
    "importance weighted": ImportanceWeighted(free=None, alphabet=None),
    "k-seq (SpecTr)": KSeq(),
    "recursive rejection (SpecInfer)": RecursiveRejection(),
}
FIRST = (1 / 3, 1 / 6)
"""The draft's probability of the first token, one for each panel; the target is uniform."""
STEPS = 100


def family(first: float) -> tuple[Float[Tensor, " s"], Float[Tensor, "s 3"]]:
    """Return probabilities x of the second token and the draft rows (first, x, 1 - first - x)."""
    second = torch.linspace(0, 1, STEPS + 1, dtype=torch.float64) * (1 - first)
    rows = torch.stack([torch.full_like(second, first), second, (1 - first - second).clamp_min(0)], dim=-1)
    return second, rows


def acceptance_of_rules(draft_probs: Float[Tensor, "s 3"], k: int) -> dict[str, Float[Tensor, " s"]]:
    """Return each rule's acceptance of k independent drafts of a uniform target, and the optimum."""
    target = torch.full_like(draft_probs, 1 / 3)
    best = {"optimum": optimal_acceptance(draft_probs, target, IID(), k)}
    tail = torch.nn.functional.pad  # rules take rows with a tail atom, here without mass
    counts = torch.full((len(draft_probs),), k)
    return best | {
        name: rule.acceptance(tail(draft_probs, (0, 1)), tail(target, (0, 1)), counts) for name, rule in RULES.items()
    }


def draw_three_tokens(k: int = 2) -> "Figure":
    """Draw acceptance against the draft's probability of the second token, as in arXiv 2410.18234, figure 2."""
    titles = [f"draft ({_fraction(first)}, x, {_fraction(1 - first)} - x)" for first in FIRST]
    figure, axes = panels(titles, 3.6, sharey=True)
    for first, axis in zip(FIRST, axes, strict=True):
        second, rows = family(first)
        for (name, rates), colour, dashes in zip(acceptance_of_rules(rows, k).items(), COLOURS, _DASHES, strict=False):
            axis.plot(second.tolist(), rates.tolist(), label=name, color=colour, linestyle=dashes)
        axis.set_xlabel("x, the draft's probability of the second token")
    axes[0].set_ylabel("acceptance rate")
    figure.suptitle(f"{k} independent drafts, uniform target over three tokens", fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


_DASHES: Sequence[str] = ("solid", "dashed", "dashdot", "dotted")


def _fraction(value: float) -> str:
    return f"{round(value * 6)}/6" if round(value * 6) % 2 else f"{round(value * 3)}/3"
