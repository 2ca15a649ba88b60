"""The top-down lift: any node rule, walked from the root of the tree."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from polydraft.probs import Noise, normalised, sample
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.law import HostVerifier, NodeVerifier, OutcomeLaw
from polydraft.verifiers.nodes.speculative import SpeculativeSampling
from polydraft.verifiers.selection.ordered import Flags, Numbers, Places, numbers
from polydraft.verifiers.trees.certain import certain_verdict
from polydraft.verifiers.trees.chain import by_chain, is_speculative
from polydraft.verifiers.trees.emission import atoms_at, emit, leaf_atom, listed_atoms, plain
from polydraft.verifiers.trees.law import PathLaw, path_to

AT_ONCE = 64
"""How many nodes a CPU computes at once: small tensor operations take as long for many nodes as for one."""


@dataclass(frozen=True)
class TopDown:
    """Apply a node rule at the root, go to the accepted child, and so on until no draft is accepted.

    All random numbers are drawn up front, one per node. All nodes' laws are computed in one batch and the walk is index
    chasing without reading a value back; on a CPU, if the trees are large or the rule works on the host, only the laws
    of visited nodes are computed, as the walk reaches them. All ways give the same verdict. A leaf has no drafts, so
    its outcome is a draw from the target: the bonus token.

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
        size = draft.tree.tokens.shape[-1]
        if size == 1:
            return plain(target_probs, noise)
        refused = isinstance(self.rule, SpeculativeSampling) and draft.tree.topology.width > 1
        certain = certain_verdict(draft, target_probs) if self.lossless and not refused else None
        if certain:
            return certain
        uniforms = noise.uniform(size + 1).to(target_probs.device)
        if is_speculative(self.rule, draft):
            return by_chain(draft, target_probs, uniforms)
        on_cpu = target_probs.device.type == "cpu"
        if on_cpu and isinstance(self.rule, HostVerifier):
            return by_nodes(self.rule, draft, target_probs, uniforms)
        topology = draft.tree.topology
        decide = by_visits if on_cpu and len(topology.parents) * topology.inner > AT_ONCE else by_batch
        path, last, atom = decide(self.rule, draft, target_probs, uniforms[:, 1:])
        next_token = emit(draft.shortlist, target_probs, last, atom, uniforms[:, 0])
        return Verdict(path, (path >= 0).sum(dim=-1), next_token)

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        law = _laws(self.rule, draft, target_probs, draft.tree.tokens.shape[-1])
        children, rows = draft.tree.children, torch.arange(len(law.child), device=law.child.device).unsqueeze(-1)
        taken = torch.nn.functional.pad(draft.tree.valid.to(law.child.dtype), (0, 1))
        taken[rows, children.flatten(1)] = law.child.flatten(1)  # absent children, -1, are the extra last place
        taken[:, 0] = 1
        reached = taken[:, :-1].unsqueeze(-2).where(draft.tree.ancestors, 1).prod(dim=-1)
        rest = law.rest.sum(dim=-1)
        return PathLaw(reached * rest, normalised(law.rest, listed_atoms(draft, target_probs, law.rest.shape[1])))


def _laws(rule: NodeVerifier, draft: Draft, target_probs: Float[Tensor, "b n V"], nodes: int) -> OutcomeLaw:
    """Return the outcome laws of the first nodes."""
    target = listed_atoms(draft, target_probs, nodes)
    draft_probs = torch.nn.functional.pad(draft.probs[:, :nodes], (0, 1)).to(target.dtype)
    return rule.law(draft.drafted_atoms()[:, :nodes], draft_probs, target)


