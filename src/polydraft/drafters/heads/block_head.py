"""The block head: a few layers that read the target's hidden states and fill a block of slots in one pass (DFlash).

Its query is the embedding of the last committed token, the anchor, at position a, then B - 1 mask tokens. Keys and
values are those of the context, positions 0 to a - 1, made of the target's hidden states by the same projections, and
the block's own. So the head's cache holds accepted context only, and nothing is ever taken back.

    ctx = hidden_norm(fc [h_1; ...; h_L]);   x <- x + attn(norm x, ctx);   x <- x + mlp(norm x);   h = norm x

Source: DFlash (z-lab/dflash), DSpark (deepseek-ai/DeepSpec), JetSpec (hao-ai-lab/JetSpec), Domino (SpecForge), DFlash2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.drafters.contract import Defaults
from polydraft.drafters.heads.drafter import BoundEnds, HeadEnds, HeadNetwork, joined_states, of_parents, with_nodes
from polydraft.drafters.heads.last_state_heads import LastStates
from polydraft.drafters.heads.paths import FilledBlock, PathTerm, Place
from polydraft.drafters.heads.sublayers import Anatomy, GemmaLayer, HeadCache, Layer, Norm, Seen
from polydraft.errors import InvalidParameter, VocabularyMismatch
from polydraft.models import LanguageModel
from polydraft.models import Layer as TargetLayer
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Text
from polydraft.rows import parts
from polydraft.schemes import IID, TopK
from polydraft.trees import BestFirst, Chain, Frontier, Overlap


@dataclass(frozen=True)
class BlockShape:
    """What a block head is, but for its weights and its path term.

    Args:
        anatomy: sizes of its layers.
        layers: how many.
        reads: which of the target's hidden states it reads, joined in this order.
        target_width: the width of these.
        block: slots B, the anchor's included.
        mask_id: the token whose embedding fills the slots behind the anchor; None for an embedding of the head's own.
        shifted: whether slot i predicts position a + 1 + i, so that all slots draft; else a + i, and the anchor's does
            not.
        causal: per layer, whether a slot sees only slots up to its own.
        windows: per layer, how many positions a slot looks back; None for all.
        taps: how many slots the convolutions around sublayers join; 0 for none (DFlash2).
        group: channels that share a dynamic kernel.
        gemma: whether its layers are Gemma 4's; else Qwen 3's.
        own_values: of Gemma's layers: whether values have a projection of their own.

    Raises:
        InvalidParameter: a block without a draft, settings for another number of layers, or convolutions in Gemma's.
    """

    anatomy: Anatomy
    layers: int
    reads: tuple[TargetLayer, ...]
    target_width: int
    block: int
    mask_id: int | None
    shifted: bool = True
    causal: tuple[bool, ...] = ()
    windows: tuple[int | None, ...] = ()
    taps: int = 0
    group: int = 16
    gemma: bool = False
    own_values: bool = True

    def __post_init__(self) -> None:
        if self.drafts < 1:
            raise InvalidParameter(f"A block of {self.block} slots has no draft.")
        if not self.reads or {len(self.causal), len(self.windows)} - {0, self.layers}:
            raise InvalidParameter(f"A block head of {self.layers} layers has settings for another number of layers.")
        if self.gemma and self.taps:
            raise InvalidParameter("Gemma's layers have no convolutions.")

    def layer(self) -> Layer:
        """Return a new layer."""
        if self.gemma:
            return GemmaLayer(self.anatomy, own_values=self.own_values)
        return ConvolvedLayer(self.anatomy, self.taps, self.group) if self.taps else Layer(self.anatomy)

    @property
    def drafts(self) -> int:
        """How many drafts a block has."""
        return self.block if self.shifted else self.block - 1


class Convolution(nn.Module):
    """DFlash2's convolution over slots: y[i] = sum_t (base[t] + dynamic[i, t, group]) x[i - t], zero before slot 0."""

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        if width % group:
            raise InvalidParameter(f"{width} channels are not groups of {group}.")
        base = torch.zeros(2, taps, width)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)
        self.taps, self.group = taps, group

    def kernels(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "2 b n t d"]:
        """Return the kernels of both sides, of the states that nothing was done to."""
        dynamic = self.kernel_projection(states).unflatten(-1, (2, self.taps, -1)).movedim(-3, 0)
        return self.base_kernel[:, None, None] + dynamic.repeat_interleave(self.group, dim=-1)

    def forward(self, states: Float[Tensor, "b n d"], kernels: Float[Tensor, "b n t d"]) -> Float[Tensor, "b n d"]:
        """Return the joined slots."""
        length = states.shape[1]
        earlier = nn.functional.pad(states, (0, 0, self.taps - 1, 0))
        shifted = [earlier[:, self.taps - 1 - tap : self.taps - 1 - tap + length] for tap in range(self.taps)]
        return (torch.stack(shifted, dim=2) * kernels).sum(2)


