"""Multi-token prediction (MTP): modules that target checkpoints bring along, each a layer of the target's own kind.

The pair (t_{p+1}, s_p), a token and the state of the token before it, stands at place p, as in EAGLE's heads:

    x = P [N_e e(t_{p+1}); N_h s_p];   y = block(x), causal over places, with keys of its own;   s'_p = N_o y

The target's output head makes the row for t_{p+2} of s'_p. Some families join the hidden state first. Module 1 reads
the target's state behind its final norm; module m + 1 reads s' of module m (not y) and the next token, and foretells
one token more. So the row of a node at depth d is that of module d + 1, whose pairs stand at every token of the text
and of the node's path. Below the last module the modules are taken in turn again, each node in one of them.

Some engines hand on y, or let module 1 read the state before the final norm. No checkpoint says which it learnt, so
both can be asked for (`raw`, `reads`).

Of several modules each keeps keys of its own, by the slots of the pairs' tokens. All keys that are kept are made of the
target's own states and of committed tokens; those of drafted nodes are made again after every step, as a part of the
next one. So nothing must be dropped after a partial acceptance.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2), FastMTP (2509.18362), vllm-project/vllm, huggingface/transformers
(`MtpModel`). vLLM zeroes the embedding of the first pair; transformers and this package do not.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.drafters.heads.drafter import BoundEnds, TreePass
from polydraft.drafters.heads.eagle_head import PairHead, PairMemory, PairPass
from polydraft.drafters.heads.sublayers import Anatomy, HeadCache, Norm, Seen
from polydraft.drafters.heads.sublayers import Layer as DecoderLayer
from polydraft.models import Layer as TargetState
from polydraft.reading import Text
from polydraft.trees import Frontier, tree_mask

KeyShape = tuple[int, int]
"""How many keys or values a token has, and how wide they are."""


class PlainBlock(DecoderLayer):
    """A layer of Llama's or Qwen's, which turns its own positions."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  places in the room of their rotation
        self, states: Float[Tensor, "b n d"], places: Int[Tensor, "b n"], seen: Seen, mask: Bool[Tensor, "b #n m"]
    ) -> Float[Tensor, "b n d"]:
        """Return the layer's output.

        Args:
            places: the tokens' positions.
            seen: gives all keys and values, given the tokens' own.
            mask: True where a token may look at a key.
        """
        return super().forward(states, self.self_attn.anatomy.turn(places, states.dtype), seen, mask)


