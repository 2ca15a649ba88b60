"""Independent drafts: of one draft row, of several, or given that they are distinct."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polydraft.schemes.scheme import (
    Counts,
    Drafts,
    Draws,
    RandomNumbers,
    Rate,
    Row,
    SchemeOfLaw,
    SetLaw,
    Uniforms,
    cut,
    log_symmetric_sums,
    support_size,
)


@dataclass(frozen=True)
class IID(SchemeOfLaw):
    """k independent draws from the draft row; the same token may come twice. A row without mass gives no drafts."""

    name = "iid"
    uniforms = Uniforms.OF_DRAFTS

    def sample(self, draft_probs: Row, counts: Counts, uniforms: RandomNumbers, k: int) -> Drafts:
        """Draw by inverting the distribution function, one uniform per draft."""
        cumulative = draft_probs.double().cumsum(dim=-1)
        points = uniforms[..., :k].double() * cumulative[..., -1:]
        drafts = torch.searchsorted(cumulative, points, right=True)
        atoms = torch.arange(draft_probs.shape[-1], device=draft_probs.device)
        last_possible = atoms.where(draft_probs > 0, -1).amax(dim=-1, keepdim=True)
        return cut(torch.minimum(drafts, last_possible), counts)

    def probability(self, draft_probs: Row, drafts: Drafts) -> Rate:
        """Return the product of the drafts' probabilities."""
        each = draft_probs.gather(-1, drafts.clamp_min(0))
        absent = (draft_probs.sum(dim=-1, keepdim=True) <= 0).to(each.dtype)
        return each.where(drafts >= 0, absent).prod(dim=-1)


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

    def sample(self, draft_probs: Float[Tensor, "*b J K"], counts: Counts, uniforms: RandomNumbers, k: int) -> Drafts:
        """Draw by inverting each row's distribution function, one uniform per draft."""
        rows = _row_of_each(draft_probs, k)
        one = torch.ones(rows.shape[:-1], dtype=torch.int64, device=rows.device)
        drafts = IID().sample(rows, one, uniforms[..., :k].unsqueeze(-1), 1).squeeze(-1)
        reached = (drafts >= 0).cumprod(dim=-1).sum(dim=-1)
        return cut(drafts, torch.minimum(counts, reached))

    def probability(self, draft_probs: Float[Tensor, "*b J K"], drafts: Drafts) -> Rate:
        """Return the product of each draft's probability in its own row."""
        rows = _row_of_each(draft_probs, drafts.shape[-1])
        each = rows.gather(-1, drafts.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        ended = (rows.sum(dim=-1) <= 0).cumsum(dim=-1) > 0
        return torch.where(drafts >= 0, each * ~ended, ended.to(each.dtype)).prod(dim=-1)


def _row_of_each(draft_probs: Float[Tensor, "*b J K"], k: int) -> Float[Tensor, "*b k K"]:
    turns = torch.arange(k, device=draft_probs.device) % draft_probs.shape[-2]
    return draft_probs.index_select(-2, turns)


@dataclass(frozen=True)
class ConditionalPoisson(SchemeOfLaw):
    """k independent draws from the draft row, given that they are distinct.

    Law: with q the draft row and e_k the k-th elementary symmetric polynomial, the ordered drafts x_1, ..., x_k have
    probability q(x_1) ... q(x_k) / (k! e_k(q)). A support smaller than k is drafted whole, in uniformly random order.
    Containment: Pr[all drafts in H] = e_k(q on H) / e_k(q).
    Source: conditional Poisson sampling (Hajek, Ann. Math. Statist. 35, 1964). Hu et al., arXiv 2502.18779, section
    4.2.2 and the proof of theorem 4, give its containment to successive draws without replacement, which have another.
    """

    name = "conditional poisson"
    uniforms = Uniforms.OF_DRAFTS
    set_law = SetLaw(Draws.DISTINCT)

    def sample(self, draft_probs: Row, counts: Counts, uniforms: RandomNumbers, k: int) -> Drafts:
        """Draw the set in ascending order, one uniform per draft, and order it by what is left of the uniforms.

        With j drafts to come from the atoms i, i + 1, ..., the next one is l or later with probability
        S_j(l) / S_j(i), where S_j(l) = e_j(q on the atoms l, l + 1, ...): one inversion of the uniform. Where the
        uniform falls inside the atom's interval is uniform again and independent of what was drawn: the sorting key.
        """
        sums = _sums_from_each_atom(draft_probs, k)
        atoms = torch.arange(sums.shape[-1], device=sums.device)
        atoms = atoms.where(torch.nn.functional.pad(draft_probs > 0, (0, 1)), -1)
        left = torch.minimum(counts, support_size(draft_probs)).unsqueeze(-1)
        start = torch.zeros_like(left)
        drafts: list[Tensor] = []
        keys: list[Tensor] = []
        for step in range(k):
            level = left.clamp_min(0).unsqueeze(-1).expand(*left.shape, sums.shape[-1])
            later = sums.gather(-2, level).squeeze(-2)
            later = (later - later.gather(-1, start)).exp()
            point = uniforms[..., step : step + 1].double()
            draft = atoms.where(later > point, -1).amax(dim=-1, keepdim=True)
            start = draft + 1
            low, high = later.gather(-1, start), later.gather(-1, draft.clamp_min(0))
            drafts.append(draft.where(left > 0, -1))
            keys.append(((point - low) / (high - low)).where(left > 0, torch.inf))
            left = left - 1
        order = torch.cat(keys, dim=-1).argsort(dim=-1, stable=True)
        return torch.cat(drafts, dim=-1).gather(-1, order)

    def probability(self, draft_probs: Row, drafts: Drafts) -> Rate:
        """Return the product of the drafts' probabilities over k! e_k; zero where a token repeats."""
        k = drafts.shape[-1]
        size = support_size(draft_probs).clamp_max(k)
        chosen = draft_probs.double().log().gather(-1, drafts.clamp_min(0)).where(drafts >= 0, 0.0).sum(dim=-1)
        sets = _sums_from_each_atom(draft_probs, k)[..., 0].gather(-1, size.unsqueeze(-1)).squeeze(-1)
        chance = (chosen - sets - (size + 1).double().lgamma()).exp()
        there = torch.arange(k, device=drafts.device) < size.unsqueeze(-1)
        possible = ((drafts >= 0) == there).all(dim=-1) & ~_repeats(drafts)
        return chance.where(possible, 0.0).to(draft_probs.dtype)


def _sums_from_each_atom(draft_probs: Row, k: int) -> Float[Tensor, "*b j L"]:
    """Return log e_j(q on the atoms i, i + 1, ...) for j = 0..k and i = 0..K.

    Whatever draft comes first, the others come after it: e_j from atom i on is the sum of q_l e_{j-1} from l + 1 on
    over l >= i.
    """
    return log_symmetric_sums(draft_probs.double().log().flip(-1), k + 1).flip(-1)


def _repeats(drafts: Drafts) -> Bool[Tensor, "*b"]:
    same = (drafts.unsqueeze(-1) == drafts.unsqueeze(-2)) & (drafts >= 0).unsqueeze(-1)
    return torch.tril(same, diagonal=-1).flatten(-2).any(dim=-1)
