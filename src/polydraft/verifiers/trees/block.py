"""Block verification: the optimal rule for a chain of drafts."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import Noise, sample
from polydraft.schemes import IID, Scheme, require_drawn
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.law import divided, require_few
from polydraft.verifiers.nodes.speculative import SpeculativeSampling
from polydraft.verifiers.trees.certain import certain_verdict
from polydraft.verifiers.trees.emission import plain
from polydraft.verifiers.trees.law import PathLaw
from polydraft.verifiers.trees.trials import Division, divided_by, first_success, share_of, trials


@dataclass(frozen=True)
class BlockVerification:
    """Accept the longest beginning of a chain x_1 ... x_L whose trial succeeds, tried from its end.

    Rule: with a_0 = 1 and a_i = min(1, a_{i-1} target(x_i) / draft(x_i)), the first i drafts are kept with probability
    Z_i / (Z_i + 1 - a_i), where Z_i = sum_x (a_i target(x) - draft(x))+ with the rows after x_i; all L with probability
    a_L. After i drafts the next token is drawn from norm((a_i target - draft)+), after L from the target.
    Scheme: any of which one draft per node is an independent draw from the node's row, the first where it has several.
    Exactness: theorem 1 of the source.
    Cost: O(K) per node.
    Acceptance: the mean length is the largest that any rule reaches on a chain (theorem 2 of the source).
    Source: arXiv 2403.10444, algorithm 2.

    Raises:
        UnpairedScheme: the scheme's single drafts are certain, or not independent; or a node has more than one draft.
    """

    scheme: Scheme = IID()
    name = "block verification"
    most_drafts = 1
    lossless = True
    best_alone = True

    def __post_init__(self) -> None:
        require_drawn(self.scheme, "Block verification")

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the longest beginning that succeeds."""
        if draft.tree.tokens.shape[-1] == 1:
            return plain(target_probs, noise)
        require_few(self, draft.tree.topology.width)
        certain = certain_verdict(draft, target_probs)
        if certain:
            return certain
        if draft.whole:
            return by_rows(draft, target_probs, noise)
        return first_success(trials(draft, target_probs, self._divide), draft, target_probs, noise)

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        require_few(self, draft.tree.topology.width)
        return trials(draft, target_probs, self._divide).law(draft.tree.topology.post_order)

    def _divide(
        self,
        drafts: Int[Tensor, "b f 1"],
        draft_probs: Float[Tensor, "*rows A"],
        target_probs: Float[Tensor, "b f A"],
        scale: Float[Tensor, "b f"],
    ) -> Division:
        """Divide the mass as speculative sampling does: on a chain, its lift from the leaves up is this rule."""
        mass = scale.unsqueeze(-1) * target_probs
        row = draft_probs if draft_probs.dim() == mass.dim() else draft_probs[..., 0, :]
        return divided_by(*divided(SpeculativeSampling(), drafts, row, mass), mass, scale)


def by_rows(draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
    """Return the verdict of the nodes' trials for a chain that was drawn from whole rows.

    The scales a_i need the drafts' own probabilities alone, so all rows are read together, and nothing is put in the
    order of a list: that takes a fifth of the time of `trials` with 8,192 tokens, and a seventh with 49,152.
    """
    rows = draft.probs if draft.probs.dim() == 3 else draft.probs[:, :, 0]
    uniforms = noise.uniform(target_probs.shape[1] + 2).to(target_probs.device)
    place, there = draft.atoms[:, 1:].clamp_min(0).unsqueeze(-1), draft.tree.valid[:, 1:]
    target, drawn = (of[:, :-1].gather(-1, place).squeeze(-1) for of in (target_probs, rows))
    ratio = share_of(target, drawn, math.inf).double() * there
    scale = torch.ones_like(uniforms[:, 2:])
    for depth in range(ratio.shape[-1]):
        scale[:, depth + 1] = (scale[:, depth] * ratio[:, depth]).clamp_max(1)
    drafted = there.unsqueeze(-1).to(rows.dtype)
    rest = (scale[:, :-1, None].to(rows.dtype) * target_probs[:, :-1]).addcmul_(rows[:, :-1], drafted, value=-1)
    rest = rest.clamp_min_(0)
    left = rest.sum(dim=-1, dtype=scale.dtype)
    success = torch.cat([share_of(left, left + 1 - scale[:, :-1]), scale[:, -1:]], dim=-1)
    nodes, every = torch.arange(scale.shape[-1], device=scale.device), torch.arange(len(scale), device=scale.device)
    length = ((uniforms[:, 2:] < success) * nodes).amax(dim=-1)
    at_leaf, dense = length == ratio.shape[-1], target_probs[every, length]
    kept = rest[every, length.clamp_max(ratio.shape[-1] - 1)].where(~at_leaf.unsqueeze(-1), dense)
    weights = kept.where(kept.sum(dim=-1, keepdim=True) > 0, dense)  # rounding may have left no mass
    token = sample(weights, uniforms[:, 0].where(at_leaf, uniforms[:, 1]))
    return Verdict((nodes[1:]).where(nodes[1:] <= length.unsqueeze(-1), -1), length, token)