class ConvolvedLayer(Layer):
    """DFlash2's layer: the input and the output of both sublayers are joined over neighbouring slots."""

    def __init__(self, anatomy: Anatomy, taps: int, group: int) -> None:
        super().__init__(anatomy)
        self.attention_conv = Convolution(anatomy.width, taps, group)
        self.mlp_conv = Convolution(anatomy.width, taps, group)

    def forward(self, states, turn, seen, mask):
        """Return the layer's output; arguments as for `Attention`."""
        plain = self.input_layernorm(states)
        before, after = self.attention_conv.kernels(plain)
        found = self.self_attn(self.attention_conv(plain, before), turn, seen, mask)
        states = states + self.attention_conv(found, after)
        plain = self.post_attention_layernorm(states)
        before, after = self.mlp_conv.kernels(plain)
        return states + self.mlp_conv(self.mlp(self.mlp_conv(plain, before)), after)


@dataclass(frozen=True, eq=False)
class BlockMemory:
    """What a block head keeps of texts.

    Args:
        cache: its layers' keys and values.
        newest: the newest row of their context, where its path term reads it.
    """

    cache: HeadCache = parts()
    newest: LastStates | None = parts()


class BlockHead(HeadNetwork):
    """A block head with its path term: one pass fills all slots, and a tree of any width is drawn from them.

    The layers run once per step. A node's row is that of its depth's slot, changed by the path term for the tokens
    above the node (`paths.py`), which costs small products for each level. So the law of every path is known, and wide
    trees cost next to nothing to draft. Below the block nodes are drafted from the last slot again, which is a law like
    any other, but a poor one.

    Args:
        shape: its sizes and settings.
        path: how rows depend on the drafted path.
        confidence: width of the state that a confidence head reads beside the slot; None for no such head.
    """

    name = "block head"
    title = "A block head"

    def __init__(self, shape: BlockShape, path: PathTerm, confidence: int | None = None) -> None:
        super().__init__()
        own = shape.anatomy
        self.shape, self.path = shape, path
        self.reads, self.target_width, self.width = shape.reads, shape.target_width, own.width
        self.fc = nn.Linear(len(shape.reads) * shape.target_width, own.width, bias=False)
        self.hidden_norm = Norm(own.width, own.eps)
        self.layers = nn.ModuleList(shape.layer() for _ in range(shape.layers))
        self.norm = Norm(own.width, own.eps)
        self.mask_embed = nn.Parameter(torch.zeros(own.width)) if shape.mask_id is None else None
        self.confidence = None if confidence is None else nn.Linear(own.width + confidence, 1)

    def context(self, features: Float[Tensor, "b w r"]) -> Float[Tensor, "b w d"]:
        """Return what all layers read of committed tokens, made of the target's hidden states."""
        return self.hidden_norm(self.fc(features))

    def keys(
        self, context: Float[Tensor, "b w d"], places: Int[Tensor, "b w"]
    ) -> list[tuple[Float[Tensor, "b g w h"], Float[Tensor, "b g w h"]]]:
        """Return each layer's keys and values of committed tokens."""
        turn = self.shape.anatomy.turn(places, context.dtype)
        return [cast(Layer, layer).self_attn.keys(context, turn) for layer in self.layers]

    def query(self, anchors: Float[Tensor, "b d"], mask: Float[Tensor, " d"] | None) -> Float[Tensor, "b B d"]:
        """Return what enters the first layer: the anchors' embeddings, then the mask's; None for the head's own."""
        filled = self.mask_embed if mask is None else mask
        assert filled is not None
        rest = filled.to(anchors).expand(len(anchors), self.shape.block - 1, -1)
        return torch.cat([anchors.unsqueeze(1), rest], dim=1)

    def slots(
        self,
        query: Float[Tensor, "b n d"],
        places: Int[Tensor, "b n"],
        seen: Sequence[Seen],
        masks: Sequence[Bool[Tensor, "b #n m"]],
    ) -> Float[Tensor, "b n d"]:
        """Return the slots' hidden states behind the last norm.

        Args:
            query: what enters the first layer.
            seen: per layer, gives all keys and values, given the block's own.
        """
        turn = self.shape.anatomy.turn(places, query.dtype)
        for layer, keys, mask in zip(self.layers, seen, masks, strict=True):
            query = layer(query, turn, keys, mask)
        return self.norm(query)

    def block(
        self,
        slots: Float[Tensor, "b B d"],
        previous: Int[Tensor, "b"],
        context: Float[Tensor, "b d"] | None,
        known: Bool[Tensor, "b"] | None,
        ends: BoundEnds,
    ) -> FilledBlock:
        """Return what is known of blocks whose slots are filled; arguments as for `FilledBlock`."""
        waits = int(not self.shape.shifted)
        logits = None if self.path.mixes else ends.output(slots[:, waits:])
        return FilledBlock(slots, waits, logits, previous, context, known, ends)

    def sees(
        self, layer: int, queries: Int[Tensor, "b n"], keys: Int[Tensor, "#b m"], anchors: Int[Tensor, "b #n"]
    ) -> Bool[Tensor, "b #n m"]:
        """Tell which keys a slot may look at in a layer, by positions: the context, and its own block.

        Args:
            anchors: the position of each slot's anchor.
        """
        slot, key, anchor = queries.unsqueeze(-1), keys.unsqueeze(-2), anchors.unsqueeze(-1)
        causal = bool(self.shape.causal) and self.shape.causal[layer]
        allowed = key <= slot if causal else key < anchor + self.shape.block
        window = self.shape.windows[layer] if self.shape.windows else None
        return allowed if window is None else allowed & ((slot - key).abs() < window)

    def sure(self, hidden: Float[Tensor, "b f d"], state: Float[Tensor, "b f s"]) -> Float[Tensor, "b f"]:
        """Return the estimated overlap of nodes' rows with the target's, by the confidence head."""
        assert self.confidence is not None
        read = self.path.tell(state)[..., : self.confidence.in_features - hidden.shape[-1]]
        return torch.sigmoid(self.confidence(torch.cat([hidden, read], dim=-1)).squeeze(-1))

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft the likeliest paths at temperature 0, and a drawn chain above it (docs/performance.md)."""
        return Defaults(IID(), Chain(self.shape.drafts)) if params.temperature else Defaults(TopK(), BestFirst(8))

    def check(self, target: LanguageModel, ends: HeadEnds) -> None:
        """Check that mask and path term know all tokens of the target, and change as many rows as are drafted from."""
        path, vocab_size, mask = self.path, target.facts.vocab_size, self.shape.mask_id
        if mask is not None and mask >= vocab_size:
            raise VocabularyMismatch(
                f"The head's mask is token {mask} and the target has {vocab_size} tokens: it was trained for another "
                "target."
            )
        rows = vocab_size if ends.tokens is None else len(ends.tokens)
        rows = rows if ends.lm_head is None else ends.lm_head.out_features
        if path.known is not None and path.known < vocab_size:
            raise VocabularyMismatch(
                f"The head's path term knows {path.known} tokens and the target has {vocab_size}: it was trained for "
                "another target."
            )
        if path.rows is not None and path.rows != rows:
            raise VocabularyMismatch(
                f"The head's path term has {path.rows} rows for {rows} tokens to draft: it was trained for another "
                "target."
            )

    def memory(self, rows: int, capacity: int, like: Tensor) -> BlockMemory:
        """Return an empty cache, with room for a block behind the longest text."""
        shape, own = self.shape, self.fc.weight
        cache = HeadCache.new(shape.anatomy, shape.layers, rows, capacity + shape.block, own)
        return BlockMemory(cache, LastStates.none(rows, self.width, own) if self.path.anchored else None)

    def remember(self, memory: BlockMemory, features: Features, counts: Sequence[int]) -> BlockMemory:
        """Make keys of committed tokens, from the target's own hidden states."""
        context = self.context(joined_states(features, self.reads).to(self.fc.weight))
        for layer, (keys, values) in enumerate(self.keys(context, features.places.clamp_min(0))):
            memory.cache.write(layer, features.places, keys, values)
        newest = memory.newest
        return memory if newest is None else replace(memory, newest=newest.after(context, features.places))

    def root(self, memory: BlockMemory, text: Text, ends: BoundEnds) -> "tuple[BlockPass, BlockMemory]":
        """Fill the slots in one pass."""
        context = known = None
        if memory.newest is not None:
            context, known = memory.newest.before_root(text).squeeze(1), memory.newest.knows(text)
        block = self.block(self.filled(memory, text, ends), text.last(2), context, known, ends)
        first, made = self.path.begin(block)
        return BlockPass(self, block, first, made, first[:, :0]), memory

    def filled(self, memory: BlockMemory, text: Text, ends: BoundEnds) -> Float[Tensor, "b B d"]:
        """Return the hidden states of all slots behind each text."""
        shape, device = self.shape, text.tokens.device
        anchors = (text.lengths - 1).unsqueeze(-1)
        places = anchors + torch.arange(shape.block, device=device)
        stop = max(text.counts) - 1 + shape.block
        keys = torch.arange(stop, device=device).unsqueeze(0)
        masks = [self.sees(layer, places, keys, anchors) for layer in range(shape.layers)]
        embedded = ends.embed(text.last().unsqueeze(-1)).squeeze(1).to(self.fc.weight)
        own = shape.mask_id
        mask = None if own is None else ends.embed(torch.full((1, 1), own, device=device))[0, 0]
        writers = [memory.cache.writer(layer, places, stop) for layer in range(shape.layers)]
        return self.slots(self.query(embedded, mask), places, writers, masks)


