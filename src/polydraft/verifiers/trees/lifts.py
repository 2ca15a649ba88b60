"""How a rule for nodes becomes one for trees: the walk from the root, trials from the leaves, and the lifts by both.

Rules from the leaves give each node v a *scale* a: with this probability, averaged over the drafts below it, the path
shall end at v or below. The root has scale 1. A rule splits the target mass a * target of a node among its children,
whose scales follow, and a *rest* that v emits itself. All this is fixed before any coin is tossed, so one sweep down
the tree knows every scale. Then the nodes are tried, children before their parent and siblings in drafting order, and
v succeeds with probability |rest| / (|rest| + 1 - a).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.probs import Noise, normalised, sample, sent, to_atoms, without
from polydraft.schemes import require_independent
from polydraft.trees import Draft, TokenTree, Verdict
from polydraft.verifiers.checks import check_law, check_shares
from polydraft.verifiers.outcome_law import (
    DraftRows,
    Drafts,
    Lift,
    NodeVerifier,
    OutcomeLaw,
    Rate,
    Row,
    ScalableVerifier,
    Shares,
    TreeVerifier,
    VerificationRule,
    divided,
    require_few,
    traits,
)
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


class Division(NamedTuple):
    """How the target mass of some nodes is divided.

    Args:
        children: the scale of each child when its trials begin, earlier siblings having failed.
        rest: the mass that is left for the node itself, to be emitted.
        scale: the node's scale when its own trial begins.
    """

    children: Shares
    rest: Row
    scale: Rate


Divide = Callable[..., Division]
"""Divides the mass of nodes, given drafts, draft rows, target rows and scales, and their kinds if they have any."""


class _DividesTrees(TreeVerifier, Protocol):
    def divide(self, drafts: Drafts, draft_probs: DraftRows, target_probs: Row, scale: Rate) -> Division: ...

    def tried(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict: ...


class FromLeaves:
    """A rule that verifies from the leaves up; it derives from this and writes `divide`."""

    def verify(self: _DividesTrees, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the path to the first node that succeeds, from the leaves up.

        Raises:
            UnpairedScheme: a node has more drafts than the rule is for.
        """
        verdict = settled(traits(self).node_rule or self, draft, target_probs, noise)
        return verdict or self.tried(draft, target_probs, noise)

    def tried(self: _DividesTrees, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Toss the coins of a tree that has drafts and a target that has a choice."""
        return first_success(trials(draft, target_probs, self.divide), draft, target_probs, noise)

    def path_law(self: _DividesTrees, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        require_few(traits(self).node_rule or self, draft.tree.topology.width)
        return trials(draft, target_probs, self.divide).law(draft.tree.topology.post_order)


def divided_by(shares: Shares, marginal: Row, mass: Row, scale: Rate) -> Division:
    """Divide mass as a node rule does: each child gets its share, and the node what the marginal leaves."""
    left = (1 - shares.cumsum(dim=-1) + shares).clamp_min(0)
    return Division(share_of(shares, left), (mass - marginal).clamp_min(0), scale)


@dataclass(frozen=True, eq=False)
class Trials:
    """All nodes' trials.

    Args:
        success: the probability that each node's trial succeeds; 1 at the root, which comes last.
        rest: the mass that is left for the node itself.
        atoms: the target's law, which is emitted where rounding left no mass.
    """

    success: Float[Tensor, "b n"]
    rest: Float[Tensor, "b n A"]
    atoms: Float[Tensor, "b n A"]

    def law(self, order: Int[Tensor, "b n"]) -> PathLaw:
        """Return the law of the first success when the nodes are tried in this order."""
        in_order = torch.zeros_like(self.success).scatter(-1, order, self.success)
        failed_before = torch.nn.functional.pad((1 - in_order).cumprod(dim=-1)[:, :-1], (1, 0), value=1.0)
        return PathLaw((failed_before * in_order).gather(-1, order), normalised(self.rest, self.atoms))


def trials(
    draft: Draft, target_probs: Float[Tensor, "b n V"], divide: Divide, kinds: Int[Tensor, " n"] | None = None
) -> Trials:
    """Sweep down the trees, level by level, and return every node's trial; float64.

    `kinds`, a number for each node, is handed on to `divide`.
    """
    tree, rows = draft.tree, torch.arange(len(target_probs), device=target_probs.device).unsqueeze(-1)
    atoms = listed_atoms(draft, target_probs).double()
    probs = torch.nn.functional.pad(draft.probs, (0, 1)).double()
    drafts, children, spare = draft.drafted_atoms(), tree.children, tree.tokens.shape[-1]
    scales = atoms.new_zeros(len(atoms), spare + 1)  # the last place takes what absent nodes are given
    scales[:, 0] = 1
    success, rest = torch.zeros_like(scales), torch.nn.functional.pad(atoms, (0, 0, 0, 1))
    for nodes, width in tree.topology.levels:
        here, place = nodes.clamp_min(0), nodes.where(nodes >= 0, spare)
        scale = scales.gather(-1, place)
        if width == 0:
            success = success.scatter(-1, place, scale)
            continue
        kind = () if kinds is None else (kinds[here],)
        part = divide(drafts[rows, here, :width], probs[rows, here], atoms[rows, here], scale, *kind)
        below = children[rows, here, :width]
        below = below.where((below >= 0) & (nodes >= 0).unsqueeze(-1), spare)
        scales = scales.scatter(-1, below.flatten(1), part.children.flatten(1))
        left = part.rest.sum(dim=-1)
        success = success.scatter(-1, place, share_of(left, left + 1 - part.scale))
        rest[rows, place] = part.rest
    success[:, 0] = 1  # a failure there is a rounding error
    return Trials(success[:, :-1], rest[:, :-1], atoms)


def first_success(tried: Trials, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
    """Toss every node's coin and keep the path to the first that succeeds."""
    tree = draft.tree
    uniforms = sent(noise.uniform(tree.tokens.shape[-1] + 2), target_probs.device)
    failed = uniforms[:, 2:] >= tried.success
    end = (tree.topology.post_order + failed * tree.tokens.shape[-1]).argmin(dim=-1)
    rows = torch.arange(len(end), device=end.device)
    atom = sample(normalised(tried.rest[rows, end], tried.atoms[rows, end]), uniforms[:, 1])
    next_token = emit(draft.shortlist, target_probs, end, atom, uniforms[:, 0])
    return Verdict(path_to(tree, end), tree.depth[rows, end], next_token)


def share_of(part: Float[Tensor, "*#b"], whole: Float[Tensor, "*#b"]) -> Float[Tensor, "*#b"]:
    """Return part / whole, at most one; zero where the whole is zero."""
    return torch.where(whole > 0, part / whole.where(whole > 0, 1), 0).clamp_max(1)


@dataclass(frozen=True)
class TopDown(Lift[NodeVerifier]):
    """Apply a node rule at the root, go to the accepted child, and so on until no draft is accepted.

    All random numbers are drawn up front, one per node. The laws of visited nodes alone are computed, those of all rows
    together at each depth. A leaf has no drafts, so its outcome is a draw from the target: the bonus token.

    Exactness: each emitted token follows the target's law given those before it, because the node's rule is exact.
    Source: SpecInfer, arXiv 2305.09781, algorithm 2.

    The laws that a rule from outside the package gives for a text are checked: a wrong one is an error at its step.

    Raises:
        InvalidParameter: what is lifted is no node rule.
    """

    rule: NodeVerifier
    direction = "top down"

    def __post_init__(self) -> None:
        _check_node_rule(self.rule, "TopDown")

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the path that the node rule accepts from the root down."""
        verdict = settled(self.rule, draft, target_probs, noise)
        if verdict:
            return verdict
        uniforms = sent(noise.uniform(draft.tree.tokens.shape[-1] + 1), target_probs.device)
        drafts = draft.drafted_atoms()

        def decide(rows: Tensor, nodes: Tensor, _: int) -> tuple[Tensor, Tensor]:
            target = to_atoms(target_probs[rows, nodes], draft.shortlist[rows, nodes])
            draft_probs = torch.nn.functional.pad(draft.probs[rows, nodes], (0, 1)).to(target.dtype)
            law = self.rule.law(drafts[rows, nodes], draft_probs, target)
            check_law(self.rule, law, drafts[rows, nodes], target)
            return _decided(law, uniforms[rows, nodes + 1])

        path, last, atom = walk(draft.tree, decide)
        next_token = emit(draft.shortlist, target_probs, last, atom, uniforms[:, 0])
        return Verdict(path, (path >= 0).sum(dim=-1), next_token)

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        target = listed_atoms(draft, target_probs)
        draft_probs = torch.nn.functional.pad(draft.probs, (0, 1)).to(target.dtype)
        law = self.rule.law(draft.drafted_atoms(), draft_probs, target)
        children, rows = draft.tree.children, torch.arange(len(law.child), device=law.child.device).unsqueeze(-1)
        taken = torch.nn.functional.pad(draft.tree.valid.to(law.child.dtype), (0, 1))
        taken[rows, children.flatten(1)] = law.child.flatten(1)  # absent children, -1, are the extra last place
        taken[:, 0] = 1
        reached = taken[:, :-1].unsqueeze(-2).where(draft.tree.ancestors, 1).prod(dim=-1)
        rest = law.rest.sum(dim=-1)
        return PathLaw(reached * rest, normalised(law.rest, target))


@dataclass(frozen=True)
class BottomUp(FromLeaves, Lift[ScalableVerifier]):
    """Verify a whole path at once where `TopDown` verifies token by token, so that a rejection above can be made good.

    Rule: a node v with scale a (the root has 1) passes to its child c the share S(c | C) that the node rule accepts of
    c, given the drafts C, when the target mass is a * target; what the rule leaves on average, rho = a * target -
    E_C[S], is v's own. Children are tried in drafting order, c with scale S(c | C) / (1 - shares of those before it);
    if all fail, the path ends at v with probability |rho| / (|rho| + 1 - a) and a token of rho / |rho| is emitted. A
    leaf ends its path with probability a. Of a repeated token only the copy that the rule gives a share is tried.
    Scheme: the node rule's, if each node's drafts are drawn anew: what a node passes on is right on average only.
    Exactness: by induction a node succeeds with probability exactly a over the drafts below it, and then emits its
    children's shares on average E_C[S], its own rest rho, together a * target.
    Cost: the node rule's shares and marginal once per depth, for all nodes of the depth together.
    Acceptance: on a chain with speculative sampling this is block verification, optimal there; on a tree of depth
    one it is the node rule. Not proved never to fall below `TopDown` of the same rule, though it did in no case tried.
    Source: block verification, arXiv 2403.10444, on trees of any rule; with recursive rejection of independent drafts
    it is traversal verification, arXiv 2505.12398.

    Shares and marginals that a rule from outside the package gives for a text are checked.

    Raises:
        InvalidParameter: the rule has no shares and marginal.
        UnpairedScheme: the scheme's drafts depend on those of other nodes.
    """

    rule: ScalableVerifier
    direction = "bottom up"

    def __post_init__(self) -> None:
        _check_node_rule(self.rule, "BottomUp")
        if not isinstance(cast(object, self.rule), ScalableVerifier):
            kind = type(self.rule).__name__
            raise InvalidParameter(
                f"BottomUp lifts rules with shares and a marginal, which {kind} has not; use TopDown."
            )
        require_independent(self.rule.scheme, "BottomUp")

    @property
    def name(self) -> str:
        """The node rule's name and the lift's."""
        return f"{self.rule.name}, bottom up"

    def tried(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Toss the coins of the trees' nodes; what a rule from outside gives is checked."""
        checked = trials(draft, target_probs, partial(self.divide, checked=True))
        return first_success(checked, draft, target_probs, noise)

    def divide(
        self, drafts: Drafts, draft_probs: DraftRows, target_probs: Row, scale: Rate, *, checked: bool = False
    ) -> Division:
        """Divide the mass of nodes as the node rule does."""
        mass = scale.unsqueeze(-1) * target_probs
        both = divided(self.rule, drafts, draft_probs, mass)
        if checked:
            check_shares(self.rule, *both, drafts, mass)
        return divided_by(*both, mass, scale)


def _check_node_rule(rule: object, who: str) -> None:
    if isinstance(rule, type) or not isinstance(rule, NodeVerifier):
        raise InvalidParameter(f"{who} lifts node rules such as NaiveMatch(), but got {rule!r}.")


def _decided(law: OutcomeLaw, uniforms: Float[Tensor, " g"]) -> tuple[Int[Tensor, " g"], Int[Tensor, " g"]]:
    """Draw which draft is accepted, -1 for none, and which atom is emitted if none is.

    Uniform given that none is: one number decides both.
    """
    sums = law.child.double().cumsum(dim=-1)
    accepted, rest = torch.nn.functional.pad(sums, (1, 0))[..., -1], law.rest.sum(dim=-1).double()
    total = accepted + rest
    point = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    outcome = (point.unsqueeze(-1) >= sums).sum(dim=-1)
    left = ((point - accepted) / rest.where(rest > 0, 1.0)).clamp(0, 1)
    return outcome.where(outcome < sums.shape[-1], -1), sample(law.rest, left)
