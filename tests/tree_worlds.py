"""Worlds whose laws depend on the whole path, and all drafts of trees of any shape in them as one batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from polydraft.schemes import Scheme, enumerate_drafts
from polydraft.trees import Draft, TokenTree, Topology, TreeShape
from polydraft.verifiers import PathVerifier

DEPTH = 3

SHAPES = {
    "chain": TreeShape(((1,), (1,))),
    "2,1": TreeShape(((2,), (1, 1))),
    "2 then 1,0": TreeShape(((2,), (1,))),
    "2 then 2,0": TreeShape(((2,), (2,))),
    "3 then 1,0,0": TreeShape(((3,), (1,))),
    "2 then 1,0 then 1": TreeShape(((2,), (1,), (1,))),
}


@dataclass(frozen=True)
class DeepWorld:
    """Rows after 0, 1, 2 tokens; a draft row is half the target's and half noise."""

    target: tuple[Tensor, ...]
    draft: tuple[Tensor, ...]

    @classmethod
    def random(cls, seed: int, size: int = 3, likeness: float = 0.5) -> "DeepWorld":
        stream = torch.Generator().manual_seed(seed)

        def law(depth: int) -> Tensor:
            mass = torch.empty((size,) * (depth + 1), dtype=torch.float64).exponential_(generator=stream)
            return mass / mass.sum(dim=-1, keepdim=True)

        target = tuple(law(depth) for depth in range(DEPTH + 1))
        draft = tuple(likeness * row + (1 - likeness) * law(depth) for depth, row in enumerate(target[:-1]))
        return cls(target, draft)

    def drafts_of(self, scheme: Scheme) -> tuple[Tensor, ...]:
        """Return the draft rows; where a node has several, the row and its mirror image."""
        rows = self.draft
        return tuple(torch.stack([row, row.flip(-1)], dim=-2) for row in rows) if scheme.several_rows else rows

    def every_tree(self, shape: TreeShape, scheme: Scheme) -> tuple[Draft, Tensor, Tensor]:
        """List all drafts of a shape as one batch, with their probabilities and the target's rows at their nodes."""
        size, rows = self.target[0].shape[-1], self.drafts_of(scheme)
        found = [(texts, chance) for texts, chance in _grown(shape, scheme, rows)]
        tokens = torch.tensor([[text[-1] if text else -1 for text in texts] for texts, _ in found])
        nodes, valid = tokens.shape[1], tokens >= 0
        valid[:, 0] = True
        listed = torch.arange(size).expand(len(found), nodes, size)
        probs = torch.zeros(len(found), nodes, *rows[0].shape, dtype=torch.float64)
        target = torch.zeros(len(found), nodes, size, dtype=torch.float64)
        inner = {parent for parent in shape.parents if parent >= 0}
        for row, (texts, _) in enumerate(found):
            for node, text in enumerate(texts):
                there = text is not None
                target[row, node] = self.target[len(text)][text] if there else 1 / size
                if node in inner and there:
                    probs[row, node] = rows[len(text)][text]
        tree = TokenTree(tokens.clamp_min(0), Topology(torch.tensor(shape.parents).repeat(len(found), 1)), valid)
        draft = Draft(tree, tokens.where(valid, -1), listed, probs, most_children=shape.max_children, planned=shape)
        return draft, torch.tensor([chance for _, chance in found], dtype=torch.float64), target

    def text_law(self, draft: Draft, verifier: PathVerifier, rows: Tensor, chance: Tensor) -> Tensor:
        """Return the joint law of DEPTH + 1 tokens: the verdict's, then the target's."""
        law = verifier.path_law(draft, rows)
        emitted = law.end.unsqueeze(-1) * law.next_token(draft, rows) * chance.view(-1, 1, 1)
        size, result = rows.shape[-1], torch.zeros((rows.shape[-1],) * (DEPTH + 1), dtype=torch.float64)
        tokens, parents = draft.tree.tokens.tolist(), draft.tree.parents[0].tolist()
        for row, valid in enumerate(draft.tree.valid.tolist()):
            for node in (place for place, there in enumerate(valid) if there):
                path, above = (), node
                while above > 0:
                    path, above = (tokens[row][above], *path), parents[above]
                for token in range(size):
                    text = (*path, token)
                    result[text] += float(emitted[row, node, token]) * self.after(text)
        return result

    def after(self, text: Sequence[int]) -> Tensor:
        """Return the target's law of the tokens that are missing of DEPTH + 1."""
        if len(text) > DEPTH:
            return torch.ones((), dtype=torch.float64)
        row = self.target[len(text)][tuple(text)]
        return torch.stack([row[token] * self.after((*text, token)) for token in range(len(row))])

    @property
    def joint(self) -> Tensor:
        return self.after(())

    def accepted(self, shape: TreeShape, verifier: PathVerifier) -> float:
        draft, chance, rows = self.every_tree(shape, verifier.scheme)
        return float(chance @ verifier.path_law(draft, rows).accepted(draft.tree))


def _grown(shape: TreeShape, scheme: Scheme, rows: Sequence[Tensor]) -> list[tuple[list, float]]:
    """Return the text of every node, None where it is absent, and the probability, for every outcome of the draws."""
    found: list[tuple[list, float]] = [([()], 1.0)]
    for nodes, counts in zip(shape.levels, shape.counts, strict=False):
        grown = []
        for texts, chance in found:
            drawn = []
            for node, count in zip(nodes, counts, strict=False):
                text = texts[node]
                if count and text is not None:
                    atoms, chances = enumerate_drafts(scheme, rows[len(text)][text], count)
                    outcomes = zip(atoms.tolist(), chances.tolist(), strict=True)
                    drawn.append([([(*text, one) if one >= 0 else None for one in all_], p) for all_, p in outcomes])
                elif count:
                    drawn.append([([None] * count, 1.0)])
            for parts in product(*drawn):
                below = [text for texts_below, _ in parts for text in texts_below]
                grown.append(([*texts, *below], chance * prod(share for _, share in parts)))
        found = grown
    return found
