"""Token trees: shapes, who descends from whom, masks, and the values that drafters, verifiers and engine exchange."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from polydraft.errors import InvalidParameter, is_whole
from polydraft.probs import sent
from polydraft.trees.riders import Resume, Riders

MOST_NODES = 4096


@dataclass(frozen=True)
class TreeShape:
    """A static tree, written as the number of children of every node, level by level.

    Nodes are numbered breadth first, siblings in drafting order, the root being node 0. Trailing zeros of a level
    may be left out: `((4,), (3, 2, 2, 1), (3,))` is a root with four children, which have 3, 2, 2 and 1 children,
    of which only the first has children, three of them.

    Raises:
        InvalidParameter: counts that are no tuples of integers, a negative count, more counts than nodes in a level, or
            more than 4096 nodes.
    """

    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not _are_counts(self.counts):
            found = repr(self.counts)[:80]
            raise InvalidParameter(
                f"A tree shape is a tuple of tuples of integers, such as ((2,), (1, 0)), not {found}."
            )
        nodes, total = 1, 1
        for depth, level in enumerate(self.counts):
            if len(level) > nodes or any(count < 0 for count in level) or not sum(level):
                raise InvalidParameter(
                    f"The tree shape has counts {level} at depth {depth}, but {nodes} nodes there can have children."
                )
            nodes, total = sum(level), total + sum(level)
        if total > MOST_NODES:
            raise InvalidParameter(f"The tree has {total} nodes; at most {MOST_NODES} can be scored in one pass.")

    @property
    def depth(self) -> int:
        """The longest path's number of drafts."""
        return len(self.counts)

    @property
    def size(self) -> int:
        """The number of nodes, the root included."""
        return 1 + sum(map(sum, self.counts))

    @property
    def max_children(self) -> int:
        """The largest number of children of one node."""
        return max((count for level in self.counts for count in level), default=0)

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """The node numbers at each depth, the root's level first."""
        first, result = 1, [range(1)]
        for level in self.counts:
            result.append(range(first, first + sum(level)))
            first += sum(level)
        return tuple(result)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The parent of each node; the root's is -1."""
        result = [-1]
        for nodes, level in zip(self.levels, self.counts, strict=False):
            result.extend(node for node, count in zip(nodes, level, strict=False) for _ in range(count))
        return tuple(result)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The place of each node among its siblings; the root's is 0."""
        return (0, *(rank for level in self.counts for count in level for rank in range(count)))


def _are_counts(value: object) -> bool:
    """Tell whether a value is a tuple of tuples of integers."""
    levels = cast(tuple[object, ...], value) if isinstance(value, tuple) else (None,)
    return all(isinstance(level, tuple) and all(map(is_whole, cast(tuple[object, ...], level))) for level in levels)


class Level(NamedTuple):
    """The nodes of one depth, in node order, padded with -1, and the most children that one of them has."""

    nodes: Int[Tensor, "b f"]
    width: int


