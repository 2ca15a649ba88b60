"""Block verification: the optimal rule for a chain of drafts."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import UnpairedScheme
from polydraft.probs import Noise
from polydraft.schemes import IID, Scheme, require_drawn
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.host.block import by_block_at
from polydraft.verifiers.law import at_draft
from polydraft.verifiers.trees.certain import certain_verdict
from polydraft.verifiers.trees.chain import WholeChain, is_whole, sample_rest
from polydraft.verifiers.trees.emission import plain
from polydraft.verifiers.trees.law import PathLaw
from polydraft.verifiers.trees.trials import Division, first_success, share_of, trials


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

    def __post_init__(self) -> None:
        require_drawn(self.scheme, "Block verification")

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the longest beginning that succeeds."""
        if draft.tree.tokens.shape[-1] == 1:
            return plain(target_probs, noise)
        if draft.tree.topology.width == 1:
            certain = certain_verdict(draft, target_probs)
            if certain:
                return certain
        if is_whole(draft):
            return by_block(draft, target_probs, noise)
        return first_success(trials(draft, target_probs, _divide), draft, target_probs, noise)

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        return trials(draft, target_probs, _divide).law(draft.tree.topology.post_order)


def by_block(draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
    """Return the verdict of block verification for a chain drawn from whole rows: that of the nodes' trials.

    The scales a_i need the drafts' own probabilities alone, so all rows are read together.
    """
    if target_probs.device.type == "cpu":
        return by_block_at(draft, target_probs, noise)
    return _by_block(draft, target_probs, noise)


def _by_block(draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
    """Do so with tensors, all rows together."""
    chain = WholeChain.of(draft, target_probs)
    uniforms = noise.uniform(target_probs.shape[1] + 2).to(target_probs.device)
    ratio = share_of(chain.target, chain.drawn, math.inf).double() * chain.there
    scale = torch.ones_like(uniforms[:, 2:])
    for depth in range(ratio.shape[-1]):
        scale[:, depth + 1] = (scale[:, depth] * ratio[:, depth]).clamp_max(1)
    drafted, there = chain.rows[:, :-1], chain.there.unsqueeze(-1).to(chain.rows.dtype)
    rest = (scale[:, :-1, None].to(drafted.dtype) * target_probs[:, :-1]).addcmul_(drafted, there, value=-1)
    rest = rest.clamp_min_(0)
    left = rest.sum(dim=-1, dtype=scale.dtype)
    success = torch.cat([share_of(left, left + 1 - scale[:, :-1]), scale[:, -1:]], dim=-1)
    nodes, every = torch.arange(scale.shape[-1], device=scale.device), torch.arange(len(scale), device=scale.device)
    length = ((uniforms[:, 2:] < success) * nodes).amax(dim=-1)
    at_leaf, dense = length == ratio.shape[-1], target_probs[every, length]
    kept = rest[every, length.clamp_max(ratio.shape[-1] - 1)].where(~at_leaf.unsqueeze(-1), dense)
    uniform = uniforms[:, 0].where(at_leaf, uniforms[:, 1])
    return Verdict(chain.path(length), length, sample_rest(kept, dense, uniform))


def _divide(
    drafts: Int[Tensor, "b f k"],
    draft_probs: Float[Tensor, "*rows A"],
    target_probs: Float[Tensor, "b f A"],
    scale: Float[Tensor, "b f"],
) -> Division:
    if drafts.shape[-1] > 1:
        raise UnpairedScheme(
            f"Block verification keeps part of a chain, but the tree has a node with {drafts.shape[-1]} drafts; use a "
            "chain, or BottomUp."
        )
    draft, mass = drafts.squeeze(-1), scale.unsqueeze(-1) * target_probs
    draft_probs = draft_probs if draft_probs.dim() == mass.dim() else draft_probs[..., 0, :]
    there = (draft >= 0).to(mass.dtype)
    ratio = share_of(at_draft(mass, draft), at_draft(draft_probs, draft)) * there
    return Division(ratio.unsqueeze(-1), (mass - draft_probs * there.unsqueeze(-1)).clamp_min(0), scale)
