"""Growing a token tree level by level: one proposal call per depth for all rows and all nodes of that depth.

**If something fails on the way** (the drafter, the scheme's sampler or the policy raises), growth ends there and the
tree is what was drawn so far, its deepest nodes leaves; `Draft.failure` holds the error. To drop the whole draft would
bias the text if the error follows from drawn tokens: it is pruning after sampling. To end growth is not, whatever it
follows from: it gives the nodes that are left no children, and a count may depend on all that was drawn before
(`trees.dynamic.policy` has the proof). Before the first draft nothing is lost, so that an error there is raised; and so
are errors of pairing at any depth, since a user has to mend them and no text comes out.

**What is proposed is looked at here**, depth by depth, before anything is drawn from it (`trees.sound`): a row that
is no law of distinct tokens makes its node a leaf, and what are no rows of these nodes is an error like any other. So
whatever is wrong, what was drawn above it stays, and what comes below is as if it had never been asked for. The
finished draft is noted in the noise: whoever asked for it has what was drawn, even if the drafter raises behind growth.

**On a device that would have to be waited for** nothing is read while a tree grows. There a draft row without any mass
says that it is no law: its node is a leaf, and `Draft.sound` tells it to whoever asks.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from polydraft.probs import Noise, sent
from polydraft.schemes import IID, ConditionalPoisson, Coupled, Scheme, TopThenIID, TopThenSample
from polydraft.trees.dynamic.growth import grow_dynamic
from polydraft.trees.dynamic.policy import is_dynamic
from polydraft.trees.frontier import MENDABLE, Frontier, Overlap, Propose
from polydraft.trees.policies import TreePolicy, stopping
from polydraft.trees.shape import TreeShape, topology
from polydraft.trees.sound import alike, any_law, both, usable_rows
from polydraft.trees.tree import Draft, TokenTree

ONE_EACH = (IID, TopThenIID, TopThenSample, ConditionalPoisson)
"""The schemes that use one uniform per draft; others have one per token."""


def grow(
    root: Int[Tensor, "b"],
    policy: TreePolicy,
    scheme: Scheme,
    propose: Propose,
    noise: Noise,
    overlap: Overlap | None = None,
    *,
    trusted: bool = False,
) -> Draft:
    """Draw a token tree: at each depth ask for the draft rows, draw the children, go on with them.

    Args:
        root: the last committed token of each row.
        policy: decides the number of children of every node. With a dynamic one, the drafter must afterwards put its
            keys in the tree's order: see `Draft.scored`.
        scheme: the law by which the children of a node are drawn; the verifier's.
        propose: gives the draft rows of all nodes of a depth in one call; deepest nodes are never asked.
        noise: random numbers, one stream per row.
        overlap: what the drafter thinks of the rows that it proposed, for policies that ask for it.
        trusted: whether all rows are known to be laws of distinct tokens, or zeros where there is none, in memory that
            stays as it is; then they are not looked at, which spares time.

    Raises:
        Exception: whatever `propose` or the scheme raises before anything is drawn; later it is kept as the draft's
            `failure`.
        UnpairedScheme: the policy drops drafts after they were drawn, and the scheme draws them at random.
        VocabularyMismatch: the drafter says so, at any depth.
    """
    if is_dynamic(policy):
        draft = grow_dynamic(root, policy, scheme, propose, noise, overlap, trusted=trusted)
    else:
        draft = _grown(root, policy, scheme, propose, noise, trusted)
    noise.note((draft if trusted else draft.copied(), scheme))
    return draft


def _grown(
    root: Int[Tensor, "b"], policy: TreePolicy, scheme: Scheme, propose: Propose, noise: Noise, trusted: bool
) -> Draft:
    """Draw a tree of the policy's shape."""
    shape = policy.shape
    most_children, failure, sound, stopped = shape.max_children, None, None, False
    asked = stopping(policy)
    if not shape.counts:
        return Draft.nothing(root)
    tree = topology(shape, len(root), root.device)
    tokens, atoms = [root.unsqueeze(-1)], [torch.full_like(root, -1).unsqueeze(-1)]
    valid = [torch.ones_like(tokens[0], dtype=torch.bool)]
    shortlist: list[Tensor] = []
    probs: list[Tensor] = []
    for depth, level in enumerate(_levels(shape, root.device)):
        busy = level.nodes
        frontier = Frontier(
            busy, tokens[-1][:, : len(busy)], depth, tree.ancestors[:, busy.start : busy.stop, : busy.stop]
        )
        frontier = frontier if trusted else frontier.lent()
        try:
            listed, law, fine = usable_rows(propose(frontier), frontier, probs, trusted=trusted)
            drafts = _draw(scheme, any_law(law, fine), level, _uniforms(scheme, listed, law, level, depth, noise))
            drawn = level.children(drafts)
            reached = level.children(listed.gather(-1, drafts.clamp_min(0))).clamp_min(0)
        except MENDABLE:
            raise
        except Exception as error:  # whatever it is, what was drawn must be verified
            if depth == 0:
                raise
            failure = error
            break
        sound = both(sound, None if fine is None else fine | ~valid[-1][:, : len(busy)])
        there = (drawn >= 0) & valid[-1].index_select(1, level.parents)
        if fine is not None:
            there &= fine.index_select(1, level.parents)
        tokens.append(reached)
        atoms.append(drawn.where(there, -1))
        valid.append(there)
        shortlist.append(_with_leaves(listed, level.leaves, -1))
        probs.append(_with_leaves(law, level.leaves, 0.0))
        if asked is not None and fine is None and depth + 1 < shape.depth:
            try:
                stopped = not asked.goes_on(depth + 1, _chances(law, drafts, level))
            except Exception as error:  # noqa: BLE001  whatever it is, what was drawn must be verified
                failure = error
            if stopped or failure:
                break
    if len(tokens) <= shape.depth:  # growth ended early, and the deepest nodes are leaves
        tree = topology(TreeShape(shape.counts[: len(tokens) - 1]), len(root), root.device)
        leaves = tokens[-1].shape[1]
        shortlist[-1], probs[-1] = _with_leaves(shortlist[-1], leaves, -1), _with_leaves(probs[-1], leaves, 0.0)
    grown = TokenTree(torch.cat(tokens, dim=1), tree, torch.cat(valid, dim=1))
    return Draft(
        grown,
        torch.cat(atoms, dim=1),
        torch.cat(alike(shortlist, -1), dim=1),
        torch.cat(alike(probs, 0.0), dim=1),
        most_children=most_children,
        failure=failure,
        sound=sound,
        stopped=stopped,
    )