def by_batch(
    rule: NodeVerifier, draft: Draft, target_probs: Float[Tensor, "b n V"], uniforms: Float[Tensor, "b n"]
) -> tuple[Int[Tensor, "b D"], Int[Tensor, "b"], Int[Tensor, "b"]]:
    """Draw all nodes' outcomes and follow those of the path; return it, the node where it ends, and the atom there."""
    topology = draft.tree.topology
    law = _laws(rule, draft, target_probs, topology.inner)
    outcome, left = _decided(law, uniforms[:, : topology.inner])
    places = law.child.shape[-1]
    nodes = torch.arange(uniforms.shape[-1], device=outcome.device).expand(uniforms.shape)
    kept = topology.children[:, : topology.inner].gather(-1, outcome.clamp_max(places - 1).unsqueeze(-1)).squeeze(-1)
    stays = nodes[:, : topology.inner]
    goes_to = torch.cat([kept.where(outcome < places, stays), nodes[:, topology.inner :]], dim=-1)
    walk = [nodes[:, 0]]
    for _ in range(topology.height):
        walk.append(_pick(goes_to, walk[-1]))
    steps, last = torch.stack(walk, dim=-1), walk[-1]
    path, rows = steps[:, 1:].where(steps[:, 1:] != steps[:, :-1], -1), torch.arange(len(last), device=last.device)
    at_leaf, end = last >= topology.inner, last.clamp_max(topology.inner - 1)
    atom = sample(law.rest[rows, end], _pick(left, end))
    if last.device.type != "cpu" or bool(at_leaf.any()):
        atom = leaf_atom(draft.shortlist, target_probs, rows, last, _pick(uniforms, last)).where(at_leaf, atom)
    return path, last, atom


def by_visits(
    rule: NodeVerifier, draft: Draft, target_probs: Float[Tensor, "b n V"], uniforms: Float[Tensor, "b n"]
) -> tuple[Int[Tensor, "b D"], Int[Tensor, "b"], Int[Tensor, "b"]]:
    """Return what `by_batch` does, computing the law of a node only when a row's path reaches it."""
    children, drafts = draft.tree.children, draft.drafted_atoms()
    last, atom = torch.zeros_like(children[:, 0, 0]), torch.zeros_like(children[:, 0, 0])
    going, node = torch.arange(len(children)), torch.zeros_like(last)
    while len(going):
        below, last[going] = children[going, node], node
        places = int((below >= 0).sum(dim=-1).max())
        if places == 0:
            atom[going] = leaf_atom(draft.shortlist, target_probs, going, node, uniforms[going, node])
            break
        target = atoms_at(draft.shortlist, target_probs, going, node)
        draft_probs = torch.nn.functional.pad(draft.probs[going, node], (0, 1)).to(target.dtype)
        law = rule.law(drafts[going, node, :places], draft_probs, target)
        outcome, left = _decided(law, uniforms[going, node])
        kept = outcome < places
        if not bool(kept.all()):
            atom[going[~kept]] = sample(law.rest[~kept], left[~kept])
        going, node = going[kept], _pick(below[kept], outcome[kept])
    return path_to(draft.tree, last), last, atom


def by_nodes(
    rule: HostVerifier, draft: Draft, target_probs: Float[Tensor, "b n V"], uniforms: Float[Tensor, "b n+1"]
) -> Verdict:
    """Return the verdict of `by_batch` on the host, row after row, computing the laws of visited nodes only.

    The first uniform draws a token off the shortlist.
    """
    walks = [HostWalk.of(draft, target_probs, uniforms, row).walk(rule) for row in range(len(uniforms))]
    height = draft.tree.topology.height
    paths = [path + [-1] * (height - len(path)) for path, _ in walks]
    tokens = torch.tensor([token for _, token in walks])
    return Verdict(
        torch.tensor(paths, dtype=torch.int64).view(len(walks), height),
        torch.tensor([len(path) for path, _ in walks]),
        tokens,
    )


