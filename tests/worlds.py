"""Small worlds whose laws depend on the path, all draft trees in them, and tests of the texts that come out."""

from dataclasses import dataclass
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor
from zoo import rows

from polydraft.probs import Noise
from polydraft.schemes import Scheme, enumerate_drafts
from polydraft.trees import Draft, Frontier, TokenTree, Topology
from polydraft.verifiers import PathLaw, PathVerifier

VOCABULARY, LISTED = 4, 3
FALSE_ALARM = 1e-6


@dataclass(frozen=True)
class World:
    """Laws that depend on the path: the target's after 0, 1 and 2 tokens, the draft's after 0 and 1.

    A draft law is a shortlist of some of the tokens, in any order, and a row on it.
    """

    target: tuple[Tensor, Tensor, Tensor]
    shortlist: tuple[Tensor, Tensor]
    draft: tuple[Tensor, Tensor]

    @classmethod
    def random(cls, seed: int, size: int = VOCABULARY, listed: int = LISTED, likeness: float = 0.0) -> "World":
        """Draw a world of `size` tokens; `likeness` is the share of the target in the draft rows."""
        stream = torch.Generator().manual_seed(seed)

        def law(*shape: int) -> Tensor:
            mass = torch.rand(shape, generator=stream, dtype=torch.float64) ** 3 + 0.01
            return mass / mass.sum(dim=-1, keepdim=True)

        def alike(row: Tensor, target: Tensor, places: Tensor) -> Tensor:
            mass = likeness * target.gather(-1, places) + (1 - likeness) * row
            return mass / mass.sum(dim=-1, keepdim=True)

        shown = torch.rand(1 + size, size, generator=stream).argsort(dim=-1)[:, :listed]
        target = (law(size), law(size, size), law(size, size, size))
        first, second = law(listed), law(size, listed)
        draft = (alike(first, target[0], shown[0]), alike(second, target[1], shown[1:]))
        return cls(target, (shown[0], shown[1:]), draft)

    @property
    def joint(self) -> Tensor:
        """The target's law of three tokens."""
        first, second, third = self.target
        return first.view(-1, 1, 1) * second.unsqueeze(-1) * third

    def propose(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Look the draft laws of a frontier up."""
        if frontier.depth:
            return self.shortlist[1][frontier.tokens], self.draft[1][frontier.tokens]
        places = (*frontier.tokens.shape, self.shortlist[0].shape[-1])
        return self.shortlist[0].expand(places), self.draft[0].expand(places)

    def target_rows(self, tree: TokenTree) -> Tensor:
        """Look the target's rows at every node up."""
        above = tree.tokens.gather(-1, tree.parents.clamp_min(0))
        law = self.target[2][above, tree.tokens]
        law = torch.where(tree.depth.unsqueeze(-1) == 1, self.target[1][tree.tokens], law)
        return torch.where(tree.depth.unsqueeze(-1) == 0, self.target[0], law)


def worlds(size: int = 3) -> st.SearchStrategy[World]:
    """Draw worlds of a few tokens, all listed, with zeros, ties, tiny masses and one-hot rows among the laws."""
    numbers = (1 + size + size**2) + (1 + size)

    def built(laws: list[Tensor]) -> World:
        stacked, v = torch.stack(laws), size
        target, draft = stacked[: 1 + v + v**2], stacked[1 + v + v**2 :]
        everything = torch.arange(v)
        return World(
            (target[0], target[1 : 1 + v], target[1 + v :].view(v, v, v)),
            (everything, everything.expand(v, v)),
            (draft[0], draft[1:]),
        )

    return st.lists(rows(size), min_size=numbers, max_size=numbers).map(built)


def every_tree(world: World, scheme: Scheme, widths: tuple[int, int]) -> tuple[Draft, Tensor]:
    """List all draft trees as one batch, and their probabilities."""
    atoms, probability = [], []
    for children, chance in drafts_of(scheme, world.draft[0], widths[0]):
        tokens = [int(world.shortlist[0][child]) if child >= 0 else None for child in children]
        below = [
            [((-1,) * widths[1], 1.0)] if token is None else drafts_of(scheme, world.draft[1][token], widths[1])
            for token in tokens
        ]
        for leaves in product(*below):
            atoms.append([-1, *children, *(atom for drafts, _ in leaves for atom in drafts)])
            probability.append(chance * prod(share for _, share in leaves))
    return as_draft(world, widths, torch.tensor(atoms)), torch.tensor(probability, dtype=torch.float64)


def drafts_of(scheme: Scheme, law: Tensor, k: int) -> list[tuple[tuple[int, ...], float]]:
    atoms, probability = enumerate_drafts(scheme, law, k)
    return list(zip(map(tuple, atoms.tolist()), probability.tolist(), strict=True))


def as_draft(world: World, widths: tuple[int, int], atoms: Tensor) -> Draft:
    batch, last = len(atoms), 1 + widths[0]
    parents = torch.tensor([-1, *[0] * widths[0], *(n for n in range(1, last) for _ in range(widths[1]))])
    tokens = torch.zeros_like(atoms)
    tokens[:, 1:last] = world.shortlist[0][atoms[:, 1:last].clamp_min(0)]
    shortlist = torch.full((*atoms.shape, world.shortlist[0].shape[-1]), -1)
    probs = torch.zeros(shortlist.shape, dtype=torch.float64)
    shortlist[:, 0], probs[:, 0] = world.shortlist[0], world.draft[0]
    shortlist[:, 1:last], probs[:, 1:last] = world.shortlist[1][tokens[:, 1:last]], world.draft[1][tokens[:, 1:last]]
    tokens[:, last:] = shortlist[:, parents[last:]].gather(-1, atoms[:, last:].clamp_min(0).unsqueeze(-1)).squeeze(-1)
    valid = (atoms >= 0) | (parents < 0)
    tree = TokenTree(tokens, Topology(parents.repeat(batch, 1)), valid)
    return Draft(tree, atoms, shortlist, probs, most_children=max(widths))


def on_tokens(law: Tensor, shortlist: Tensor) -> Tensor:
    """Turn laws on three listed atoms and a tail into laws on four tokens: the tail is the token not listed."""
    unlisted = sum(range(VOCABULARY)) - shortlist.sum(dim=-1, keepdim=True)
    return torch.zeros_like(law).scatter(-1, torch.cat([shortlist, unlisted], dim=-1), law)


def outcome(world: World, verifier: PathVerifier, widths: tuple[int, int]) -> tuple[Tensor, float]:
    """Return the joint law of three tokens and the mean number of accepted drafts, over all draft trees."""
    draft, probability = every_tree(world, verifier.scheme, widths)
    law = verifier.path_law(draft, world.target_rows(draft.tree))
    assert float(probability.sum()) == pytest.approx(1, abs=1e-12)
    assert bool((law.end >= 0).all() and (law.rest >= 0).all())
    assert not bool(law.end[~draft.tree.valid].any())
    torch.testing.assert_close(law.end.sum(dim=-1), torch.ones(len(law.end)).double(), rtol=0, atol=1e-12)
    joint = torch.einsum("b,bxyz->xyz", probability, text_law(world, draft, law))
    return joint, float(probability @ law.accepted(draft.tree))


def text_law(world: World, draft: Draft, law: PathLaw) -> Tensor:
    """Return, per tree, the joint law of three tokens; those after the verdict's are drawn from the target."""
    trees, tokens = torch.arange(len(law.end)), draft.tree.tokens
    above = tokens.gather(-1, draft.tree.parents.clamp_min(0))
    emitted = law.end.unsqueeze(-1) * law.next_token(draft, world.target_rows(draft.tree))
    joint = emitted[:, 0, :, None, None] * world.target[1].unsqueeze(-1) * world.target[2]
    for node in range(1, tokens.shape[-1]):
        token, deep = tokens[:, node], draft.tree.depth[:, node] == 2
        second = emitted[:, node].unsqueeze(-1) * world.target[2][token]
        joint[trees[~deep], token[~deep]] += second[~deep]
        joint[trees[deep], above[deep, node], token[deep]] += emitted[deep, node]
    return joint


def completed(world: World, tokens: Tensor) -> Tensor:
    """Return the first three tokens of each row; those not emitted (-1) are drawn from the target."""
    tokens, stream = tokens.clone(), torch.Generator().manual_seed(1234)
    for place in (1, 2):
        law = world.target[place][tuple(tokens[:, :place].T)]
        fresh = law.multinomial(1, generator=stream).squeeze(-1)
        tokens[:, place] = torch.where(tokens[:, place] < 0, fresh, tokens[:, place])
    return tokens


def check_by_chi_square(tokens: Tensor, expected: Tensor) -> None:
    """Fail with probability 1e-6 if the rows do follow the expected law; rare cells are taken together."""
    places = sum(tokens[:, place] * VOCABULARY ** (expected.dim() - 1 - place) for place in range(expected.dim()))
    wanted, found = expected.flatten() * len(tokens), torch.bincount(places, minlength=expected.numel()).double()
    common = wanted >= 10
    wanted = torch.cat([wanted[common], wanted[~common].sum().view(1)])
    found = torch.cat([found[common], found[~common].sum().view(1)])
    statistic = float(((found - wanted) ** 2 / wanted.clamp_min(1)).sum())
    assert statistic < chi2.isf(FALSE_ALARM, len(wanted) - 1)


@dataclass(frozen=True)
class FastNoise(Noise):
    """All rows from one generator, for many rows at once."""

    rows: int = 0

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(self.rows, *shape, generator=self.generators[0], dtype=torch.float64)

    @classmethod
    def seeded(cls, seed: int, rows: int) -> "FastNoise":
        return cls((torch.Generator().manual_seed(seed),), rows=rows)
