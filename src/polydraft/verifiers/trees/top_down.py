"""The top-down lift: any node rule, walked from the root of the tree."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import Noise, normalised, sample, to_atoms, without
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.law import NodeVerifier


@dataclass(frozen=True)
class TopDown:
    """Apply a node rule at the root, go to the accepted child, and so on until no draft is accepted.

    All nodes' laws are computed in one batch and all outcomes drawn up front, one uniform per node; the walk is
    index chasing without reading a value back. A leaf has no drafts, so its outcome is a draw from the target: the
    bonus token.

    Exactness: each emitted token follows the target's law given those before it, because the node's rule is exact.
    Source: SpecInfer, arXiv 2305.09781, algorithm 2.
    """

    rule: NodeVerifier

    @property
    def scheme(self) -> Scheme:
        """The node rule's scheme."""
        return self.rule.scheme

    @property
    def name(self) -> str:
        """The node rule's name."""
        return self.rule.name

    @property
    def lossless(self) -> bool:
        """Whether the node rule is lossless."""
        return self.rule.lossless

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the path that the node rule accepts from the root down."""
        if draft.tree.tokens.shape[-1] == 1:
            return _plain(target_probs, noise)
        drafts = draft.drafted_atoms()
        tail = torch.zeros_like(draft.probs[..., :1])
        draft_probs = torch.cat([draft.probs, tail], dim=-1).to(target_probs.dtype)
        law = self.rule.law(drafts, draft_probs, to_atoms(target_probs, draft.shortlist))
        uniforms = noise.uniform(drafts.shape[1] + 1).to(target_probs.device)
        outcome = sample(torch.cat([law.child, law.rest], dim=-1), uniforms[:, 1:])
        path, length, last = _walk(draft.tree.children, outcome, int(draft.tree.depth.max()))
        atom = _pick(outcome, last) - drafts.shape[-1]
        next_token = _emit(draft.shortlist, target_probs, last, atom, uniforms[:, 0])
        return Verdict(path, length, next_token)


def _plain(target_probs: Float[Tensor, "b 1 V"], noise: Noise) -> Verdict:
    """Draw the next token of trees without drafts: what the walk comes to there, without its detours."""
    token = sample(target_probs[:, 0], noise.uniform(1)[:, 0].to(target_probs.device))
    return Verdict(token.new_zeros(len(token), 0), torch.zeros_like(token), token)


def _walk(
    children: Int[Tensor, "b n k"], outcome: Int[Tensor, "b n"], depth: int
) -> tuple[Int[Tensor, "b D"], Int[Tensor, "b"], Int[Tensor, "b"]]:
    """Follow accepted children from the root; return the path, its length and the node where it stopped."""
    places = children.shape[-1]
    kept = outcome.clamp_max(places - 1).unsqueeze(-1)
    goes_to = children.gather(-1, kept).squeeze(-1).where(outcome < places, torch.full_like(outcome, -1))
    last = torch.zeros_like(outcome[:, 0])
    going = torch.ones_like(last, dtype=torch.bool)
    path: list[Tensor] = []
    for _ in range(depth):
        step = _pick(goes_to, last)
        going = going & (step >= 0)
        path.append(step.where(going, torch.full_like(step, -1)))
        last = step.where(going, last)
    nodes = torch.stack(path, dim=-1) if path else outcome[:, :0]
    return nodes, (nodes >= 0).sum(dim=-1), last


def _emit(
    shortlist: Int[Tensor, "b n K"],
    target_probs: Float[Tensor, "b n V"],
    last: Int[Tensor, "b"],
    atom: Int[Tensor, "b"],
    uniforms: Float[Tensor, "b"],
) -> Int[Tensor, "b"]:
    """Return the token of the drawn atom; the tail atom is drawn from the dense target row off the shortlist.

    A tail of rounding errors only, with no mass off the shortlist, is drawn from the whole row.
    """
    rows = torch.arange(len(last), device=last.device)
    listed = shortlist[rows, last]
    dense = target_probs[rows, last]
    off_list = sample(normalised(without(dense, listed), dense), uniforms)
    on_list = _pick(listed, atom.clamp(0, listed.shape[-1] - 1))
    return torch.where(atom < listed.shape[-1], on_list, off_list)


def _pick(values: Int[Tensor, "b n"], places: Int[Tensor, "b"]) -> Int[Tensor, "b"]:
    return values.gather(-1, places.unsqueeze(-1)).squeeze(-1)
