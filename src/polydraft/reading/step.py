"""One step of decoding, with all that it found out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.models import Layer
from polydraft.reading.scored import Features, Scored
from polydraft.reading.text import Text
from polydraft.trees import TokenTree, Topology, Verdict


@dataclass(frozen=True, eq=False)
class Step:
    """What a step drafted, scored and kept; drafters and policies learn from it.

    Args:
        text: the committed text that was drafted for.
        tree: the tree as it was scored; a drafter's nodes have the numbers that it gave them.
        scored: what the target said of it.
        probs: the target's law at every node.
        verdict: what was kept.
        whole: what was kept of all drafts, where `verdict` counts those of one drafter alone; None if it is the same.
        others: the rows in which another drafter's drafts took the place of this one's.
    """

    text: Text
    tree: TokenTree
    scored: Scored
    probs: Float[Tensor, "b n V"]
    verdict: Verdict
    whole: Verdict | None = None
    others: frozenset[int] = frozenset()

    def of(self, rows: Sequence[int]) -> "Step":
        """Return the step of some rows, in their order; -1 is a row in which nothing was drafted."""
        own = torch.tensor(list(rows), device=self.tree.tokens.device).clamp_min(0)
        tree = TokenTree(self.tree.tokens[own], Topology(self.tree.parents[own]), self.tree.valid[own])
        whole = None if self.whole is None else _of_rows(self.whole, rows)
        kept = _of_rows(self.verdict, rows)
        others = frozenset(place for place, row in enumerate(rows) if row in self.others)
        return Step(self.text.of(rows), tree, self.scored.of(rows), self.probs[own], kept, whole, others)

    def only(self, rows: Collection[int]) -> "Step":
        """Return the step as it is for a drafter whose drafts counted in these rows alone: elsewhere none was kept.

        The features are still those of all tokens.
        """
        others = self.others | frozenset(row for row in range(len(self.text.counts)) if row not in rows)
        return replace(self, verdict=self.verdict.only(rows), whole=self.whole or self.verdict, others=others)

    @property
    def features(self) -> Features:
        """Hidden states of all tokens that are read with this step: unread ones, the root, and the accepted nodes."""
        path = (self.whole or self.verdict).path
        nodes = torch.nn.functional.pad(path, (1, 0), value=0)
        roots = self.text.lengths.unsqueeze(-1) - 1
        order = torch.arange(nodes.shape[-1], device=path.device)
        places = (roots + order).where(nodes >= 0, -1)
        states: dict[Layer, Tensor] = {
            layer: found.gather(1, nodes.clamp_min(0).unsqueeze(-1).expand(-1, -1, found.shape[-1]))
            for layer, found in self.scored.nodes.items()
        }
        before = self.scored.read
        if before is None:
            return Features(places, states)
        joined: dict[Layer, Tensor] = {
            layer: torch.cat([before.states[layer], found], dim=1) for layer, found in states.items()
        }
        return Features(torch.cat([before.places, places], dim=1), joined)


def _of_rows(verdict: Verdict, rows: Sequence[int]) -> Verdict:
    """Return what was kept of some rows; of -1 nothing."""
    there = [place for place, row in enumerate(rows) if row >= 0]
    own = verdict.of([max(row, 0) for row in rows])
    return own if len(there) == len(rows) else own.only(there)
