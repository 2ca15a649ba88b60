"""The law of a verdict given the draft: where the path ends and what is emitted there, computed instead of sampled."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import normalised, without
from polydraft.trees import Draft, TokenTree
from polydraft.verifiers.outcome_law import TreeVerifier


@dataclass(frozen=True, eq=False)
class PathLaw:
    """The law of a verdict given the draft and the target's rows.

    Args:
        end: the probability that the path ends at each node; rows sum to one.
        rest: the law of the atom emitted if it ends there; the last atom is the tail.
    """

    end: Float[Tensor, "b n"]
    rest: Float[Tensor, "b n A"]

    def accepted(self, tree: TokenTree) -> Float[Tensor, "b"]:
        """Return the mean number of accepted drafts."""
        return (self.end * tree.depth).sum(dim=-1)

    def next_token(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> Float[Tensor, "b n V"]:
        """Return the law of the token emitted if the path ends at each node, over the whole vocabulary."""
        off_list = normalised(without(target_probs, draft.shortlist), target_probs).to(self.rest.dtype)
        on_list = self.rest[..., :-1] * (draft.shortlist >= 0)
        return (off_list * self.rest[..., -1:]).scatter_add(-1, draft.shortlist.clamp_min(0), on_list)


@runtime_checkable
class PathVerifier(TreeVerifier, Protocol):
    """A tree verifier whose law is known."""

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        ...


def expected_accepted(verifier: PathVerifier, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> Float[Tensor, "b"]:
    """Return the mean number of drafts that a verifier accepts of each row's tree; no verification is sampled.

    Averaged over drafts this is the verifier's mean accepted length, free of the noise of its own coins.
    """
    return verifier.path_law(draft, target_probs).accepted(draft.tree)


def path_to(tree: TokenTree, end: Int[Tensor, "b"]) -> Int[Tensor, "b D"]:
    """Return the nodes from the root, which is left out, down to each row's end, padded with -1."""
    height, rows = tree.topology.height, torch.arange(len(end), device=end.device)
    nodes = torch.arange(tree.tokens.shape[-1], device=end.device).expand(tree.tokens.shape)
    spare = torch.full_like(nodes, height + 1)
    places = tree.depth.where(tree.ancestors[rows, end], spare)
    path = nodes.new_full((len(end), height + 2), -1).scatter(-1, places, nodes)
    return path[:, 1 : height + 1]
