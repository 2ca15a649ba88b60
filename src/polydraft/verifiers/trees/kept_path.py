"""The path that a rule keeps: its law, the walk from the root to its end, and the token that follows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import Noise, normalised, sample, sent, to_atoms, without
from polydraft.trees import Draft, TokenTree, Verdict
from polydraft.verifiers.outcome_law import TreeVerifier, VerificationRule, require_few
from polydraft.verifiers.selection.rule import Places


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


def listed_atoms(draft: Draft, target_probs: Float[Tensor, "b n V"]) -> Float[Tensor, "b n A"]:
    """Return the target's rows at all nodes, on the atoms of their own shortlists."""
    if not draft.whole:
        return to_atoms(target_probs, draft.shortlist)
    inner = draft.tree.topology.inner
    listed = torch.nn.functional.pad(target_probs[:, :inner], (0, 1))
    return torch.cat([listed, to_atoms(target_probs[:, inner:], draft.shortlist[:, inner:])], dim=1)


Decide = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Decides at one node of some rows, given rows, nodes and their depth: the place of the child that is kept among the
node's children, -1 for none, and what is emitted if none is."""


def walk(tree: TokenTree, decide: Decide) -> tuple[Int[Tensor, "b D"], Int[Tensor, "b"], Int[Tensor, "b"]]:
    """Return the kept nodes below the root, padded with -1, the node at which each path ends, and what it emits.

    On a CPU only rows whose paths go on are decided. Another device would have to be waited for to know them, so there
    all rows are decided at every depth, and what comes of rows that have ended is dropped.
    """
    children, height = tree.children, tree.topology.height
    every = torch.arange(len(children), device=children.device)
    path = every.new_full((len(every), height), -1)
    last, emitted, going, rows = torch.zeros_like(every), torch.zeros_like(every), torch.ones_like(every).bool(), every
    for depth in range(height + 1):
        place, value = decide(rows, last[rows], depth)
        emitted[rows] = value.where(going[rows], emitted[rows])
        going[rows] &= place >= 0
        if depth == height:
            break
        if children.device.type == "cpu":
            goes_on = place >= 0
            rows, place = rows[goes_on], place[goes_on]
            if not len(rows):
                break
        below = children[rows, last[rows]].gather(-1, place.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        path[rows, depth] = below.where(going[rows], -1)
        last[rows] = below.where(going[rows], last[rows])
    return path, last, emitted


def verdict_of(ends: Sequence[tuple[list[int], int]], height: int) -> Verdict:
    """Return the verdict that keeps so many nodes of each row, found on the host, and emits this token."""
    path = torch.tensor([[*nodes, *[-1] * (height - len(nodes))] for nodes, _ in ends], dtype=torch.int64)
    lengths = torch.tensor([len(nodes) for nodes, _ in ends])
    return Verdict(path.view(len(ends), height), lengths, torch.tensor([token for _, token in ends]))


def settled(rule: VerificationRule, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict | None:
    """Return the verdict for which no rule is needed: of trees without drafts, or of a target without a choice.

    Raises:
        UnpairedScheme: the rule is for fewer drafts at a node.
    """
    if draft.tree.tokens.shape[-1] == 1:
        token = sample(target_probs[:, 0], sent(noise.uniform(1)[:, 0], target_probs.device))
        return Verdict(token.new_zeros(len(token), 0), torch.zeros_like(token), token)
    require_few(rule, draft.tree.topology.width)
    return certain_verdict(draft, target_probs) if rule.lossless else None


def certain_verdict(draft: Draft, target_probs: Float[Tensor, "b n V"]) -> Verdict | None:
    """Follow the target's own tokens down the trees if it has no choice at any node; return None if it has.

    Every lossless rule here accepts the first copy of a certain token wherever it was drafted, so this is its verdict
    without its arithmetic. Rows are certain if their largest entry is one: the others are below rounding. They are
    looked at on a CPU only; another device would have to be waited for. There a walk over lists takes a tenth of the
    time of `walk`, which was 5 % of a step at temperature 0.
    """
    on_cpu = target_probs.device.type == "cpu"
    if not on_cpu or not all(bool((rows.amax(dim=-1) == 1).all()) for rows in (target_probs[:, :1], target_probs)):
        return None
    tree = draft.tree
    rows = zip(*(of.numpy() for of in (tree.children, tree.tokens, target_probs.argmax(dim=-1))), strict=True)
    return verdict_of([_followed(*row) for row in rows], tree.topology.height)


def _followed(children: Places, tokens: Places, target: Places) -> tuple[list[int], int]:
    """Return the nodes of one row below its root that hold the target's own tokens, and the token that follows."""
    path, node = list[int](), 0
    while True:
        child = next((below for below in children[node].tolist() if below >= 0 and tokens[below] == target[node]), None)
        if child is None:
            return path, int(target[node])
        path.append(node := child)
