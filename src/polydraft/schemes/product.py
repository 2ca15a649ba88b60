"""Independent drafts from rows of their own."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes.iid import IID
from polydraft.schemes.scheme import Draws, SchemeOfLaw, SetLaw, cut


@dataclass(frozen=True)
class Product(SchemeOfLaw):
    """Independent draws from different rows, such as those of several draft models or temperatures.

    Law: a node has rows q_0, ..., q_{J-1} on one shortlist; draft j is drawn from q_{j mod J}, independently of the
    others. The same token may come twice. A row without mass ends the drafts.
    Containment: Pr[all drafts in H] = prod_j q_{j mod J}(H).
    Source: Khisti et al., arXiv 2410.18234, appendix G (non-identical drafts).
    """

    name = "product"
    set_law = SetLaw(Draws.IN_TURN)  # given a number for each token, of which it reads one for each draft

    def sample(
        self, draft_probs: Float[Tensor, "*b J K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Draw by inverting each row's distribution function, one uniform per draft."""
        rows = _row_of_each(draft_probs, k)
        one = torch.ones(rows.shape[:-1], dtype=torch.int64, device=rows.device)
        drafts = IID().sample(rows, one, uniforms[..., :k].unsqueeze(-1), 1).squeeze(-1)
        reached = (drafts >= 0).cumprod(dim=-1).sum(dim=-1)
        return cut(drafts, torch.minimum(counts, reached))

    def probability(self, draft_probs: Float[Tensor, "*b J K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return the product of each draft's probability in its own row."""
        rows = _row_of_each(draft_probs, drafts.shape[-1])
        each = rows.gather(-1, drafts.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        ended = (rows.sum(dim=-1) <= 0).cumsum(dim=-1) > 0
        return torch.where(drafts >= 0, each * ~ended, ended.to(each.dtype)).prod(dim=-1)


def _row_of_each(draft_probs: Float[Tensor, "*b J K"], k: int) -> Float[Tensor, "*b k K"]:
    turns = torch.arange(k, device=draft_probs.device) % draft_probs.shape[-2]
    return draft_probs.index_select(-2, turns)
