"""What a step shows of the chances of drafts, for those who plan the next one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.trees import Draft, Piece, Verdict
from polydraft.verifiers import TreeVerifier, traits

Tried = tuple[int, int, float, float]
"""The depth of a node, the rank of one of its drafts, the chance that this draft had, given that the node was reached
and the drafts before it were rejected (1 or 0 where only the result is known), and the weight of this."""
Judged = tuple[int, float, float]
"""The rank of a draft, the draft probability of its token, and the chance that it had, as in `Tried`."""
TELLING = 3.0
"""The weight of an overlap, beside that of one result: it differs less from node to node."""
ASIDE = 0.5
"""The weight of a chance at a node that the text did not come to: texts with a wrong token are a little harder."""


@dataclass(frozen=True)
class Lesson:
    """What a step showed of the drafts of one text.

    Args:
        source: who found the drafts in a text, such as "lookup" or "suffix"; "" for those of a model or a head.
        law: the names of processors and filters of the target's law; texts of other laws accept other drafts.
        tried: the drafts whose chance is known.
        stopped: whether the planner wanted no deeper tree when it saw what was drawn.
        judged: the same with what the drafter thought of them; none where it does not think.
        tokens: the new tokens.
        depth: the depth of the tree.
    """

    source: str
    law: tuple[str, ...]
    tried: tuple[Tried, ...]
    tokens: int
    depth: int
    judged: tuple[Judged, ...] = ()
    stopped: bool = False


def keeps_overlaps(verifier: TreeVerifier) -> bool:
    """Tell whether a rule accepts the sampled drafts of a chain as often as both laws overlap, or more."""
    return verifier.scheme.lone_draft_is_drawn and traits(verifier).best_alone


def lessons_of(
    pieces: Sequence[tuple[Piece, TreeVerifier]],
    probs: Float[Tensor, "b n V"],
    verdict: Verdict,
    gains: Mapping[int, int],
    laws: Sequence[tuple[str, ...]],
) -> tuple[Lesson, ...]:
    """Return a lesson for every text that has gained something.

    Args:
        pieces: the drafts, each with its verifier.
        probs: the target's rows of the whole batch.
        verdict: what was kept in the whole batch.
        gains: by row, how many tokens came of it.
        laws: by row, the names of processors and filters of the target's law.
    """
    found: list[Lesson] = []
    for piece, verifier in pieces:
        places = [place for place, row in enumerate(piece.rows) if row in gains]
        if places:
            tried = _tried(piece, places, probs, verdict, verifier)
            depth = piece.draft.tree.topology.height
            rows = [piece.rows[place] for place in places]
            found += [
                Lesson(piece.draft.source, laws[row], own, gains[row], depth, judged, piece.draft.stopped)
                for row, (own, judged) in zip(rows, tried, strict=True)
            ]
    return tuple(found)


def _tried(
    piece: Piece, places: list[int], probs: Float[Tensor, "b n V"], verdict: Verdict, verifier: TreeVerifier
) -> list[tuple[tuple[Tried, ...], tuple[Judged, ...]]]:
    draft, rows = piece.draft, [piece.rows[place] for place in places]
    if draft.tree.tokens.shape[-1] == 1:
        return [((), ())] * len(places)
    alone = rows == list(range(len(probs)))
    own, target = (draft, probs) if alone else (draft.of(places), probs[rows])
    if keeps_overlaps(verifier) and draft.tree.topology.width == 1 and draft.probs.dim() == 3:
        judged = [()] * len(rows) if draft.source else _judged_alone(own, target)
        pairs = zip(overlaps(own, target), judged, rows, strict=True)
        return [(one[: verdict.kept[row] + 1], sure[: verdict.kept[row] + 1]) for one, sure, row in pairs]
    paths, kept = verdict.path.tolist(), verdict.kept
    taken = [paths[row][: kept[row]] for row in rows]
    children: list[list[list[int]]] = own.tree.children.tolist()
    if verifier.scheme.deterministic or draft.source:
        above = own.tree.parents.clamp_min(0)
        masses = _of_tokens(target, above, own.tree.tokens).tolist()
        found = [_masses(*one) for one in zip(children, masses, taken, strict=True)]
    else:
        found = [_results(*one) for one in zip(children, taken, strict=True)]
    sure = None if draft.source else _drawn_with(own).tolist()
    return [
        (
            tuple(tried for _, tried in one),
            tuple((tried[1], sure[place][child], tried[2]) for child, tried in one if tried[3] == 1) if sure else (),
        )
        for place, one in enumerate(found)
    ]


def _drawn_with(draft: Draft) -> Float[Tensor, "b n"]:
    """Return the draft probability of every node's token; under `Product` that of its first row."""
    rows = draft.probs if draft.probs.dim() == 3 else draft.probs[:, :, 0]
    batch = torch.arange(len(rows), device=rows.device).unsqueeze(-1)
    return rows[batch, draft.tree.parents.clamp_min(0), draft.atoms.clamp_min(0)]