@dataclass(frozen=True, eq=False)
class _Level:
    """The nodes of one depth that get children, and where these come from.

    Args:
        nodes: the nodes' numbers in the tree.
        counts: their numbers of children.
        most: the largest of these.
        parents: for each child, its parent's place among the nodes.
        places: for each child, its place in the row of all nodes' drafts; None where every draft is a child.
        leaves: how many nodes without children follow before the next level's.
    """

    nodes: range
    counts: Int[Tensor, " f"]
    most: int
    parents: Int[Tensor, " c"]
    places: Int[Tensor, " c"] | None
    leaves: int

    def children(self, values: Shaped[Tensor, "b f k"]) -> Shaped[Tensor, "b c"]:
        """Return what belongs to the children, in node order."""
        row = values.flatten(1)
        return row if self.places is None else row.index_select(1, self.places)


@lru_cache(maxsize=256)
def _levels(shape: TreeShape, device: torch.device) -> tuple[_Level, ...]:
    return tuple(_level(shape, depth, device) for depth in range(shape.depth))


def _level(shape: TreeShape, depth: int, device: torch.device) -> _Level:
    counts, nodes, below = shape.counts[depth], shape.levels[depth], shape.levels[depth + 1]
    most = max(counts)
    parents = [shape.parents[child] - nodes.start for child in below]
    places = [parent * most + shape.ranks[child] for parent, child in zip(parents, below, strict=True)]
    leaves = len(nodes) - len(counts) + (len(below) if depth == shape.depth - 1 else 0)
    return _Level(
        nodes=range(nodes.start, nodes.start + len(counts)),
        counts=torch.tensor(counts, device=device),
        most=most,
        parents=torch.tensor(parents, device=device),
        places=None if len(places) == most * len(counts) else torch.tensor(places, device=device),
        leaves=leaves,
    )


def _with_leaves(rows: Shaped[Tensor, "b f ..."], leaves: int, empty: float) -> Shaped[Tensor, "b g ..."]:
    """Append empty rows for nodes without children."""
    return torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 2) + (0, leaves), value=empty) if leaves else rows


def _chances(law: Float[Tensor, "b f *J K"], drafts: Int[Tensor, "b f k"], level: _Level) -> Float[Tensor, "b c"]:
    """Return the draft probabilities of the tokens just drawn; with several rows of a node those of the first."""
    rows = law[:, :, 0] if law.dim() == 4 else law
    places = level.children(drafts)
    chances = level.children(rows.gather(-1, drafts.clamp_min(0)))
    return chances.where(places >= 0, 0.0)


def _draw(
    scheme: Scheme, law: Float[Tensor, "b f *J K"], level: _Level, uniforms: Float[Tensor, "b f u"]
) -> Int[Tensor, "b f k"]:
    return scheme.sample(law, level.counts.expand(law.shape[:2]), uniforms, level.most)


def _uniforms(
    scheme: Scheme,
    listed: Int[Tensor, "b f K"],
    law: Float[Tensor, "b f *J K"],
    level: _Level,
    depth: int,
    noise: Noise,
) -> Float[Tensor, "b f u"]:
    width = level.most if isinstance(scheme, ONE_EACH) else max(level.most, law.shape[-1])
    if scheme.deterministic:
        return law.new_zeros(1).expand(*law.shape[:2], width)
    if isinstance(scheme, Coupled):
        return noise.tied(depth, listed)
    return sent(noise.uniform(law.shape[1], width), law.device)
