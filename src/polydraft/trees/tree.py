"""The values that drafters, verifiers and the engine exchange: token tree, draft and verdict."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.probs import sent
from polydraft.trees.shape import Topology, TreeShape, topology


@dataclass(frozen=True, eq=False)
class Riders:
    """Tokens that a drafter wants scored with its tree, such as a lookahead window or mask tokens.

    They lie behind the tree's nodes in the pass, so that no node sees them; trees, verifiers and caches need not know
    of them. Every rider sees the committed text.

    Args:
        tokens: token ids. An id V + i, beyond the target's V tokens, names row i of the draft's `embeddings`.
        places: their places in the text, counted from the root's: 1 is where the root's children are.
        sees: which of the tree's n nodes (the root included), and which riders behind them, each rider sees; itself
            included.
        valid: False at padding.
    """

    tokens: Int[Tensor, "b r"]
    places: Int[Tensor, "b r"]
    sees: Bool[Tensor, "b r s"]
    valid: Bool[Tensor, "b r"]

    def of(self, rows: Int[Tensor, " b"]) -> "Riders":
        """Return those of some rows."""
        return Riders(self.tokens[rows], self.places[rows], self.sees[rows], self.valid[rows])


ROOT_ONLY = TreeShape(())


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A batch of token trees. Node 0 is the root: the last committed token, not a draft.

    Args:
        tokens: token ids; any id at invalid nodes.
        topology: the parents and the views derived from them.
        valid: False at padding nodes; a valid node's parent is valid.
    """

    tokens: Int[Tensor, "b n"]
    topology: Topology
    valid: Bool[Tensor, "b n"]

    @property
    def parents(self) -> Int[Tensor, "b n"]:
        """The parent of each node; the root's is -1."""
        return self.topology.parents

    @property
    def depth(self) -> Int[Tensor, "b n"]:
        """The number of drafts on the path from the root to each node."""
        return self.topology.depth

    @property
    def ancestors(self) -> Bool[Tensor, "b n n"]:
        """Entry [b, i, j] tells whether node j is node i or one of its ancestors."""
        return self.topology.ancestors

    @property
    def children(self) -> Int[Tensor, "b n k"]:
        """The valid children of each node in drafting order, -1 elsewhere."""
        return self.topology.children.where(self.topology.of_children(self.valid, 0), -1)

    def copied(self) -> "TokenTree":
        """Return trees in memory of their own; topologies are shared by all trees of a shape."""
        return TokenTree(self.tokens.clone(), Topology(self.parents.clone()), self.valid.clone())

    @classmethod
    def root_only(cls, root: Int[Tensor, "b"]) -> "TokenTree":
        """Return trees without drafts: one decoding step without speculation."""
        tokens = root.unsqueeze(-1)
        return cls(tokens, topology(ROOT_ONLY, len(root), root.device), torch.ones_like(tokens, dtype=torch.bool))


@dataclass(frozen=True, eq=False)
class Resume:
    """What the target's first layers made of a tree's nodes, root included; their keys lie in the target's cache.

    Args:
        layers: how many layers.
        states: their output.
    """

    layers: int
    states: Float[Tensor, "b n d"]


