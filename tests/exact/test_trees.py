"""Exactness of top-down verification on trees of depth two, by enumerating every draft tree."""

from dataclasses import dataclass
from itertools import product
from math import prod

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from polydraft.probs import Noise, to_atoms
from polydraft.schemes import IID, Given, Scheme, TopK, TopThenSample, WithoutReplacement, enumerate_drafts
from polydraft.trees import Draft, Frontier, TokenTree, Topology, Widths, grow
from polydraft.verifiers import (
    NaiveMatch,
    NodeVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpeculativeSampling,
    TopDown,
    TopThenSampleRule,
)

VOCABULARY, LISTED = 4, 3
FALSE_ALARM = 1e-6

RULES: list[NodeVerifier] = [
    *(NaiveMatch(scheme) for scheme in (IID(), WithoutReplacement(), TopK(), TopThenSample(), Given())),
    RecursiveRejection(),
    RecursiveRejectionWithoutReplacement(),
    TopThenSampleRule(),
]
SQUARE = [(rule, (2, 2)) for rule in RULES] + [(SpeculativeSampling(), (1, 1))]
NARROW = [(rule, widths) for rule in RULES for widths in ((1, 2), (2, 1))]


def cases(some: list[tuple[NodeVerifier, tuple[int, int]]]) -> pytest.MarkDecorator:
    names = [f"{rule.name}, {rule.scheme.name}, {widths}" for rule, widths in some]
    return pytest.mark.parametrize(("rule", "widths"), some, ids=names)