@dataclass(eq=False)
class BlockPass:
    """The blocks of a step, what the path term made of them, and the path states of all nodes that have rows."""

    head: BlockHead
    block: FilledBlock
    first: Float[Tensor, "b 1 s"]
    made: Any
    paths: Float[Tensor, "b n s"]

    @property
    def overlap(self) -> Overlap | None:
        """What the confidence head says of the rows that were given last; None without one."""
        return None if self.head.confidence is None else self._overlap

    def logits(self, frontier: Frontier) -> Float[Tensor, "b f V"]:
        """Return the logits of one depth's nodes."""
        path, block, slot, wide = self.head.path, self.block, self._slot(frontier), frontier.tokens.shape[1]
        hidden = block.drafting[:, slot : slot + 1].expand(-1, wide, -1)
        place = Place(hidden, range(frontier.depth, frontier.depth + 1), self.made)
        embedded = block.ends.embed(frontier.tokens).to(hidden) if path.embeds else None
        above = of_parents(self.paths, frontier) if frontier.nodes.start else self.first
        states = path.read(above, frontier.tokens, embedded, place)
        self.paths = with_nodes(self.paths, frontier, states)
        if block.logits is None:
            logits = block.ends.output(path.mixed(states, place))
        else:
            logits = block.logits[:, slot : slot + 1].expand(-1, wide, -1)
        return path.corrected(logits, states, place)

    def _overlap(self, frontier: Frontier) -> Float[Tensor, "b f"]:
        slot, states = self._slot(frontier), self.paths[:, frontier.nodes.start : frontier.nodes.stop]
        return self.head.sure(self.block.drafting[:, slot : slot + 1].expand(-1, states.shape[1], -1), states)

    def _slot(self, frontier: Frontier) -> int:
        return min(frontier.depth, self.head.shape.drafts - 1)