@dataclass(frozen=True, eq=False)
class Draft:
    """A token tree together with the laws that its children were drawn from.

    Args:
        tree: the tokens.
        atoms: each node's place in its parent's shortlist; -1 at the root and at invalid nodes.
        shortlist: per node, the K token ids that its children were drawn from, distinct; -1 in empty places.
        probs: per node, their draft probabilities: rows sum to one, or to zero at nodes without children. Under the
            `Product` scheme each node has J rows, of which its drafts are drawn in turn: "b n J K".
        scored: each node's number among those that the drafter was asked for, -1 if it never was; None if every node
            has the number that it was asked for by. A drafter that keeps keys by number moves them accordingly.
        whole: whether the shortlists of the topology's `inner` nodes are all of the target's tokens in the order of
            their ids, so that the target's rows need not be put in the order of a list.
        most_children: the most children that a node of any of these trees could have had, fixed before the first was
            drawn; None if unknown. A verifier may choose its rule by this bound. It must not choose by the tree itself,
            whose shape may follow from what was drawn.
        failure: the error that ended growth early, after drafts had been drawn; None if growth came to its own end.
            The tree is a draft all the same, to be verified as it is; see `trees.grow`.
        sound: in which rows all draft rows were laws, to be read when the step is over; None if they are known to be.
        riders: what is to be scored beside the tree; None for nothing.
        embeddings: learnt input embeddings that riders name by ids beyond the target's tokens.
        stopped: whether growth ended before the planned depth because the policy wanted no more.
        source: who found the drafts in a text, for those who learn from it, such as "lookup" or "suffix"; else "".
        resume: what the target's first layers made of the nodes already, where the drafter ran them. It is trusted: the
            text follows the law that these states lead to.
    """

    tree: TokenTree
    atoms: Int[Tensor, "b n"]
    shortlist: Int[Tensor, "b n K"]
    probs: Float[Tensor, "b n *J K"]
    scored: Int[Tensor, "b n"] | None = None
    whole: bool = False
    most_children: int | None = None
    failure: Exception | None = None
    sound: Bool[Tensor, "b"] | None = None
    riders: Riders | None = None
    embeddings: Float[Tensor, "e d"] | None = None
    resume: Resume | None = None
    stopped: bool = False
    source: str = ""

    @classmethod
    def nothing(cls, root: Int[Tensor, "b"], *, apart: bool = False) -> "Draft":
        """Return the draft that proposes no token.

        Args:
            root: the last committed tokens.
            apart: whether each of a node's drafts has a row of its own, as under `Product`.
        """
        tree = TokenTree.root_only(root)
        empty = torch.full_like(tree.tokens, -1)
        probs = torch.zeros_like(empty, dtype=torch.float32).unsqueeze(-1)
        return cls(tree, empty, empty.unsqueeze(-1), probs.unsqueeze(-2) if apart else probs, most_children=0)

    def copied(self) -> "Draft":
        """Return a draft in memory of its own."""
        tree = self.tree.copied()
        return replace(
            self, tree=tree, atoms=self.atoms.clone(), shortlist=self.shortlist.clone(), probs=self.probs.clone()
        )

    def of(self, rows: Sequence[int]) -> "Draft":
        """Return the draft of some rows alone."""
        own = sent(torch.tensor(list(rows)), self.atoms.device)
        tree = TokenTree(self.tree.tokens[own], Topology(self.tree.parents[own]), self.tree.valid[own])
        return replace(
            self,
            tree=tree,
            atoms=self.atoms[own],
            shortlist=self.shortlist[own],
            probs=self.probs[own],
            scored=None if self.scored is None else self.scored[own],
            sound=None if self.sound is None else self.sound[own],
            riders=None if self.riders is None else self.riders.of(own),
            resume=None if self.resume is None else Resume(self.resume.layers, self.resume.states[own]),
        )

    def drafted_atoms(self) -> Int[Tensor, "b n k"]:
        """Return each node's drafts as places in its own shortlist, in drafting order, padded with -1."""
        return self.tree.topology.of_children(self.atoms.where(self.tree.valid, -1), -1)


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a verifier keeps of a draft.

    Args:
        path: the accepted nodes from the root down, without the root, padded with -1; width D may be 0.
        length: how many drafts were accepted, 0 to D.
        next_token: the token that follows them: the correction after a rejection, or the bonus at a leaf.
    """

    path: Int[Tensor, "b D"]
    length: Int[Tensor, "b"]
    next_token: Int[Tensor, "b"]

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The rows' accepted drafts as numbers, read back once."""
        return tuple(map(int, self.length.cpu().numpy()))

    def of(self, rows: Sequence[int]) -> "Verdict":
        """Return what is kept of some rows, without columns in which none of them has a node."""
        own = torch.tensor(list(rows), device=self.length.device)
        length = self.length[own]
        return Verdict(self.path[own, : int(length.max())], length, self.next_token[own])

    def only(self, rows: Collection[int]) -> "Verdict":
        """Return the same for those whose drafts count in these rows alone: elsewhere none was kept."""
        there = torch.tensor([row in rows for row in range(len(self.length))], device=self.length.device)
        return replace(self, path=self.path.where(there.unsqueeze(-1), -1), length=self.length.where(there, 0))

    def tokens(self, tree: TokenTree) -> Int[Tensor, "b E"]:
        """Return the emitted tokens: accepted drafts, then `next_token`, padded with -1."""
        if self.path.shape[-1] == 0:
            return self.next_token.unsqueeze(-1)
        drafts = tree.tokens.gather(-1, self.path.clamp_min(0)).where(self.path >= 0, self.path)
        padded = torch.nn.functional.pad(drafts, (0, 1), value=-1)
        return padded.scatter(-1, self.length.unsqueeze(-1), self.next_token.unsqueeze(-1))