@dataclass(frozen=True, eq=False)
class HostWalk:
    """One row's tree on the host.

    Args:
        children: each node's children in drafting order, padded with -1.
        valid: which nodes are there.
        atoms: each node's place in its parent's shortlist.
        shortlist: each node's tokens, -1 in empty places.
        whole: whether the shortlists of nodes with children are all tokens.
        probs: each node's draft probabilities, one row or several.
        target: the target's rows.
        uniforms: one number for the token off the shortlist, then one for each node.
    """

    children: Places
    valid: Flags
    atoms: Places
    shortlist: Places
    whole: bool
    probs: NDArray[np.floating]
    target: NDArray[np.floating]
    uniforms: Numbers

    @classmethod
    def of(
        cls, draft: Draft, target_probs: Float[Tensor, "b n V"], uniforms: Float[Tensor, "b n+1"], row: int
    ) -> "HostWalk":
        """Read a row of the batch."""
        tree = draft.tree
        tables = (tree.topology.children, tree.valid, draft.atoms, draft.shortlist)
        children, valid, atoms, shortlist = (table[row].numpy() for table in tables)
        probs, target = draft.probs[row].numpy(), target_probs[row].numpy()
        return cls(children, valid, atoms, shortlist, draft.whole, probs, target, numbers(uniforms[row]))

    def walk(self, rule: HostVerifier) -> tuple[list[int], int]:
        """Return the kept nodes below the root, and the token that follows."""
        path, node = list[int](), 0
        while True:
            drafts = [child for child in self.children[node].tolist() if child >= 0 and self.valid[child]]
            listed, uniform = self.shortlist[node], float(self.uniforms[node + 1])
            if not drafts:
                some = bool((listed >= 0).any())  # the tail is all there is at leaves without a shortlist
                return path, self._token(node, drawn(self._atoms(node), uniform) if some else len(listed))
            mass = self._atoms(node)
            shares, marginal = rule.at_node(self.atoms[drafts], self._draft_row(node), mass)
            sums = shares.cumsum()
            kept = int((uniform >= sums).sum())
            if kept == len(drafts):
                left = np.maximum(mass - marginal, 0)
                rest = (uniform - sums[-1]) / max(1 - sums[-1], 1e-300)
                return path, self._token(node, drawn(left if left.sum() > 0 else mass, min(max(rest, 0.0), 1.0)))
            node = drafts[kept]
            path.append(node)

    def _atoms(self, node: int) -> Numbers:
        """Return the target's row on the node's shortlist and its tail."""
        mass, tokens, row = np.zeros(self.shortlist.shape[1] + 1), self.shortlist[node], self.target[node]
        if self.whole and tokens[0] >= 0:
            mass[:-1] = row
            return mass
        mass[:-1] = row[tokens] * (tokens >= 0)
        mass[-1] = max(1 - mass[:-1].sum(), 0.0)
        return mass

    def _draft_row(self, node: int) -> Numbers:
        """Return the draft's row, or its rows, with a tail of none."""
        probs = self.probs[node]
        padded = np.zeros((*probs.shape[:-1], probs.shape[-1] + 1))
        padded[..., :-1] = probs
        return padded

    def _token(self, node: int, atom: int) -> int:
        """Return the token of an atom; the tail is drawn from the target's row off the shortlist."""
        listed, row = self.shortlist[node], self.target[node].astype(np.float64)
        if atom < len(listed):
            return int(listed[atom])
        off_list = row.copy()
        off_list[listed[listed >= 0]] = 0
        return drawn(off_list if off_list.sum() > 0 else row, float(self.uniforms[0]))


def drawn(weights: Numbers, uniform: float) -> int:
    """Return what `sample` draws from one row of weights, not all zero."""
    sums = weights.cumsum()
    point = min(uniform * float(sums[-1]), math.nextafter(sums[-1], 0))
    return int(sums.searchsorted(point, side="right"))


def _decided(law: OutcomeLaw, uniforms: Float[Tensor, "*b"]) -> tuple[Int[Tensor, "*b"], Float[Tensor, "*b"]]:
    """Draw which draft is accepted, k for none; return what is left of the uniforms too, for the rest's atom.

    Uniform given that none is: one number decides both, and atoms need be drawn only where the path ends.
    """
    sums = law.child.double().cumsum(dim=-1)
    accepted, rest = torch.nn.functional.pad(sums, (1, 0))[..., -1], law.rest.sum(dim=-1).double()
    total = accepted + rest
    point = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    outcome = (point.unsqueeze(-1) >= sums).sum(dim=-1)
    return outcome, ((point - accepted) / rest.where(rest > 0, 1.0)).clamp(0, 1)


def _pick(values: Shaped[Tensor, "b n"], places: Int[Tensor, "b"]) -> Shaped[Tensor, "b"]:
    return values.gather(-1, places.unsqueeze(-1)).squeeze(-1)
