"""Heads that read a token and a hidden state at a time: EAGLE-1 and EAGLE-3.

The pair (t_{i+1}, f_i), a token and what the target made of the token before it, stands at position i. A head makes of
it a hidden state h'_{i+1}, of which the rows for t_{i+2} follow, and which takes the place of the target's own state in
the next pair of a drafted path.

    EAGLE-1:  x = fc [e; f];   x <- x + attn(x);   x <- x + mlp(norm x);   h' = x, as if behind the target's last norm
    EAGLE-3:  h = fc [h_1; ...; h_k], or a recycled h';   g = hidden_norm h
              x = h + attn [input_layernorm e; g];   h' = x + mlp(norm x);   rows = lm_head(norm h')

Drafting takes one short pass per depth, over the nodes of that depth. Slot s of the cache holds the pair of token s and
the target's state of the token before it; its position is s - 1. The root's pair, like all committed ones, is made of
the target's own states, and a drafted node's of what the head itself made of the node above. So keys of drafted nodes
are never kept: a step's features bring the target's own states, and the next draft begins with one pass over the pairs
that came since. A text of one token has no pair. It is drafted for from its token beside a state of zeros, in slot 0,
which no longer text sees.

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858, the same heads), EAGLE-3 (2503.01840), SafeAILab/EAGLE; the
variants of EAGLE-3.1 from vllm-project/speculators and sgl-project/SpecForge.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.drafters.contract import Defaults
from polydraft.drafters.heads.drafter import BoundEnds, HeadNetwork, TreePass, joined_states, of_parents, with_nodes
from polydraft.drafters.heads.sublayers import Anatomy, Attention, Gated, HeadCache, Norm, Seen, Turn
from polydraft.drafters.heads.sublayers import Layer as DecoderLayer
from polydraft.errors import InvalidParameter
from polydraft.models import Layer
from polydraft.probs import SamplingParams, sent
from polydraft.reading import Features, Text
from polydraft.rows import counts, parts, slots
from polydraft.schemes import IID, TopK
from polydraft.trees import BestFirst, Chain, Frontier, tree_mask

AT_ONCE = 512
"""How many pairs of a row are read in one pass; a longer one takes more memory for its mask and brings no more."""
CHAIN = Chain(5)
"""What is drafted above temperature 0."""
TREE = BestFirst(25)
"""What is drafted at temperature 0: as many nodes as EAGLE-1's own tree has."""


@dataclass(frozen=True, eq=False)
class PairMemory:
    """What a head keeps of each row.

    Args:
        cache: its keys, by slots.
        states: what enters a pair, by the place of the token that the target made it of; one place more for padding.
        given: per row, of how many tokens the target's states have come.
        done: per row, how many pairs of such states are in the cache, from slot 1.
    """

    cache: HeadCache = parts()
    states: Float[Tensor, "b m d"] = slots()
    given: tuple[int, ...] = counts()
    done: tuple[int, ...] = counts(lag=1)


