"""The top-down lift: any node rule, walked from the root of the tree."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from polydraft.probs import Noise, normalised, sample
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.host.top_down import by_nodes
from polydraft.verifiers.law import NodeVerifier, OutcomeLaw, check_rule, most_drafts, on_host
from polydraft.verifiers.nodes.speculative import SpeculativeSampling
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

    Raises:
        InvalidParameter: what is lifted is no node rule.
    """

    rule: NodeVerifier

    def __post_init__(self) -> None:
        check_rule(self.rule, "TopDown")

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

    @property
    def most_drafts(self) -> int:
        """The most drafts at a node that the node rule and its scheme are defined for."""
        return most_drafts(self.rule)

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
        host = on_host(self.rule) if on_cpu else None
        if host:
            return by_nodes(host, draft, target_probs, uniforms)
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
