"""Emission: the token that follows the accepted path."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import Noise, sample, sent, to_atoms, without
from polydraft.trees import Draft, Verdict


def plain(target_probs: Float[Tensor, "b 1 V"], noise: Noise) -> Verdict:
    """Draw the next token of trees without drafts: what every tree rule comes to there, without its detours."""
    token = sample(target_probs[:, 0], sent(noise.uniform(1)[:, 0], target_probs.device))
    return Verdict(token.new_zeros(len(token), 0), torch.zeros_like(token), token)


def emit(
    shortlist: Int[Tensor, "b n K"],
    target_probs: Float[Tensor, "b n V"],
    last: Int[Tensor, "b"],
    atom: Int[Tensor, "b"],
    uniforms: Float[Tensor, "b"],
) -> Int[Tensor, "b"]:
    """Return the token of the atom drawn at node `last`; the tail is drawn from the target's row off the shortlist.

    A tail of rounding errors only, with no mass off the shortlist, is drawn from the whole row.
    """
    rows, size = torch.arange(len(last), device=last.device), shortlist.shape[-1]
    on_list = shortlist[rows, last, atom.clamp(0, size - 1)]
    if atom.device.type == "cpu" and bool((atom < size).all()):
        return on_list
    dense = target_probs[rows, last]
    off_list = without(dense, shortlist[rows, last])
    tail = off_list.where(off_list.sum(dim=-1, keepdim=True) > 0, dense)
    return torch.where(atom < size, on_list, sample(tail, uniforms))


def listed_atoms(draft: Draft, target_probs: Float[Tensor, "b n V"], nodes: int) -> Float[Tensor, "b f A"]:
    """Return the target's rows at the first nodes, on the atoms of their own shortlists."""
    rows, inner = target_probs[:, :nodes], draft.tree.topology.inner
    if not draft.whole:
        return to_atoms(rows, draft.shortlist[:, :nodes])
    listed = torch.nn.functional.pad(rows[:, :inner], (0, 1))
    if nodes <= inner:
        return listed
    return torch.cat([listed, to_atoms(rows[:, inner:], draft.shortlist[:, inner:nodes])], dim=1)