@dataclass(frozen=True, eq=False)
class Topology:
    """Who descends from whom in a batch of trees, with the views that masks and verifiers need.

    Args:
        parents: the parent of each node; -1 for the root, which is node 0; always smaller than the node itself.
    """

    parents: Int[Tensor, "b n"]

    @property
    def on_host(self) -> "Topology":
        """The same trees on the host, where sizes are counted; a device is waited for once."""
        return self if self.parents.device.type == "cpu" else self._host

    @cached_property
    def _host(self) -> "Topology":
        return Topology(self.parents.cpu())

    def on(self, device: torch.device) -> "Topology":
        """Return the same trees on a device; those of a shape that many trees have are sent once."""
        if device in (self.parents.device, torch.device("cpu")):
            return self.on_host if device.type == "cpu" else self
        known: WeakValueDictionary[torch.device, Topology] = vars(self).setdefault("_there", WeakValueDictionary())
        there = known.get(device)
        if there is None:
            there = known[device] = Topology(sent(self.parents, device))
            vars(there)["_host"] = self
        return there

    @cached_property
    def ancestors(self) -> Bool[Tensor, "b n n"]:
        """Entry [b, i, j] tells whether node j is node i or one of its ancestors."""
        if self.on_host is not self:
            return sent(self.on_host.ancestors, self.parents.device)
        size = self.parents.shape[-1]
        result = torch.eye(size, dtype=torch.bool, device=self.parents.device).repeat(self.parents.shape[0], 1, 1)
        rows = torch.arange(self.parents.shape[0], device=self.parents.device)
        for node in range(1, size):
            result[:, node] |= result[rows, self.parents[:, node]]
        return result

    @cached_property
    def depth(self) -> Int[Tensor, "b n"]:
        """The number of drafts on the path from the root to each node."""
        return self.ancestors.sum(dim=-1) - 1

    @cached_property
    def rank(self) -> Int[Tensor, "b n"]:
        """The place of each node among its siblings, in node order; 0 for the root."""
        same = self.parents.unsqueeze(-1) == self.parents.unsqueeze(-2)
        return same.tril(diagonal=-1).sum(dim=-1)

    @cached_property
    def children(self) -> Int[Tensor, "b n k"]:
        """The children of each node in drafting order, padded with -1."""
        batch, size = self.parents.shape
        most = max(1, int(self.on_host.rank.max()) + 1)
        result = self.parents.new_full((batch, size + 1, most), -1)
        rows = torch.arange(batch, device=self.parents.device).unsqueeze(-1)
        nodes = torch.arange(size, device=self.parents.device).expand(batch, size)
        result[rows, self.parents, self.rank] = nodes  # the root's parent, -1, is the extra last row
        return result[:, :size]

    @property
    def width(self) -> int:
        """The most children of a node; 1 where no node has any."""
        return self.children.shape[-1]

    def of_children(self, values: Shaped[Tensor, "b n"], absent: int) -> Shaped[Tensor, "b n k"]:
        """Return what belongs to each node's children, in drafting order; `absent` where there is none."""
        padded = torch.nn.functional.pad(values, (0, 1), value=absent)
        return padded.gather(-1, self._places).view_as(self.children)

    @cached_property
    def _places(self) -> Int[Tensor, "b m"]:
        """The children as places in a row of n + 1 values, of which the last belongs to absent ones."""
        return self.children.where(self.children >= 0, self.children.shape[1]).flatten(1)

    @cached_property
    def inner(self) -> int:
        """How many of the first nodes contain all that have children; the nodes after them are leaves."""
        return int(self.on_host.parents.max()) + 1

    @cached_property
    def height(self) -> int:
        """The number of drafts on the longest path."""
        return int(self.on_host.depth.max())

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The nodes of each depth, the root's level first."""
        if self.on_host is not self:
            return tuple(Level(sent(nodes, self.parents.device), width) for nodes, width in self.on_host.levels)
        counts = (self.children >= 0).sum(dim=-1)
        result: list[Level] = []
        for depth in range(self.height + 1):
            there = self.depth == depth
            order = there.int().argsort(dim=-1, descending=True, stable=True)[:, : int(there.sum(dim=-1).max())]
            result.append(Level(order.where(there.gather(-1, order), -1), int((counts * there).max())))
        return tuple(result)

    @cached_property
    def post_order(self) -> Int[Tensor, "b n"]:
        """The place of each node when children come before their parent and siblings in drafting order."""
        sizes = self.ancestors.sum(dim=-2)
        siblings = self.parents.unsqueeze(-1) == self.parents.unsqueeze(-2)
        passed = (siblings.tril(diagonal=-1) * sizes.unsqueeze(-2)).sum(dim=-1)  # nodes below earlier siblings
        return (self.ancestors * passed.unsqueeze(-2)).sum(dim=-1) + sizes - 1