class MtpModule(nn.Module):
    """One module.

    Args:
        width: of the target.
        block: its layer.
        norm: makes a norm.
        hidden_first: whether the hidden state is joined before the embedding.
        raw: whether y is handed on, not s'.
    """

    def __init__(
        self,
        width: int,
        block: nn.Module,
        norm: Callable[[], nn.Module],
        *,
        hidden_first: bool = False,
        raw: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_first, self.raw = hidden_first, raw
        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = block

    def forward(
        self,
        embedded: Float[Tensor, "b n d"],
        hidden: Float[Tensor, "b n d"],
        places: Int[Tensor, "b n"],
        seen: Seen,
        mask: Bool[Tensor, "b n m"],
    ) -> Float[Tensor, "b n d"]:
        """Return the states of pairs that are handed on, s' or y; arguments as for `PairHead`."""
        pairs = [self.enorm(embedded), self.hnorm(hidden)]
        joined = self.eh_proj(torch.cat(pairs[::-1] if self.hidden_first else pairs, dim=-1))
        made = self.block(joined, places, seen, mask)
        return made if self.raw else self.norm(made)

    def before_output(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Return s' of what is handed on."""
        return self.norm(states) if self.raw else states


class MtpHead(PairHead):
    """A target's modules.

    Args:
        modules: the modules, in the order of the tokens that they foretell.
        width: of the target.
        shapes: of what each keeps of a token, keys and values.
        anatomy: sizes of its layers, where they are Llama's or Qwen's; None for layers of another kind.
        reads: the target's state that the first one reads.
    """

    name = "mtp"
    title = "An MTP head"

    def __init__(
        self,
        modules: Sequence[MtpModule],
        width: int,
        shapes: tuple[KeyShape, KeyShape],
        anatomy: Anatomy | None = None,
        reads: TargetState = "final",
    ) -> None:
        super().__init__(width, len(modules), (reads,), width)
        self.steps, self.shapes, self.anatomy = nn.ModuleList(modules), shapes, anatomy
        self.kept = len(modules)

    @classmethod
    def plain(cls, anatomy: Anatomy, modules: int = 1, **order: bool) -> "MtpHead":
        """Return a head with new weights whose layers are Llama's or Qwen's; `order` are flags of `MtpModule`."""
        own, norm = anatomy, lambda: Norm(anatomy.width, anatomy.eps)
        made = [MtpModule(own.width, PlainBlock(own), norm, **order) for _ in range(modules)]
        shape = own.groups, own.channels
        return cls(made, own.width, (shape, shape), own)

    def new_cache(self, rows: int, capacity: int, like: Tensor) -> HeadCache:
        """Return an empty cache, a layer for each module; arguments as for `PairHead`."""
        shapes = ((self.depth, rows, groups, capacity + 1, channels) for groups, channels in self.shapes)
        return HeadCache(*(like.new_zeros(shape) for shape in shapes))

    def forward(self, embedded, hidden, places, seen, mask):
        """Return the first module's states; arguments as for `PairHead`."""
        return self.steps[0](embedded, hidden, places, seen[0], mask)

    def before_output(self, states, depth=0):
        """Return the states behind the norm of the module that the rows are of."""
        return cast(MtpModule, self.steps[self.step_of(depth)]).before_output(states)

    def root(self, memory: PairMemory, text: Text, ends: BoundEnds) -> tuple[TreePass, PairMemory]:
        """Read all pairs of the target's own states that are not in the cache, by every module."""
        made, after = self.first_pass(memory, text, ends)
        return MtpPass(self, after, text, ends, made), after

    def passed(
        self,
        memory: PairMemory,
        embedded: Float[Tensor, "b n d"],
        hidden: Float[Tensor, "b n s"],
        slots: Int[Tensor, "b n"],
        places: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n m"],
        frontier: Frontier | None = None,
    ) -> Float[Tensor, "b n s"]:
        """Return the states of all modules, joined; zeros for those that do not run at this depth."""
        before, made = hidden.split(self.width, dim=-1), [torch.zeros_like(hidden[..., : self.width])] * self.depth
        for step in self._running(0 if frontier is None else frontier.depth):
            if frontier is not None:
                given = before[step - 1]  # of the module before, or, below the last module, of the last one
            elif step:
                given = self._kept(memory, slots, made[step - 1], step)
            else:
                given = before[0]
            seen = memory.cache.writer(step, slots, mask.shape[-1])
            looks = self._looks(step, slots, mask, frontier)
            made[step] = self.steps[step](embedded.to(hidden), given, places - 1, seen, looks)
        return torch.cat(made, dim=-1)

    def step_of(self, depth: int) -> int:
        """Return which module the row of a node at some depth is of, counted from 0."""
        return depth % self.depth

    def _running(self, depth: int) -> range:
        """Return the modules that read a node: those whose rows follow from it, at its depth and deeper."""
        first = self.step_of(depth)
        return range(first, self.depth if depth < self.depth else first + 1)

    def _kept(
        self, memory: PairMemory, slots: Int[Tensor, "b n"], made: Float[Tensor, "b n d"], step: int
    ) -> Float[Tensor, "b n d"]:
        """Keep a module's states by their slots, and return what the next module reads: those of the slots before."""
        own = slice(step * self.width, (step + 1) * self.width)
        rows = torch.arange(len(slots), device=slots.device).unsqueeze(-1)
        memory.states[rows, slots.where(slots >= 0, memory.states.shape[1] - 1), own] = made
        return memory.states[rows, (slots - 1).clamp_min(0), own]

    def _looks(
        self, step: int, slots: Int[Tensor, "b n"], mask: Bool[Tensor, "b n m"], frontier: Frontier | None
    ) -> Bool[Tensor, "b n m"]:
        """Return which pairs of a module may be seen: its first is that of token `step` + 1, or `step` of one token's.

        Below the last module a node sees those of the nodes above that this module read. What sees no pair sees its
        own.
        """
        if not step and (frontier is None or frontier.depth < self.depth or self.depth == 1):
            return mask
        order = torch.arange(mask.shape[-1], device=mask.device)
        if frontier is not None and frontier.depth >= self.depth:
            depths = frontier.ancestors.cumsum(-1) - 1
            read = (depths < self.depth) & (depths <= step) | (depths % self.depth == step)
            roots = slots[:, 0] - frontier.nodes.start
            mask = mask & tree_mask(frontier.ancestors & read, roots, mask.shape[-1])
        if step:
            mask = mask & ((order > step) | (order == step) & mask[..., :1])
        return mask | ~mask.any(-1, keepdim=True) & (order == slots.clamp_min(0).unsqueeze(-1))


class MtpPass(PairPass):
    """What the modules made of all nodes that were proposed for."""

    def states(self, frontier: Frontier) -> Float[Tensor, "b f d"]:
        """Return the states of the module that the nodes' rows are of."""
        head = cast(MtpHead, self.head)
        first = head.step_of(frontier.depth) * head.width
        return super().states(frontier)[..., first : first + head.width]
