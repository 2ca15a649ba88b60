"""SPIRe's draft: some of the target's layers, trained on, over few keys and with what the target made of the past.

With the embedding e of a token and the target's state f behind its last norm of the token before it:

    x = e + W f;   x = layer_j(x) for all j;   f' = norm x;   rows = the target's head of f'

The layers begin as some of the target's (pruned initialisation), and W as zero: so a new head is the target without its
other layers. A token looks at the first tokens of the text and at the newest ones alone (attention sinks and window).
Below the root f' takes the place of the f that is not known yet (feedback memory).

Slot s of the cache holds token s; the first token of a text stands beside zeros. Only the keys that are seen are read,
so that a draft costs the same behind any text.

Source: Neelam et al., arXiv 2504.06419 (SPIRe). No code is published, and its abstract names neither the layers nor the
window: every third layer, 4 sinks and 60 tokens are this package's choice, and so are how the past is read, and which
loss there is.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor, arange, nn

from polydraft.drafters.heads.eagle_head import PairHead
from polydraft.drafters.heads.sublayers import Anatomy, HeadCache, Norm, Seen
from polydraft.drafters.heads.sublayers import Layer as DecoderLayer
from polydraft.errors import InvalidParameter, is_whole, shown

SINKS, WINDOW = 4, 60
"""How many first tokens and how many newest ones, a token itself among them, it looks at."""


class SpireHead(PairHead):
    """SPIRe's draft.

    Args:
        anatomy: sizes of its layers, as wide as the target.
        layers: how many.
        sinks: how many first tokens every token sees, one at least.
        window: how many newest tokens it sees, itself among them; None for all.
        feedback: whether it reads the target's states of the past.

    Raises:
        InvalidParameter: no layer, no sink, or an empty window.
    """

    name = "spire"
    title = "A SPIRe head"
    opens = 0

    def __init__(
        self, anatomy: Anatomy, layers: int, sinks: int = SINKS, window: int | None = WINDOW, *, feedback: bool = True
    ) -> None:
        super().__init__(anatomy.width, layers, ("final",), anatomy.width)
        for name, value in (("sinks", sinks), ("window", window)):
            if value is not None and (not is_whole(value) or value < 1):
                raise InvalidParameter(f"{name} must be a whole number of at least 1, but is {shown(value)}.")
        self.anatomy, self.sinks, self.window = anatomy, sinks, window
        self.layers = nn.ModuleList(DecoderLayer(anatomy) for _ in range(layers))
        self.norm = Norm(anatomy.width, anatomy.eps)
        self.feedback = nn.Linear(anatomy.width, anatomy.width, bias=False) if feedback else None
        if self.feedback is not None:
            nn.init.zeros_(self.feedback.weight)

    def new_cache(self, rows: int, capacity: int, like: Tensor) -> HeadCache:
        """Return an empty cache for its layers; arguments as for `PairHead`."""
        return HeadCache.new(self.anatomy, self.depth, rows, capacity, like)

    def forward(self, embedded, hidden, places, seen, mask):
        """Return the states f' of tokens; arguments as for `PairHead`."""
        states = embedded if self.feedback is None else embedded + self.feedback(hidden)
        turn = self.anatomy.turn(places, states.dtype)
        for layer, keys in zip(self.layers, seen, strict=True):
            states = layer(states, turn, keys, mask)
        return self.norm(states)

    def before_output(self, states, depth=0):
        """Return the states, which are behind their norm."""
        return states

    def sees(self, places: Int[Tensor, "*b n"], slots: Int[Tensor, " m"]) -> Bool[Tensor, "*b n m"]:
        """Tell which committed tokens a token sees: the first ones, and those that are near."""
        earlier = super().sees(places, slots)
        if self.window is None:
            return earlier
        return earlier & ((slots < self.sinks) | (places.unsqueeze(-1) - slots < self.window))

    def passed(self, memory, embedded, hidden, slots, places, mask, frontier=None):
        """Return what the head makes of tokens, over the keys that they see; drafted ancestors are always seen."""
        order = arange(mask.shape[-1], device=mask.device)
        near, count = self.sees(places, order), slots.shape[1]
        if frontier is not None:
            near, count = near | (order > (places - frontier.depth).unsqueeze(-1)), frontier.nodes.stop
        mask, chosen = self._chosen(slots[:, -1:] + 1, count, mask & near)
        writers = [memory.cache.writer(layer, slots, len(order)) for layer in range(self.depth)]
        return self(embedded.to(hidden), hidden, places, [chosen(one) for one in writers], mask)

    def _chosen(
        self, stops: Int[Tensor, "b 1"], count: int, mask: Bool[Tensor, "b n m"]
    ) -> tuple[Bool[Tensor, "b n k"], Callable[[Seen], Seen]]:
        """Return the mask of the slots that are read, and what chooses their keys and values.

        Args:
            stops: the slot behind the last that is written, of each row.
            count: how many slots before that the tokens may stand in.
        """
        wide = self.sinks + count + (self.window or mask.shape[-1])
        if wide >= mask.shape[-1]:
            return mask, lambda seen: seen
        slots = stops + arange(self.sinks - wide, 0, device=mask.device)
        first = arange(self.sinks, device=mask.device).expand(len(slots), -1)
        there = torch.cat([first >= 0, slots >= self.sinks], dim=1)  # a sink that is near stands once
        slots = torch.cat([first, slots.clamp_min(0)], dim=1)
        rows = arange(len(slots), device=mask.device).unsqueeze(-1)

        def chosen(seen: Seen) -> Seen:
            def few(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
                keys, values = seen(keys, values)
                return keys[rows, :, slots].transpose(1, 2), values[rows, :, slots].transpose(1, 2)

            return few

        return mask.gather(2, slots.unsqueeze(1).expand(-1, mask.shape[1], -1)) & there.unsqueeze(1), chosen
