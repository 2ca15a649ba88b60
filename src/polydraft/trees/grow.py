"""Growing a token tree level by level: one proposal call per depth for all rows and all nodes of that depth.

There is one loop, `grow`, over two kinds of trees. A `ShapedTree` has the policy's shape in all rows, so that all of it
but the tokens is shared and known beforehand. In an `OpenTree` (`trees.growing`) each row has a shape of its own, which
follows the draft.

**If something fails on the way** (the drafter, the scheme's sampler or the policy raises), growth ends there and the
tree is what was drawn so far, its deepest nodes leaves; `Draft.failure` holds the error. To drop the whole draft would
bias the text if the error follows from drawn tokens: it is pruning after sampling. To end growth is not, whatever it
follows from: it gives the nodes that are left no children, and a count may depend on all that was drawn before
(`trees.growing.growth` has the proof). Before the first draft nothing is lost, so that an error there is raised; and so
are errors of pairing at any depth, since a user has to mend them and no text comes out.

**What is proposed is looked at here**, depth by depth, before anything is drawn from it (`trees.frontier`): a row that
is no law of distinct tokens makes its node a leaf, and what are no rows of these nodes is an error like any other. So
whatever is wrong, what was drawn above it stays, and what comes below is as if it had never been asked for. The
finished draft is noted in the noise: whoever asked for it has what was drawn, even if the drafter raises behind growth.

**Trees grow on the host**, whose steps are many and small: on a GPU each of them would be a kernel, some hundreds a
draft, which take longer to launch than the drafter's own passes. Rows come to the host depth by depth, nodes go to the
drafter's device, and so does the finished draft.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from polydraft.probs import Noise
from polydraft.schemes import Scheme, Uniforms
from polydraft.trees.frontier import MENDABLE, Frontier, Overlap, Propose, ProposedRows, alike, both, usable_rows
from polydraft.trees.growing.growth import GrowingPolicy
from polydraft.trees.growing.open_tree import OpenTree
from polydraft.trees.policy import TreePolicy
from polydraft.trees.tree import Draft, TokenTree, TreeShape, topology


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
        policy: decides the number of children of every node. With a growing one, the drafter must afterwards put its
            keys in the tree's order: see `Draft.scored`.
        scheme: the law by which the children of a node are drawn; the verifier's.
        propose: gives the draft rows of all nodes of a depth in one call; deepest nodes are never asked.
        noise: random numbers, one stream per row.
        overlap: what the drafter thinks of the rows that it proposed just now, for policies that ask for it.
        trusted: whether all rows are known to be laws of distinct tokens, or zeros where there is none, in memory that
            stays as it is; then they are not looked at, which spares time.

    Raises:
        Exception: whatever `propose` or the scheme raises before anything is drawn; later it is kept as the draft's
            `failure`.
        UnpairedScheme: the policy's trees cannot be drawn under the scheme.
        VocabularyMismatch: the drafter says so, at any depth.
    """
    shape = policy.shape  # read once: a policy may choose another one at any time
    policy.check(scheme)
    if not shape.counts:
        draft = Draft.nothing(root)
        noise.note((draft if trusted else draft.copied(), scheme))
        return draft
    home = root.cpu()
    tree = OpenTree(home, policy, shape) if isinstance(policy, GrowingPolicy) else ShapedTree(home, policy, shape)
    failure: Exception | None = None
    try:
        while (frontier := tree.frontier()) is not None:
            asked = frontier if trusted and home is root else frontier.lent(root.device)
            found = usable_rows(propose(asked), asked, tree.first, trusted=trusted)
            law, counts, most = tree.planned(found, overlap and partial(_estimated, overlap, asked))
            drafts = scheme.sample(law, counts, _uniforms(tree, scheme, found, noise), most) if most else None
            tree.add(found, law, drafts)
    except MENDABLE:
        raise
    except Exception as error:  # whatever it is, what was drawn must be verified
        if not tree.depth:
            raise
        failure = error
    draft = tree.draft(failure).on(root.device)
    noise.note((draft if trusted else draft.copied(), scheme))
    return draft


def _estimated(overlap: Overlap, frontier: Frontier) -> Float[Tensor, "b f"]:
    return overlap(frontier).cpu()


def _uniforms(
    tree: "ShapedTree | OpenTree", scheme: Scheme, found: ProposedRows, noise: Noise
) -> Float[Tensor, "b f u"]:
    """Return the numbers that the drafts of a depth are drawn with; a row's do not depend on the rows beside it."""
    most, probs = tree.most_children, found.probs
    width = most if tree.shares_streams and scheme.uniforms is Uniforms.OF_DRAFTS else max(most, probs.shape[-1])
    if scheme.deterministic:
        return probs.new_zeros(1).expand(*probs.shape[:2], width)
    if scheme.uniforms is Uniforms.SHARED:
        return noise.tied(tree.depth, found.listed)
    stream = noise if tree.shares_streams else noise.at(tree.depth)
    return stream.uniform(probs.shape[1], width)