class PairHead(HeadNetwork):
    """What all heads that read a token and a hidden state at a time are for decoding and training.

    Args:
        width: its hidden width.
        layers: how many keep keys.
        reads: which of the target's hidden states it reads, joined in this order.
        target_width: the width of these.

    Attributes:
        kept: how many states enter a pair and are kept of each token, joined: the target's is the first.
        block: from how many pairs, the last of the text, the first pass drafts; they see each other.
        ahead: from how many slots behind them it drafts as well.
        opens: the first slot of a text that is read: 1, since its first token has no state before it, unless such a
            token stands beside zeros.
    """

    passes = None
    kept = 1
    block, ahead = 1, 0
    opens = 1

    def __init__(self, width: int, layers: int, reads: tuple[Layer, ...], target_width: int) -> None:
        super().__init__()
        if layers < 1 or not reads:
            raise InvalidParameter("A head has at least one layer and reads at least one hidden state.")
        self.width, self.depth, self.reads, self.target_width = width, layers, reads, target_width

    @abstractmethod
    def new_cache(self, rows: int, capacity: int, like: Tensor) -> HeadCache:
        """Return an empty cache with `capacity` slots a row, on the device and in the precision of `like`."""

    def fused(self, features: Float[Tensor, "b n r"]) -> Float[Tensor, "b n d"]:
        """Return what enters a pair, made of the target's own hidden states, joined: the states as they are."""
        return features

    @abstractmethod
    def forward(
        self,
        embedded: Float[Tensor, "b n d"],
        hidden: Float[Tensor, "b n d"],
        places: Int[Tensor, "b n"],
        seen: Sequence[Seen],
        mask: Bool[Tensor, "b n m"],
    ) -> Float[Tensor, "b n d"]:
        """Return the hidden states of pairs.

        Args:
            hidden: what `fused` or `recycled` gave of the token before.
            seen: per layer, gives all keys and values, given the pairs' own.
        """

    def recycled(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Return what enters the pairs behind these, made of the head's own hidden states: the states as they are."""
        return states

    def masked(
        self, tokens: Int[Tensor, "b n"], hidden: Float[Tensor, "b n d"], blank: Bool[Tensor, "b n"]
    ) -> tuple[Int[Tensor, "b n"], Float[Tensor, "b n d"]]:
        """Return pairs with what stands in the slots behind the root's, where `blank`: here there are none."""
        return tokens, hidden

    @abstractmethod
    def before_output(self, states: Float[Tensor, "b n d"], depth: int = 0) -> Float[Tensor, "b n d"]:
        """Return what goes to the output head, for the rows of nodes of a depth."""

    def sees(self, places: Int[Tensor, "*b n"], slots: Int[Tensor, " m"]) -> Bool[Tensor, "*b n m"]:
        """Tell which committed tokens' slots the token in a place sees: those up to its own."""
        return slots <= places.unsqueeze(-1)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft the likeliest paths at temperature 0, and a drawn chain above it."""
        return Defaults(IID(), CHAIN) if params.temperature else Defaults(TopK(), TREE)

    def memory(self, rows: int, capacity: int, like: Tensor) -> PairMemory:
        """Return an empty cache, and room for the target's states."""
        own, none = next(self.parameters()), (0,) * rows
        states = own.new_zeros(rows, capacity + 1, self.width * self.kept)
        return PairMemory(self.new_cache(rows, capacity, own), states, none, none)

    def remember(self, memory: PairMemory, features: Features, counts: Sequence[int]) -> PairMemory:
        """Put hidden states of the target in their places."""
        fused = self.fused(joined_states(features, self.reads).to(next(self.parameters())))
        last = memory.states.shape[1] - 1
        rows = torch.arange(len(fused), device=fused.device).unsqueeze(-1)
        places = features.places.where(features.places >= 0, last)
        memory.states[rows, places, : self.width] = fused.to(memory.states.dtype)
        return replace(memory, given=tuple(counts))

    def catch_up(self, memory: PairMemory, text: Text, ends: BoundEnds) -> PairMemory:
        """Make pairs of what was read."""
        return self.root(memory, text, ends)[1]

    def root(self, memory: PairMemory, text: Text, ends: BoundEnds) -> tuple[TreePass, PairMemory]:
        """Read all pairs that are not in the cache, and grow from the last."""
        made, after = self.first_pass(memory, text, ends)
        return PairPass(self, after, text, ends, made), after

    def first_pass(self, memory: PairMemory, text: Text, ends: BoundEnds) -> tuple[Float[Tensor, "b k d"], PairMemory]:
        """Read all pairs of the target's own states that are not in the cache, and the last in any case.

        Returns:
            what it made of the last `block` pairs and of the slots `ahead`, and what it keeps.
        """
        counts, device, drafting = text.counts, memory.states.device, self.block + self.ahead
        first = [
            min(done + 1 if done else self.opens, count - self.block)
            for done, count in zip(memory.done, counts, strict=True)
        ]
        width = self.ahead + max(count - start for count, start in zip(counts, first, strict=True))
        starts, known, roots = _sent(first, device), _sent(memory.given, device), text.lengths.unsqueeze(-1) - 1
        found, size = memory.states[:, :0], max(AT_ONCE, drafting)
        for end in range((width - 1) % size + 1, width + 1, size):  # so that the last pass has all that drafts
            columns = torch.arange(max(end - size, 0), end, device=device)
            slots = roots + 1 + self.ahead - width + columns
            slots = slots.where(slots >= starts, -1)
            before = (slots - 1).clamp(0, memory.states.shape[1] - 1).unsqueeze(-1)
            before = before.expand(-1, -1, memory.states.shape[-1])
            there = (slots >= 1) & (slots <= known)
            hidden = memory.states.gather(1, before).where(there.unsqueeze(-1), 0)
            tokens = text.tokens.gather(1, slots.clamp(0, text.tokens.shape[1] - 1)).where(slots >= 0, 0)
            tokens, hidden = self.masked(tokens, hidden, slots > roots)
            order = torch.arange(max(counts) + self.ahead - width + end, device=device)
            limits = slots.where(slots <= roots - self.block, slots.maximum(roots)).clamp_min(0)
            mask = order <= limits.unsqueeze(-1)
            mask = mask & visible(text, order, self.block) if self.opens else mask
            mask |= (slots < 1).unsqueeze(-1) & (order == 0)  # padding looks at something
            found = self.passed(memory, ends.embed(tokens), hidden, slots, slots, mask)
        after = replace(memory, done=tuple(max(count - 1, 0) for count in counts))
        return found[:, -drafting:], after

    def passed(
        self,
        memory: PairMemory,
        embedded: Float[Tensor, "b n d"],
        hidden: Float[Tensor, "b n d"],
        slots: Int[Tensor, "b n"],
        places: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n m"],
        frontier: Frontier | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Return what the head makes of pairs, whose keys go into their slots.

        Args:
            slots: the pairs' slots; -1 for padding.
            places: their tokens' places in the text.
            frontier: the drafted nodes that the pairs are of; None for committed tokens.
        """
        seen = [memory.cache.writer(layer, slots, mask.shape[-1]) for layer in range(self.depth)]
        return self(embedded.to(hidden), hidden, places - 1, seen, mask)


class EagleHead(PairHead):
    """What both kinds of EAGLE's heads are.

    Args:
        anatomy: sizes of its layers.
        layers: how many; each keeps keys.
        reads: which of the target's hidden states it reads, joined in this order.
        target_width: the width of these.
    """

    name = "eagle"
    title = "An EAGLE head"

    def __init__(self, anatomy: Anatomy, layers: int, reads: tuple[Layer, ...], target_width: int) -> None:
        super().__init__(anatomy.width, layers, reads, target_width)
        self.anatomy = anatomy

    def new_cache(self, rows: int, capacity: int, like: Tensor) -> HeadCache:
        """Return an empty cache for its layers; arguments as for `PairHead`."""
        return HeadCache.new(self.anatomy, self.depth, rows, capacity, like)


@dataclass(eq=False)
class PairPass:
    """What a head made of all nodes that were proposed for, in their order; the root's first."""

    head: PairHead
    memory: PairMemory
    text: Text
    ends: BoundEnds
    made: Float[Tensor, "b n d"]
    overlap = None

    def logits(self, frontier: Frontier) -> Float[Tensor, "b f V"]:
        """Return the logits of one depth's nodes."""
        if frontier.depth:
            self.made = with_nodes(self.made, frontier, self._passed(frontier))
        return self.ends.output(self.head.before_output(self.states(frontier), frontier.depth))

    def states(self, frontier: Frontier) -> Float[Tensor, "b f d"]:
        """Return what the nodes' rows follow from."""
        return self.made[:, frontier.nodes.start :]

    def _passed(self, frontier: Frontier) -> Float[Tensor, "b f d"]:
        """Run the head over the nodes, each beside what it made of the node above."""
        above = of_parents(self.made, frontier)
        roots, stop = self.text.lengths - 1, max(self.text.counts) - 1 + frontier.nodes.stop
        slots = roots.unsqueeze(-1) + torch.arange(frontier.nodes.start, frontier.nodes.stop, device=roots.device)
        places = (roots + frontier.depth).unsqueeze(-1).expand_as(slots)
        mask = tree_mask(frontier.ancestors, roots, stop)
        if self.head.opens:
            mask = mask & visible(self.text, torch.arange(stop, device=roots.device))
        embedded, hidden = self.ends.embed(frontier.tokens), self.head.recycled(above)
        return self.head.passed(self.memory, embedded, hidden, slots, places, mask, frontier)


def visible(text: Text, slots: Int[Tensor, " m"], block: int = 1) -> Bool[Tensor, "b 1 m"]:
    """Tell which slots may be seen at all: the first only in texts that have no block of pairs."""
    return ((slots > 0) | (text.lengths <= block).unsqueeze(-1)).unsqueeze(1)


def _sent(numbers: Sequence[int], device: torch.device) -> Int[Tensor, "b 1"]:
    return sent(torch.tensor(list(numbers)), device).unsqueeze(-1)


class Eagle1Head(EagleHead):
    """EAGLE-1's head, which EAGLE-2 and HASS use as well: it foretells the state behind the target's last norm.

    Args:
        anatomy: sizes of its layers, as wide as the target.
        layers: how many; the first has no norm before its attention, unless `normed`.
        bias: whether the projection of pairs has one.
        normed: whether there are norms behind the embedding, before the attention and before the output head as well
            (the variant with layer norms of vllm-project/speculators).
    """

    def __init__(self, anatomy: Anatomy, layers: int = 1, *, bias: bool = True, normed: bool = False) -> None:
        super().__init__(anatomy, layers, ("final",), anatomy.width)
        self.normed = normed
        self.fc = nn.Linear(2 * anatomy.width, anatomy.width, bias=bias)
        self.layers = nn.ModuleList(DecoderLayer(anatomy, normed=normed or place > 0) for place in range(layers))
        self.embed_layernorm = Norm(anatomy.width, anatomy.eps) if normed else nn.Identity()
        self.lm_head_layernorm = Norm(anatomy.width, anatomy.eps) if normed else nn.Identity()

    def forward(self, embedded, hidden, places, seen, mask):
        """Return the foretold states of the next tokens; arguments as for `PairHead`."""
        states = self.fc(torch.cat([self.embed_layernorm(embedded), hidden], dim=-1))
        turn = self.anatomy.turn(places, states.dtype)
        for layer, keys in zip(self.layers, seen, strict=True):
            states = layer(states, turn, keys, mask)
        return states

    def before_output(self, states, depth=0):
        """Return the foretold states, which need no norm."""
        return self.lm_head_layernorm(states)


@dataclass(frozen=True)
class Eagle3Norms:
    """Where heads of EAGLE-3's kind differ.

    Args:
        residual: whether the residual is the state behind `hidden_norm`, not before it (`norm_before_residual`).
        output: whether the state behind the last norm is recycled, not the one before it (`norm_output`).
        joined: whether the joined hidden states are normed together (`norm_before_fc`).
        sources: whether each of them is normed by itself (`fc_norm`).
        rows: whether output rows follow from the state behind the last norm; not so in some heads of SpecForge's.

    Raises:
        InvalidParameter: the state behind the last norm is recycled, and no row follows from it.
    """

    residual: bool = False
    output: bool = False
    joined: bool = False
    sources: bool = False
    rows: bool = True

    def __post_init__(self) -> None:
        if self.output and not self.rows:
            raise InvalidParameter("No head recycles normed states and drafts from others: output goes with rows.")


class PairLayer(nn.Module):
    """EAGLE-3's layer: attention reads the normed embedding beside the normed state, and adds to the state alone.

    Args:
        after: whether the residual is the normed state.
    """

    def __init__(self, anatomy: Anatomy, *, after: bool) -> None:
        super().__init__()
        self.after = after
        self.input_layernorm = Norm(anatomy.width, anatomy.eps)
        self.hidden_norm = Norm(anatomy.width, anatomy.eps)
        self.self_attn = Attention(anatomy, 2 * anatomy.width)
        self.post_attention_layernorm = Norm(anatomy.width, anatomy.eps)
        self.mlp = Gated(anatomy)

    def forward(
        self,
        embedded: Float[Tensor, "b n d"],
        hidden: Float[Tensor, "b n d"],
        turn: Turn,
        seen: Seen,
        mask: Bool[Tensor, "b n m"],
    ) -> Float[Tensor, "b n d"]:
        """Return the layer's output; arguments as for `PairHead` and `Attention`."""
        normed = self.hidden_norm(hidden)
        pairs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        states = (normed if self.after else hidden) + self.self_attn(pairs, turn, seen, mask)
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Head(EagleHead):
    """EAGLE-3's head, with the variants of EAGLE-3.1.

    Args:
        anatomy: sizes of its layers.
        reads: which of the target's hidden states it reads: outputs of so many layers, joined in this order; or
            "final" alone, which enters as it is.
        target_width: the width of these.
        norms: where norms are.
        layers: how many; those behind the first are ordinary ones.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        reads: tuple[Layer, ...],
        target_width: int,
        norms: Eagle3Norms = Eagle3Norms(),
        layers: int = 1,
    ) -> None:
        super().__init__(anatomy, layers, reads, target_width)
        self.norms = norms
        projects = reads != ("final",)
        self.fc = nn.Linear(len(reads) * target_width, anatomy.width, bias=False) if projects else nn.Identity()
        self.midlayer = PairLayer(anatomy, after=norms.residual)
        self.layers = nn.ModuleList(DecoderLayer(anatomy) for _ in range(layers - 1))
        self.norm = Norm(anatomy.width, anatomy.eps)
        self.input_norm = Norm(len(reads) * target_width, anatomy.eps) if norms.joined else nn.Identity()
        sources = len(reads) if norms.sources else 0
        self.fc_norm = nn.ModuleList(Norm(target_width, anatomy.eps) for _ in range(sources))

    def fused(self, features):
        """Return the target's hidden states, projected to one."""
        features = self.input_norm(features)
        if self.norms.sources:
            parts = features.split(self.target_width, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(self, embedded, hidden, places, seen, mask):
        """Return the hidden states of pairs; arguments as for `PairHead`."""
        turn = self.anatomy.turn(places, hidden.dtype)
        states = self.midlayer(embedded, hidden, turn, seen[0], mask)
        for layer, keys in zip(self.layers, seen[1:], strict=True):
            states = cast(DecoderLayer, layer)(states, turn, keys, mask)
        return states

    def recycled(self, states):
        """Return the states as they came out of the last layer, or behind the last norm."""
        return self.norm(states) if self.norms.output else states

    def before_output(self, states, depth=0):
        """Return the states behind the last norm, or as they are."""
        return self.norm(states) if self.norms.rows else states
