"""Falcon: pairs of a token and a feature, of which a pass over the last k makes the next k features.

    pair i:  x_i = LSTM [e(token i+1); f_i];   x <- x + attn(x);   x <- x + mlp(norm x);   f_{i+k} = x_i

The k pairs of a block see each other and all before them. So the last k pairs of a text give the rows of its next k
tokens, each of which knows the text and none of the others; tokens that were drafted from them stand beside these
features in the k pairs of the next block. A draft of depth d takes d / k passes. Every node at whose depth a block ends
has k pairs of its own, since the pairs of one path may not see another; their keys live as long as the draft.

The authors' module is an LSTM that is handed its texts on the wrong axis, so that every pair begins with a state of
zeros: a gated network for each pair alone. Heads that are theirs are read so; `recurs` is this package's word for an
LSTM that goes on along the path. The authors cut blocks at multiples of k from where a pass begins, so that a pair sees
more or less by where it stands. Here the last k pairs are the block, and pairs that have left it see none behind
themselves: what is drafted is a function of the text alone. A text without k pairs has pairs of a zero state instead.

Source: Falcon (arXiv 2412.12639), Bestpay-inc/Falcon (`models/cnets.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from polydraft.drafters.heads.drafter import BoundEnds, TreePass, of_parents, with_nodes
from polydraft.drafters.heads.eagle_head import EagleHead, PairMemory, PairPass, visible
from polydraft.drafters.heads.sublayers import Anatomy, Layer, Seen
from polydraft.errors import InvalidParameter
from polydraft.reading import Text
from polydraft.rows import slots
from polydraft.trees import Frontier

GATES = 2
"""Layers of the LSTM."""
States = list[tuple[Tensor, ...]]
"""The LSTM's hidden state and cell, by layers."""
Parts = tuple[Float[Tensor, "b n d"], Float[Tensor, "b n s"]]


@dataclass(frozen=True, eq=False)
class FalconMemory(PairMemory):
    """What a head keeps of each row.

    Args:
        carried: the LSTM's state behind the pair in each slot; empty where it does not recur.
    """

    carried: Float[Tensor, "b m s"] = slots()


class FalconHead(EagleHead):
    """Falcon's head.

    Args:
        anatomy: sizes of its layers, as wide as the target.
        block: k, how many features a pass makes.
        layers: how many; the first has no norm before its attention.
        bias: whether the LSTM has biases.
        recurs: whether the LSTM goes on from pair to pair.

    Raises:
        InvalidParameter: a block without a pair.
    """

    name = "falcon"
    title = "A Falcon head"

    def __init__(
        self, anatomy: Anatomy, block: int = 2, layers: int = 1, *, bias: bool = True, recurs: bool = False
    ) -> None:
        super().__init__(anatomy, layers, ("final",), anatomy.width)
        if block < 1:
            raise InvalidParameter(f"A pass of Falcon's reads at least one pair, not {block}.")
        width = anatomy.width
        self.block, self.recurs, self.carries = block, recurs, 2 * GATES * width * recurs
        self.lstm = nn.LSTM(2 * width, width, GATES, bias=bias, dropout=0.1)  # its weights alone are used
        self.layers = nn.ModuleList(Layer(anatomy, normed=place > 0) for place in range(layers))

    def gated(self, pairs: Float[Tensor, "b n e"], before: Float[Tensor, "b s"]) -> Parts:
        """Return what the LSTM makes of pairs that follow each other, and its state behind each of them.

        Args:
            before: its state before the first; empty where it does not recur.
        """
        if not self.recurs:
            none = pairs.new_zeros(self.width)
            return self._stepped(pairs, [(none, none)] * GATES)[0], pairs[..., :0]
        state: States = [layer.unbind(1) for layer in before.unflatten(-1, (GATES, 2, -1)).unbind(1)]
        made, after = list[Tensor](), list[Tensor]()
        for pair in pairs.unbind(1):
            found, state = self._stepped(pair, state)
            made.append(found)
            after.append(torch.cat([one for layer in state for one in layer], -1))
        return torch.stack(made, 1), torch.stack(after, 1)

    def _stepped(self, read: Tensor, state: States) -> tuple[Tensor, States]:
        """Return what the LSTM makes of one pair, or of pairs that do not know each other, and its state behind it."""
        after: States = []
        for (hidden, cell), (inner, outer, *biases) in zip(state, self.lstm.all_weights, strict=True):
            read = nn.functional.dropout(read, self.lstm.dropout, self.training) if after else read
            gates = linear(read, inner, *biases[:1]) + linear(hidden, outer, *biases[1:])
            taken, kept, new, shown = gates.chunk(4, -1)
            cell = kept.sigmoid() * cell + taken.sigmoid() * new.tanh()
            read = shown.sigmoid() * cell.tanh()
            after.append((read, cell))
        return read, after

    def layered(
        self,
        states: Float[Tensor, "b n d"],
        places: Int[Tensor, "b n"],
        seen: Sequence[Seen],
        mask: Bool[Tensor, "b n m"],
    ) -> Float[Tensor, "b n d"]:
        """Return the features that follow from what the LSTM made; arguments as for `EagleHead`."""
        turn = self.anatomy.turn(places, states.dtype)
        for layer, keys in zip(self.layers, seen, strict=True):
            states = layer(states, turn, keys, mask)
        return states

    def forward(self, embedded, hidden, places, seen, mask):
        """Return the features of pairs that are all of their texts; arguments as for `EagleHead`."""
        made, _ = self.gated(torch.cat([embedded, hidden], -1), hidden.new_zeros(len(hidden), self.carries))
        return self.layered(made, places, seen, mask)

    def before_output(self, states, depth=0):
        """Return the features, which need no norm."""
        return states

    def memory(self, rows: int, capacity: int, like: Tensor) -> FalconMemory:
        """Return an empty cache, and room for the target's states and for the LSTM's."""
        made = super().memory(rows, capacity, like)
        carried = made.states.new_zeros(rows, capacity + 1, self.carries)
        return FalconMemory(made.cache, made.states, made.given, made.done, carried)

    def root(self, memory: PairMemory, text: Text, ends: BoundEnds) -> tuple[TreePass, FalconMemory]:
        """Read what came since and the last k pairs, which are read anew until they have left the block."""
        made, read = self.first_pass(memory, text, ends)
        settled = tuple(max(count - 1 - self.block, 0) for count in text.counts)
        after = cast(FalconMemory, replace(read, done=settled))
        last = after.carried.gather(1, (text.lengths - 1).view(-1, 1, 1).expand(-1, 1, self.carries))
        none = text.last().unsqueeze(-1).unsqueeze(-1)
        return FalconPass(self, after, text, ends, made.flatten(1).unsqueeze(1), last, none), after

    def passed(self, memory, embedded, hidden, slots, places, mask, frontier=None):
        """Return the features of pairs, whose keys and states go into their slots; arguments as for `EagleHead`."""
        if not self.recurs:
            return super().passed(memory, embedded, hidden, slots, places, mask, frontier)
        pairs, made = torch.cat([embedded.to(hidden), hidden], -1), list[Tensor]()
        rows, carried = torch.arange(len(pairs), device=pairs.device), cast(FalconMemory, memory).carried
        for column, slot in enumerate(slots.unbind(1)):
            before = carried[rows, (slot - 1).clamp_min(0)].where((slot > 1).unsqueeze(-1), 0)
            found, after = self.gated(pairs[:, column : column + 1], before)
            carried[rows, slot.where(slot >= 1, -1)] = after[:, 0].to(carried.dtype)
            made.append(found)
        seen = [memory.cache.writer(layer, slots, mask.shape[-1]) for layer in range(self.depth)]
        return self.layered(torch.cat(made, 1), places - 1, seen, mask)