def _of_tokens(
    probs: Float[Tensor, "b n V"], nodes: Int[Tensor, "b m"], tokens: Int[Tensor, "b m"]
) -> Float[Tensor, "b m"]:
    """Return the target's probabilities of tokens at nodes; none of those that it does not know."""
    batch, last = torch.arange(len(probs), device=probs.device).unsqueeze(-1), probs.shape[-1] - 1
    return probs[batch, nodes, tokens.clamp_max(last)].where(tokens <= last, 0)


def _judged_alone(draft: Draft, target_probs: Float[Tensor, "b n V"]) -> list[tuple[Judged, ...]]:
    """Return the chances of the tokens of sampled chains, min(1, p / q)."""
    drawn = _drawn_with(draft)[:, 1:]
    target = _of_tokens(target_probs, draft.tree.parents.clamp_min(0), draft.tree.tokens)[:, 1:]
    chances = (target / drawn.to(target).clamp_min(1e-30)).clamp_max(1).where(draft.tree.valid[:, 1:], -1)
    pairs = zip(drawn.tolist(), chances.tolist(), strict=True)
    return [tuple((0, sure, one) for sure, one in zip(*row, strict=True) if one >= 0) for row in pairs]


def overlaps(draft: Draft, target_probs: Float[Tensor, "b n V"]) -> list[tuple[Tried, ...]]:
    """Return the chances of chains of sampled drafts under a rule that keeps overlaps: sum of min(p, q) at every node.

    They are known at every node. Who learns from them takes those of nodes that the text came to: what is drafted
    below a rejected draft would tell of other texts.
    """
    inner, there = draft.tree.topology.inner, draft.tree.valid[:, 1:]
    target, listed = target_probs[:, :inner], draft.shortlist[:, :inner]
    if not draft.whole:
        last = target.shape[-1] - 1
        target = target.gather(-1, listed.clamp(0, last)).where((listed >= 0) & (listed <= last), 0)
    chances = torch.minimum(draft.probs[:, :inner], target).sum(dim=-1).where(there, -1).tolist()
    return [tuple((depth, 0, one, TELLING) for depth, one in enumerate(row) if one >= 0) for row in chances]


def _masses(children: list[list[int]], masses: list[float], path: list[int]) -> list[tuple[int, Tried]]:
    """Return the chances of drafts that are fixed by the draft rows: the target's mass, of what earlier ones leave."""
    found: list[tuple[int, Tried]] = []
    depth_of, on_path = {0: 0}, {0, *path}
    for node, below in enumerate(children):
        left, depth = 1.0, depth_of.get(node, 0)
        for rank, child in enumerate(child for child in below if child >= 0):
            depth_of[child] = depth + 1
            if left > 0:
                weight = 1.0 if node in on_path else ASIDE
                found.append((child, (depth, rank, min(1.0, masses[child] / left), weight)))
            left -= masses[child]
    return found


def _results(children: list[list[int]], path: list[int]) -> list[tuple[int, Tried]]:
    """Return what became of the drafts of one row that were tried in turn: those before the kept one were rejected."""
    found: list[tuple[int, Tried]] = []
    for depth, (node, after) in enumerate(zip([0, *path], [*path, -1], strict=True)):
        for rank, child in enumerate(child for child in children[node] if child >= 0):
            found.append((child, (depth, rank, float(child == after), 1.0)))
            if child == after:
                break
    return found
