"""Heads that read one state of the target: its last, at the token before the root."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.heads.drafter import HeadNetwork
from polydraft.reading import Features, Text
from polydraft.rows import per_row


@dataclass(frozen=True, eq=False)
class LastStates:
    """What a head reads next.

    Args:
        hidden: per row, the target's last hidden state at the last token that was read.
        place: that token's place in the text; -1 if nothing is known of the row.
    """

    hidden: Float[Tensor, "b d"] = per_row()
    place: Int[Tensor, "b"] = per_row(lambda place, length: place.where(place < length, -1))

    def before_root(self, text: Text) -> Float[Tensor, "b 1 d"]:
        """Return the state of the token before each root; zeros where it is not known, as in a text of one token."""
        current = (self.place == text.lengths - 2).unsqueeze(-1)
        return self.hidden.where(current, 0.0).unsqueeze(1)


class LastStateHead(HeadNetwork):
    """A head that reads the target's last hidden state of one token, that before the root."""

    reads = ("final",)

    def memory(self, rows: int, capacity: int, like: Tensor) -> LastStates:
        """Return states of which nothing is known, in the target's precision."""
        return LastStates(like.new_zeros(rows, self.target_width), torch.full((rows,), -1, device=like.device))

    def remember(self, memory: LastStates, features: Features, counts: Sequence[int]) -> LastStates:
        """Take the state of each row's last token among these, where it is not behind the one that is known."""
        place, column = features.places.max(dim=-1)
        states = features.states["final"]
        found = states.gather(1, column.view(-1, 1, 1).expand(-1, 1, states.shape[-1])).squeeze(1)
        newer = (place >= 0) & (place >= memory.place)
        hidden = found.where(newer.unsqueeze(-1), memory.hidden.to(found))
        return replace(memory, hidden=hidden, place=place.where(newer, memory.place))