@dataclass(frozen=True)
class World:
    """Laws that depend on the path: the target's after 0, 1 and 2 tokens, the draft's after 0 and 1.

    A draft law is a shortlist of three of the four tokens, in any order, and a row on it.
    """

    target: tuple[Tensor, Tensor, Tensor]
    shortlist: tuple[Tensor, Tensor]
    draft: tuple[Tensor, Tensor]

    @classmethod
    def random(cls, seed: int) -> "World":
        stream = torch.Generator().manual_seed(seed)

        def law(*shape: int) -> Tensor:
            mass = torch.rand(shape, generator=stream, dtype=torch.float64) ** 3 + 0.01
            return mass / mass.sum(dim=-1, keepdim=True)

        listed = torch.rand(1 + VOCABULARY, VOCABULARY, generator=stream).argsort(dim=-1)[:, :LISTED]
        v = VOCABULARY
        return cls((law(v), law(v, v), law(v, v, v)), (listed[0], listed[1:]), (law(LISTED), law(v, LISTED)))

    @property
    def joint(self) -> Tensor:
        """The target's law of three tokens."""
        first, second, third = self.target
        return first.view(-1, 1, 1) * second.unsqueeze(-1) * third

    def propose(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Look the draft laws of a frontier up."""
        if frontier.depth:
            return self.shortlist[1][frontier.tokens], self.draft[1][frontier.tokens]
        places = (*frontier.tokens.shape, LISTED)
        return self.shortlist[0].expand(places), self.draft[0].expand(places)

    def target_rows(self, tree: TokenTree) -> Tensor:
        """Look the target's rows at every node up."""
        above = tree.tokens.gather(-1, tree.parents.clamp_min(0))
        rows = self.target[2][above, tree.tokens]
        rows = torch.where(tree.depth.unsqueeze(-1) == 1, self.target[1][tree.tokens], rows)
        return torch.where(tree.depth.unsqueeze(-1) == 0, self.target[0], rows)


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
    shortlist = torch.full((*atoms.shape, LISTED), -1)
    probs = torch.zeros(*atoms.shape, LISTED, dtype=torch.float64)
    shortlist[:, 0], probs[:, 0] = world.shortlist[0], world.draft[0]
    shortlist[:, 1:last], probs[:, 1:last] = world.shortlist[1][tokens[:, 1:last]], world.draft[1][tokens[:, 1:last]]
    tokens[:, last:] = shortlist[:, parents[last:]].gather(-1, atoms[:, last:].clamp_min(0).unsqueeze(-1)).squeeze(-1)
    valid = (atoms >= 0) | (parents < 0)
    return Draft(TokenTree(tokens, Topology(parents.repeat(batch, 1)), valid), atoms, shortlist, probs)


def on_tokens(law: Tensor, shortlist: Tensor) -> Tensor:
    """Turn laws on three listed atoms and a tail into laws on four tokens: the tail is the token not listed."""
    unlisted = sum(range(VOCABULARY)) - shortlist.sum(dim=-1, keepdim=True)
    return torch.zeros_like(law).scatter(-1, torch.cat([shortlist, unlisted], dim=-1), law)


def two_token_law(world: World, rule: NodeVerifier, draft: Draft, width: int) -> Tensor:
    """Return, per tree, the joint law of the next two tokens under the rule applied from the root down.

    After a correction at the root the second token comes from the next round, so it is a draw from the target.
    """
    drafts = draft.drafted_atoms()
    padded = torch.cat([draft.probs, torch.zeros_like(draft.probs[..., :1])], dim=-1)
    law = rule.law(drafts, padded, to_atoms(world.target_rows(draft.tree), draft.shortlist))
    emitted = law.emitted(drafts)
    joint = on_tokens(law.rest[:, 0], draft.shortlist[:, 0]).unsqueeze(-1) * world.target[1]
    for child in range(1, 1 + width):
        second = on_tokens(emitted[:, child], draft.shortlist[:, child])
        joint[torch.arange(len(drafts)), draft.tree.tokens[:, child]] += law.child[:, 0, child - 1, None] * second
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
        return cls((torch.Generator().manual_seed(seed),), rows)


@cases(SQUARE + NARROW)
def test_two_tokens_follow_the_target(rule: NodeVerifier, widths: tuple[int, int]):
    for seed in range(3):
        world = World.random(seed)
        draft, probability = every_tree(world, rule.scheme, widths)
        assert float(probability.sum()) == pytest.approx(1, abs=1e-12)
        joint = (probability.view(-1, 1, 1) * two_token_law(world, rule, draft, widths[0])).sum(dim=0)
        torch.testing.assert_close(joint, world.joint.sum(dim=-1), rtol=0, atol=1e-12)


@cases(SQUARE)
def test_the_walk_follows_the_node_laws(rule: NodeVerifier, widths: tuple[int, int]):
    """For one tree, by chi-square with false-alarm rate 1e-6."""
    many, world = 2**14, World.random(4)
    trees, probability = every_tree(world, rule.scheme, widths)
    likeliest = probability.argmax()
    draft = as_draft(world, widths, trees.atoms[likeliest].repeat(many, 1))
    verdict = TopDown(rule).verify(draft, world.target_rows(draft.tree), FastNoise.seeded(0, many))
    tokens = completed(world, verdict.tokens(draft.tree))
    check_by_chi_square(tokens[:, :2], two_token_law(world, rule, trees, widths[0])[likeliest])


@cases(SQUARE)
def test_three_tokens_of_grown_and_verified_trees_follow_the_target(rule: NodeVerifier, widths: tuple[int, int]):
    """From drafting to the bonus token, by chi-square with false-alarm rate 1e-6."""
    many, world, noise = 2**14, World.random(5), FastNoise.seeded(1, 2**14)
    draft = grow(torch.zeros(many, dtype=torch.int64), Widths(widths), rule.scheme, world.propose, noise)
    verdict = TopDown(rule).verify(draft, world.target_rows(draft.tree), noise)
    assert set(verdict.length.tolist()) == {0, 1, 2}
    check_by_chi_square(completed(world, verdict.tokens(draft.tree)), world.joint)


def test_three_tokens_follow_the_target_with_one_random_stream_per_row():
    """By chi-square with false-alarm rate 1e-6."""
    rule, many, world, noise = RecursiveRejection(), 4000, World.random(6), Noise.from_seed(0, 4000)
    draft = grow(torch.zeros(many, dtype=torch.int64), Widths((2, 2)), rule.scheme, world.propose, noise)
    verdict = TopDown(rule).verify(draft, world.target_rows(draft.tree), noise)
    check_by_chi_square(completed(world, verdict.tokens(draft.tree)), world.joint)


def test_drafts_of_another_scheme_are_caught_in_a_tree():
    many, world, noise = 2**14, World.random(5), FastNoise.seeded(1, 2**14)
    draft = grow(torch.zeros(many, dtype=torch.int64), Widths((2, 2)), TopK(), world.propose, noise)
    verdict = TopDown(RecursiveRejection()).verify(draft, world.target_rows(draft.tree), noise)
    with pytest.raises(AssertionError):
        check_by_chi_square(completed(world, verdict.tokens(draft.tree)), world.joint)
