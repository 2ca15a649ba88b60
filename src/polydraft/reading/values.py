"""What goes into passes and comes out of them: texts, scored nodes, hidden states, and what a step found out."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.models import Layer, Queries
from polydraft.trees import TokenTree, Topology, Verdict


@dataclass(frozen=True, eq=False)
class Text:
    """The committed tokens of a batch: right-padded rows and their lengths.

    Args:
        tokens: token ids; anything beyond a row's length.
        lengths: committed tokens per row, at least 1.
    """

    tokens: Int[Tensor, "b t"]
    lengths: Int[Tensor, "b"]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The lengths as numbers, read back once."""
        return tuple(self.lengths.tolist())

    @property
    def before_last(self) -> list[int]:
        """The numbers of tokens before the last ones."""
        return [count - 1 for count in self.counts]

    @cached_property
    def roots(self) -> Int[Tensor, "b"]:
        """The places of the last tokens; one row's on the host, where it is asked for."""
        return torch.tensor([self.counts[0] - 1]) if len(self.counts) == 1 else self.lengths - 1

    def last(self, back: int = 1) -> Int[Tensor, "b"]:
        """Return the last committed token of each row, or the one `back` places from the end (the first at least)."""
        place = (self.lengths - back).clamp_min(0).unsqueeze(-1)
        return self.tokens.gather(-1, place).squeeze(-1)

    def copied(self) -> "Text":
        """Return the text in memory of its own, for somebody who may write to it."""
        return Text(self.tokens.clone(), self.lengths.clone())

    def of(self, rows: Sequence[int]) -> "Text":
        """Return the text of some rows; of -1 a text of one token, which is any."""
        own = torch.tensor(list(rows), device=self.tokens.device)
        lengths = self.lengths[own.clamp_min(0)].where(own >= 0, 1)
        return Text(self.tokens[own.clamp_min(0)], lengths)


@dataclass(frozen=True, eq=False)
class Features:
    """Hidden states of committed tokens.

    Args:
        places: each token's place in its row's text, from 0; -1 at padding.
        states: by layer, the hidden states: the output of so many layers (0 is the embedding), or "final", behind the
            last norm.
        queries: those of the last of these tokens; None where nobody asked for them, or the model does not tell.
    """

    places: Int[Tensor, "b w"]
    states: Mapping[Layer, Float[Tensor, "b w d"]]
    queries: Queries | None = None

    def of(self, rows: Sequence[int]) -> "Features":
        """Return those of some rows; of -1 none."""
        own = torch.tensor(list(rows), device=self.places.device)
        places = self.places[own.clamp_min(0)].where((own >= 0).unsqueeze(-1), -1)
        states: dict[Layer, Tensor] = {layer: found[own.clamp_min(0)] for layer, found in self.states.items()}
        return Features(places, states, self.queries and self.queries[own.clamp_min(0)])


@dataclass(frozen=True, eq=False)
class Scored:
    """One pass over what was unread of a text, the nodes of a tree, and riders.

    Args:
        logits: at the nodes, the root first.
        riders: at the riders; None if there are none.
        nodes: hidden states at the nodes, by layer, for the layers that somebody reads.
        riding: likewise at the riders.
        read: hidden states of the committed tokens before the root that were read in the same pass; None if the root
            alone was unread.
        queries: those at the nodes, if somebody reads them.
    """

    logits: Float[Tensor, "b n V"]
    riders: Float[Tensor, "b r V"] | None
    nodes: Mapping[Layer, Float[Tensor, "b n d"]]
    riding: Mapping[Layer, Float[Tensor, "b r d"]]
    read: Features | None = None
    queries: Queries | None = None

    def of(self, rows: Sequence[int]) -> "Scored":
        """Return what was said of some rows; of -1 anything."""
        own = torch.tensor(list(rows), device=self.logits.device).clamp_min(0)
        return Scored(
            self.logits[own],
            None if self.riders is None else self.riders[own],
            {layer: states[own] for layer, states in self.nodes.items()},
            {layer: states[own] for layer, states in self.riding.items()},
            None if self.read is None else self.read.of(rows),
            self.queries and self.queries[own],
        )

    def with_riders(self, count: int) -> "Scored":
        """Return the same for a drafter that brought so many riders, where others may have brought more."""
        if self.riders is None or self.riders.shape[1] == count:
            return self
        riding = {layer: states[:, :count] for layer, states in self.riding.items()}
        return replace(self, riders=self.riders[:, :count] if count else None, riding=riding)


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
        before, queries = self.scored.read, self.scored.queries
        queries = queries and queries[torch.arange(len(nodes), device=nodes.device).unsqueeze(-1), nodes.clamp_min(0)]
        if before is None:
            return Features(places, states, queries)
        joined: dict[Layer, Tensor] = {
            layer: torch.cat([before.states[layer], found], dim=1) for layer, found in states.items()
        }
        if queries is not None and before.queries is not None:
            queries = replace(queries, states=torch.cat([before.queries.states, queries.states], dim=1))
        return Features(torch.cat([before.places, places], dim=1), joined, queries)


def _of_rows(verdict: Verdict, rows: Sequence[int]) -> Verdict:
    """Return what was kept of some rows; of -1 nothing."""
    there = [place for place, row in enumerate(rows) if row >= 0]
    own = verdict.of([max(row, 0) for row in rows])
    return own if len(there) == len(rows) else own.only(there)
