"""Tokens that a grammar forces: scored beside the drafts, and written without a pass of their own.

Where a grammar allows one token alone, the target's law after masking gives it the probability 1. So what follows from
there is known before anything is drafted: a stretch of forced tokens hangs below each node of the tree behind which it
comes, with numbers behind those of the drafts. The verifier sees the drafts alone, and does what it did without them.
If the token that it emits is the first of a stretch, the text goes on along the stretch, as far as the scored rows say
that each next token is certain, and the token behind it is what the verifier emits at a leaf.

Why that is exact: let y be the text up to the node where the verifier's path ends, and f1 ... fk the stretch. The
verifier emits f1 with the target's probability, which is 1; the target's law gives f2 ... fk behind it the probability
1; and the token behind fk is drawn from the target's row there, by random numbers that nothing else has used. So every
token has the target's law given those before it, for every rule, tree and drafter, and for none. What a stretch is
follows from the text and the drafts above it, and adds no sibling to any draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.engine.loop.batch import Batch, Method
from polydraft.engine.loop.drafting import RowVerdict
from polydraft.engine.target_law import TargetLaw
from polydraft.probs import Noise, sent
from polydraft.trees import Draft, Piece, TokenTree, Topology, Verdict

MOST_FORCED = 16
"""The most forced tokens of a row that are scored in a step: a pass over more tokens takes longer. A batch whose rows
may have grammars has so many key slots more, so that what is hung in a row does not depend on its neighbours."""


@dataclass(frozen=True, eq=False)
class Forced:
    """A tree with what is forced behind its nodes.

    Args:
        tree: the drafts, then the forced tokens.
        first: the number of the first forced token's node.
        below: per row, by node, the numbers of the forced tokens' nodes that follow it.
    """

    tree: TokenTree
    first: int
    below: tuple[dict[int, tuple[int, ...]], ...]

    def own(self, verdict: Verdict) -> Verdict:
        """Return what was kept of the drafts alone: the path as far as it goes through them."""
        path = verdict.path.where(verdict.path < self.first, -1)
        length, more = (path >= 0).sum(dim=-1), torch.nn.functional.pad(verdict.path, (0, 1), value=-1)
        behind = more.gather(1, length.unsqueeze(-1)).clamp_min(0)
        tokens = self.tree.tokens.to(path.device).gather(1, behind).squeeze(-1)
        return Verdict(path, length, tokens.where(verdict.length > length, verdict.next_token))

    def told(self, verdict: Verdict, told: Sequence[RowVerdict]) -> list[RowVerdict]:
        """Return what is told of a verdict, with the counts of the drafts alone, and how many tokens are forced."""
        found, host = list[RowVerdict](), self.tree.on(torch.device("cpu"))
        for row, (one, nodes) in enumerate(zip(told, verdict.path.tolist(), strict=True)):
            own = [node for node in nodes[: one.kept] if node < self.first]
            there, parents = (part[row, : self.first] for part in (host.valid, host.parents))
            deeper = bool((there & (parents == [0, *own][len(own)])).any())
            drafted, more = int(there.sum()) - 1, one.kept - len(own)
            found.append(RowVerdict(one.usable, len(own), drafted, deeper, one.tokens, more))
        return found


def forced_behind(tree: TokenTree, batch: Batch, beside: int) -> Forced | None:
    """Return a tree with what the rows' grammars force behind its nodes; None where that is nothing.

    Args:
        tree: the drafts of all rows.
        batch: the rows.
        beside: how many tokens are scored beside the tree.
    """
    model, width = batch.reader.model, tree.tokens.shape[1]
    single = getattr(model, "of_one_shape", False) or getattr(model, "crowded", None) is not None
    room = min(MOST_FORCED, batch.text.tokens.shape[1] - max(batch.text.counts) + 1 - width - beside)
    if room < 1 or single or not (model.facts.branches or width == 1):
        return None
    found = [_stretches(tree, batch, row, room) if row in batch.going else {} for row in range(len(batch))]
    most = max(sum(map(len, one.values())) for one in found)
    return _hung(tree, found, most) if most else None


def _stretches(tree: TokenTree, batch: Batch, row: int, room: int) -> dict[int, list[int]]:
    """Return the forced tokens behind the nodes of a row; those of the root first, as far as there is room."""
    mask, counts = _mask_of(batch.laws[row]), batch.text.counts
    if mask is None or row in batch.last:
        return {}
    padding = batch.laws[row].padding
    begin = mask.begin - (0 if padding is None else len(padding))
    if counts[row] < begin:
        return {}
    text: np.ndarray = batch.text.tokens[row, begin : counts[row]].to("cpu", torch.int64).numpy()
    host = tree.on(torch.device("cpu"))
    parents, tokens, there = (one[row].tolist() for one in (host.parents, host.tokens, host.valid))
    paths, found = [text.tobytes()], dict[int, list[int]]()
    drafted = {(parent, token) for parent, token, own in zip(parents, tokens, there, strict=True) if own}
    room = min(room, batch.endings[row].max_length - counts[row])
    for node, own in enumerate(there):
        paths += [paths[parents[node]] + np.int64(tokens[node]).tobytes()] if node else []
        stretch = mask.forced(paths[node], room) if own and room else []
        if stretch and (node, stretch[0]) not in drafted:
            found[node], room = stretch, room - len(stretch)
    return found


def _mask_of(law: TargetLaw) -> Any:
    """Return what knows the forced tokens of a row; None where nothing does, or a processor is asked once a token."""
    if any(getattr(one, "serial", False) for one in law.processors):
        return None
    calls = [getattr(one, "call", None) for one in law.processors]
    return next((one for one in calls if getattr(one, "forced", None) is not None), None)


def _hung(tree: TokenTree, found: Sequence[dict[int, list[int]]], most: int) -> Forced:
    rows, first = tree.tokens.shape
    tokens, valid = torch.zeros(rows, most, dtype=torch.int64), torch.zeros(rows, most, dtype=torch.bool)
    parents, below = (first - 1 + torch.arange(most)).repeat(rows, 1), list[dict[int, tuple[int, ...]]]()
    for row, stretches in enumerate(found):
        own, at = dict[int, tuple[int, ...]](), 0
        for node, stretch in stretches.items():
            stop = at + len(stretch)
            own[node] = tuple(range(first + at, first + stop))
            tokens[row, at:stop], valid[row, at:stop] = torch.tensor(stretch), True
            parents[row, at] = node
            at = stop
        below.append(own)
    device = tree.tokens.device
    joined = TokenTree(
        torch.cat([tree.tokens, sent(tokens, device)], dim=1),
        Topology(torch.cat([tree.topology.parents, sent(parents, tree.topology.parents.device)], dim=1)),
        torch.cat([tree.valid, sent(valid, device)], dim=1),
    )
    return Forced(joined, first, tuple(below))


def followed(
    forced: Forced,
    verdict: Verdict,
    drafts: Sequence[tuple[Method, Piece]],
    rows: Sequence[Float[Tensor, "b n V"]],
    batch: Batch,
    noise: Noise,
) -> Verdict:
    """Return the verdict that goes on along what is forced.

    Args:
        forced: the tree.
        verdict: what was kept of the drafts, and the tokens behind it.
        drafts: the drafts, each with the method whose they are.
        rows: for each of them, the target's rows as its rule reads them.
        batch: the rows.
        noise: the step's random numbers.
    """
    path, kept = verdict.path.tolist(), verdict.kept
    ends = [[0, *own][length] for own, length in zip(path, kept, strict=True)]
    after, more = verdict.next_token.clone(), dict[int, list[int]]()
    for (method, piece), probs in zip(drafts, rows, strict=True):
        places = dict[int, list[int]]()
        for row in batch.going.intersection(piece.rows):
            stretch = forced.below[row].get(ends[row], ())
            if stretch and int(forced.tree.tokens[row, stretch[0]]) == int(verdict.next_token[row]):
                places[row] = _certain(forced.tree, probs, row, stretch)
        if not places:
            continue
        own, nodes = [*places], [one[-1] for one in places.values()]
        roots = forced.tree.tokens[own, nodes].to(probs.device)
        bare = Draft.nothing(roots, apart=method.verifier.scheme.several_rows)
        further = noise.of(own).further([kept[row] + len(places[row]) for row in own])
        emitted = method.verifier.verify(bare, probs[own, nodes].unsqueeze(1), further).next_token
        after[own] = emitted.to(after.device)
        more |= places
    if not more:
        return verdict
    found = [[*own[:length], *more.get(row, ())] for row, (own, length) in enumerate(zip(path, kept, strict=True))]
    width = max(map(len, found))
    padded = torch.tensor([[*own, *[-1] * (width - len(own))] for own in found])
    lengths = torch.tensor([*map(len, found)])
    device = verdict.path.device
    return Verdict(padded.to(device), lengths.to(device), after)


def _certain(tree: TokenTree, probs: Float[Tensor, "b n V"], row: int, stretch: tuple[int, ...]) -> list[int]:
    """Return the nodes of a stretch up to the first whose successor the target does not hold for certain."""
    found = [stretch[0]]
    for above, node in pairwise(stretch):
        if probs[row, above, tree.tokens[row, node]] < 1:
            break
        found.append(node)
    return found