class ShapedTree:
    """Trees of one shape in the middle of their growth; all rows of a batch share all but the tokens.

    All depths draw from one stream.
    """

    shares_streams = True

    def __init__(self, root: Int[Tensor, "b"], policy: TreePolicy, shape: TreeShape) -> None:
        self._policy, self._shape, self._stops = policy, shape, policy.stops
        self._topology, self._levels = topology(shape, len(root), root.device), _levels(shape)
        self._tokens, self._atoms = [root.unsqueeze(-1)], [torch.full_like(root, -1).unsqueeze(-1)]
        self._valid = [torch.ones_like(self._tokens[0], dtype=torch.bool)]
        self._listed, self._probs = list[Tensor](), list[Tensor]()
        self._sound: Bool[Tensor, " b"] | None = None
        self._chances: Callable[[], Tensor] | None = None
        self._stopped = False
        self.depth = 0
        """That of the nodes that get children next."""
        self.first: Tensor | None = None
        """The draft rows of the root, once they are known."""

    @property
    def most_children(self) -> int:
        """The most children of a node of this depth."""
        return self._levels[self.depth].most

    def frontier(self) -> Frontier | None:
        """Return the next nodes that get children; None where growth ends."""
        depth = self.depth
        if depth == len(self._levels):
            return None
        if self._chances is not None:
            self._stopped = not self._policy.grows_on(depth, self._chances())
            if self._stopped:
                return None
        nodes = self._levels[depth].nodes
        ancestors = self._topology.ancestors[:, nodes.start : nodes.stop, : nodes.stop]
        return Frontier(nodes, self._tokens[-1][:, : len(nodes)], depth, ancestors)

    def planned(
        self, found: ProposedRows, estimate: Callable[[], Float[Tensor, "b f"]] | None
    ) -> tuple[Float[Tensor, "b f *J K"], Int[Tensor, "b f"], int]:
        """Return the rows to draw from, the nodes' numbers of children, and the largest of these."""
        level, law = self._levels[self.depth], found.any_law()
        return law, level.counts.expand(law.shape[:2]), level.most

    def add(self, found: ProposedRows, law: Float[Tensor, "b f *J K"], drafts: Int[Tensor, "b f k"] | None) -> None:
        """Take in the drafts of a depth."""
        assert drafts is not None  # every depth of a shape has children
        level, sound = self._levels[self.depth], found.sound
        atoms, parents = level.children(drafts), self._valid[-1]
        tokens = level.children(found.listed.gather(-1, drafts.clamp_min(0))).clamp_min(0)
        there = (atoms >= 0) & parents.index_select(1, level.parents)
        if sound is not None:
            there &= sound.index_select(1, level.parents)
            self._sound = both(self._sound, sound | ~parents[:, : sound.shape[1]])
        self._chances = partial(_chances, law, drafts, level) if self._stops and sound is None else None
        self._tokens.append(tokens)
        self._atoms.append(atoms.where(there, -1))
        self._valid.append(there)
        self._listed.append(_with_leaves(found.listed, level.leaves, -1))
        self._probs.append(_with_leaves(found.probs, level.leaves, 0.0))
        self.first, self.depth = self._probs[0], self.depth + 1

    def draft(self, failure: Exception | None) -> Draft:
        """Return the draft of what was drawn."""
        tree, depth = self._topology, self.depth
        listed, probs = self._listed, self._probs
        if depth < self._shape.depth:  # growth ended early, and the deepest nodes are leaves
            tree = topology(TreeShape(self._shape.counts[:depth]), len(self._tokens[0]), self._tokens[0].device)
            leaves = self._tokens[-1].shape[1]
            listed = [*listed[:-1], _with_leaves(listed[-1], leaves, -1)]
            probs = [*probs[:-1], _with_leaves(probs[-1], leaves, 0.0)]
        return Draft(
            TokenTree(torch.cat(self._tokens, dim=1), tree, torch.cat(self._valid, dim=1)),
            torch.cat(self._atoms, dim=1),
            torch.cat(alike(listed, -1), dim=1),
            torch.cat(alike(probs, 0.0), dim=1),
            most_children=self._shape.max_children,
            planned=self._shape,
            failure=failure,
            sound=self._sound,
            stopped=self._stopped,
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
def _levels(shape: TreeShape) -> tuple[_Level, ...]:
    return tuple(_level(shape, depth) for depth in range(shape.depth))


def _level(shape: TreeShape, depth: int) -> _Level:
    counts, nodes, below = shape.counts[depth], shape.levels[depth], shape.levels[depth + 1]
    most = max(counts)
    parents = [shape.parents[child] - nodes.start for child in below]
    places = [parent * most + shape.ranks[child] for parent, child in zip(parents, below, strict=True)]
    leaves = len(nodes) - len(counts) + (len(below) if depth == shape.depth - 1 else 0)
    return _Level(
        nodes=range(nodes.start, nodes.start + len(counts)),
        counts=torch.tensor(counts),
        most=most,
        parents=torch.tensor(parents),
        places=None if len(places) == most * len(counts) else torch.tensor(places),
        leaves=leaves,
    )


def _with_leaves(rows: Shaped[Tensor, "b f ..."], leaves: int, empty: float) -> Shaped[Tensor, "b g ..."]:
    return torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 2) + (0, leaves), value=empty) if leaves else rows


def _chances(law: Float[Tensor, "b f *J K"], drafts: Int[Tensor, "b f k"], level: _Level) -> Float[Tensor, "b c"]:
    """Return the draft probabilities of the tokens just drawn; with several rows of a node those of the first."""
    rows = law[:, :, 0] if law.dim() == 4 else law
    places = level.children(drafts)
    chances = level.children(rows.gather(-1, drafts.clamp_min(0)))
    return chances.where(places >= 0, 0.0)