@dataclass(eq=False)
class FalconPass(PairPass):
    """What a head made of all nodes that were proposed for: the k features of the block that each is in, joined.

    Args:
        carried: the LSTM's state behind that block's pairs.
        tokens: the nodes' own.
        begun: the nodes with pairs of their own, pass by pass.
        kept: the keys and values of these pairs, by layers.
    """

    carried: Float[Tensor, "b n s"]
    tokens: Int[Tensor, "b n 1"]
    begun: list[range] = field(default_factory=list)
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def logits(self, frontier: Frontier) -> Float[Tensor, "b f V"]:
        """Return the logits of one depth's nodes: of a block's j-th depth, those of its j-th feature."""
        place = frontier.depth % self.head.block
        if frontier.depth:
            self.tokens = with_nodes(self.tokens, frontier, frontier.tokens.unsqueeze(-1))
            above = of_parents(self.made, frontier), of_parents(self.carried, frontier)
            made, carried = above if place else self._block(frontier, *above)
            self.made, self.carried = with_nodes(self.made, frontier, made), with_nodes(self.carried, frontier, carried)
        features = self.made[:, frontier.nodes.start :].unflatten(-1, (self.head.block, -1))
        return self.ends.output(self.head.before_output(features[:, :, place]))

    def _block(self, frontier: Frontier, above: Float[Tensor, "b f e"], carried: Float[Tensor, "b f s"]) -> Parts:
        """Run the head over k pairs for each node: the last k tokens of its path, beside the features they came of."""
        head, roots, block, shape = cast(FalconHead, self.head), self.text.lengths - 1, self.head.block, above.shape[:2]
        order = torch.arange(1, frontier.ancestors.shape[-1] + 1, device=roots.device)
        path = (frontier.ancestors * order).topk(block).values.flip(-1).flatten(1) - 1
        embedded = self.ends.embed(self.tokens[..., 0].gather(1, path.clamp_min(0)))
        hidden = above.unflatten(-1, (block, -1)).flatten(1, 2)
        pairs = torch.cat([embedded.to(hidden), hidden], -1).unflatten(1, (-1, block)).flatten(0, 1)
        made, after = head.gated(pairs, carried.flatten(0, 1))
        self.begun.append(frontier.nodes)
        stop, own = max(self.text.counts), [frontier.ancestors[..., one.start : one.stop] for one in self.begun]
        known = torch.arange(stop, device=roots.device)
        text = (known <= roots.view(-1, 1, 1)) & visible(self.text, known, block)
        mask = torch.cat([text.expand(-1, shape[1], -1), torch.cat(own, -1).repeat_interleave(block, -1)], -1)
        inside = torch.arange(1 - block, 1, device=roots.device).repeat(shape[1])
        places = roots.unsqueeze(-1) + frontier.depth + inside
        seen = [self._seen(layer, stop) for layer in range(head.depth)]
        states = head.layered(made.view(len(above), -1, head.width), places - 1, seen, mask.repeat_interleave(block, 1))
        return states.view(*shape, -1), after[:, -1].view(*shape, -1)

    def _seen(self, layer: int, stop: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return what keeps the keys of a pass behind those of the passes before, and shows the text's before them."""

        def seen(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            before = self.kept.get(layer, (keys[:, :, :0], values[:, :, :0]))
            self.kept[layer] = torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
            text = self.memory.cache.keys[layer, :, :, :stop], self.memory.cache.values[layer, :, :, :stop]
            both = [torch.cat([one.to(keys), two], 2) for one, two in zip(text, self.kept[layer], strict=True)]
            return both[0], both[1]

        return seen