@lru_cache(maxsize=256)
def topology(shape: TreeShape, batch: int, device: torch.device) -> Topology:
    """Return the topology of `batch` trees of one shape; equal shapes share it, so its views are computed once."""
    if device.type != "cpu":
        return topology(shape, batch, torch.device("cpu")).on(device)
    return Topology(torch.tensor(shape.parents).repeat(batch, 1))


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

    @property
    def on_host(self) -> "TokenTree":
        """The same trees on the host; a device is waited for once."""
        return self if self.tokens.device.type == "cpu" else self._host

    @cached_property
    def _host(self) -> "TokenTree":
        return TokenTree(self.tokens.cpu(), self.topology.on_host, self.valid.cpu())

    def on(self, device: torch.device) -> "TokenTree":
        """Return the same trees on a device."""
        if device.type == "cpu" or self.tokens.device == device:
            return self.on_host if device.type == "cpu" else self
        there = TokenTree(sent(self.tokens, device), self.topology.on(device), sent(self.valid, device))
        vars(there)["_host"] = self.on_host
        return there

    def copied(self) -> "TokenTree":
        """Return trees in memory of their own; topologies are shared by all trees of a shape."""
        return TokenTree(self.tokens.clone(), Topology(self.parents.clone()), self.valid.clone())

    @classmethod
    def root_only(cls, root: Int[Tensor, "b"]) -> "TokenTree":
        """Return trees without drafts: one decoding step without speculation."""
        tokens = root.unsqueeze(-1)
        return cls(tokens, topology(ROOT_ONLY, len(root), root.device), torch.ones_like(tokens, dtype=torch.bool))


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
            drawn; None if unknown. A verifier may choose its rule by this bound and by `planned`. It must not choose by
            the tree itself, whose shape may follow from what was drawn.
        planned: the shape fixed likewise, of which the tree is the first levels; None if there was none.
        failure: the error that ended growth early, after drafts were drawn, which are verified all the same; or None.
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
    planned: TreeShape | None = None
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

    @property
    def on_host(self) -> "Draft":
        """The same on the host, but for what is scored beside the tree; a device is waited for once."""
        return self if self.atoms.device.type == "cpu" else self._host

    @cached_property
    def _host(self) -> "Draft":
        return self._moved(self.tree.on_host)

    def forget_host(self) -> None:
        """Forget what was known on the host, after somebody may have written to the draft, whatever its parts are."""
        for one in (self, self.tree, getattr(self.tree, "topology", None)):
            getattr(one, "__dict__", {}).pop("_host", None)

    def on(self, device: torch.device) -> "Draft":
        """Return the same on a device, but for what is scored beside the tree."""
        if device.type == "cpu" or self.atoms.device == device:
            return self.on_host if device.type == "cpu" else self
        there = self._moved(self.tree.on(device))
        vars(there)["_host"] = self.on_host
        return there

    def _moved(self, tree: TokenTree) -> "Draft":
        device = tree.tokens.device
        return replace(
            self,
            tree=tree,
            atoms=sent(self.atoms, device),
            shortlist=sent(self.shortlist, device),
            probs=sent(self.probs, device),
            scored=None if self.scored is None else sent(self.scored, device),
            sound=None if self.sound is None else sent(self.sound, device),
        )

    def as_whole(self) -> "Draft":
        """Return the same draft, of which is known that its lists are all of the target's tokens in their order."""
        whole = replace(self, whole=True)
        vars(whole).update({"_host": replace(self.on_host, whole=True)} if self.on_host is not self else {})
        return whole

    def copied(self) -> "Draft":
        """Return a draft in memory of its own."""
        own = {name: getattr(self, name).clone() for name in ("atoms", "shortlist", "probs")}
        return replace(self, tree=self.tree.copied(), **own)

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

    def on(self, device: torch.device) -> "Verdict":
        """Return the same on a device."""
        if self.length.device == device:
            return self
        there = Verdict(sent(self.path, device), sent(self.length, device), sent(self.next_token, device))
        vars(there)["kept"] = self.kept
        return there

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


def tree_mask(ancestors: Bool[Tensor, "b f n"], lengths: Int[Tensor, "b"], slots: int) -> Bool[Tensor, "b f m"]:
    """Let each node see the row's committed tokens and its own ancestors, and nothing else.

    Key slots 0 to lengths[b] - 1 hold row b's committed tokens; slot lengths[b] + j holds tree node j.

    Args:
        ancestors: which of the first n nodes each of the f scored nodes descends from, itself included.
        lengths: committed tokens per row.
        slots: the number of key slots m; at least max(lengths) + n.
    """
    batch, frontier, size = ancestors.shape
    if batch == 1:
        length = int(lengths[0])
        seen = torch.nn.functional.pad(ancestors, (length, 0), value=True)
        spare = slots - length - size
        return torch.nn.functional.pad(seen, (0, spare), value=False) if spare else seen
    node = torch.arange(slots, device=lengths.device) - lengths.unsqueeze(-1)
    inside = ((node >= 0) & (node < size)).unsqueeze(1)
    place = node.clamp(0, size - 1).unsqueeze(1).expand(batch, frontier, slots)
    return (ancestors.gather(-1, place) & inside) | (node < 0).unsqueeze(1)


def causal_mask(lengths: Int[Tensor, "b"], width: int, first: int = 0) -> Bool[Tensor, "b t m"]:
    """Let each prompt token from `first` to `width` see itself and those before; none sees slots past a row's length.

    Rows are right-padded; a padding token sees the row's tokens, and in an empty row
    the first slot, so that its attention is defined.
    """
    order = torch.arange(width, device=lengths.device)
    causal = order.unsqueeze(0) <= order[first:].unsqueeze(1)
    inside = order < lengths.clamp_min(1).unsqueeze(-1)
    return causal.unsqueeze(0) & inside.unsqueeze(1)
