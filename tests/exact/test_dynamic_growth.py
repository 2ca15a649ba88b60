"""Exactness of dynamic trees: every tree that can grow is listed, and the law of four tokens is the target's."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from growing import DeepWorld, every_growth, written
from torch import Tensor

from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Product,
    Scheme,
    TopK,
    WithoutReplacement,
)
from polydraft.trees import (
    BestFirst,
    Confident,
    Eagle2,
    EntropyBound,
    ExpectedAcceptance,
    GrowingPolicy,
    Merged,
    PathProbability,
    TreeShape,
)
from polydraft.trees.growing import Drawn, Opened
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    ImportanceWeighted,
    NaiveMatch,
    Optimal,
    PathVerifier,
    Race,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpecHubRule,
    SpeculativeSampling,
    TopDown,
    TopThenSampleRule,
    TraversalVerification,
)

SHARED = BestFirst(drafts=6, depth=3, children=2, beam=3)
SURE = Confident((2, 1, 1), 0.4)
POLICIES: dict[str, GrowingPolicy] = {
    "best first": SHARED,
    "best first, narrow": BestFirst(drafts=5, depth=3, children=3, beam=1),
    "expected": ExpectedAcceptance(drafts=6, depth=3, children=2, beam=3, least=0.05),
    "confident": SURE,
    "confident of the path": Confident((2, 2), 0.2, PathProbability()),
    "confident by entropy": Confident((2, 1, 1), 0.55, EntropyBound(0.2)),
}
TREE_RULES: list[PathVerifier] = [
    TopDown(RecursiveRejection()),
    TopDown(RecursiveRejectionWithoutReplacement()),
    TopDown(NaiveMatch(WithoutReplacement())),
    TopDown(TopThenSampleRule()),
    TopDown(NaiveMatch(TopK())),
    BottomUp(RecursiveRejection()),
    BottomUp(TopThenSampleRule()),
    TraversalVerification(),
    TraversalVerification(IID()),
    TopDown(RecursiveRejection(Product())),
    BottomUp(RecursiveRejection(Product())),
]
DEAR_RULES: list[PathVerifier] = [TopDown(Optimal(WithoutReplacement())), BottomUp(Optimal(ConditionalPoisson()))]
CHAINS: list[PathVerifier] = [TopDown(SpeculativeSampling()), BottomUp(SpeculativeSampling()), BlockVerification()]


@dataclass(frozen=True)
class Nosy(GrowingPolicy):
    """Counts that jump about with the tokens at other branches: whatever was drawn before may be looked at."""

    shape = TreeShape(((2,), (2, 2), (2, 2)))
    stops = True

    def opened(self, drawn: Drawn) -> Tensor:
        return drawn.there & (self._noise(drawn.path, drawn.there) % 3 > 0)

    def counts(self, opened: Opened) -> Tensor:
        return (
            2 - self._noise(opened.path, opened.there) % 2 if opened.depth == 1 else opened.there + (opened.depth == 0)
        )

    @staticmethod
    def _noise(path: Tensor, there: Tensor) -> Tensor:
        """Return a number made from the paths of all *other* nodes of this depth."""
        numbers = ((path * 7919).long() % 101) * there
        return numbers.sum(dim=-1, keepdim=True) - numbers


POLICIES["nosy"] = Nosy()


def named(value: object) -> str:
    if isinstance(value, PathVerifier):
        return f"{type(value).__name__} {value.name} {value.scheme.name}"
    return str(value)


def worlds(scheme: Scheme) -> list[DeepWorld]:
    members = 2 if isinstance(scheme, Product) else 0
    return [DeepWorld.random(5, members), DeepWorld.random(2, members, zeros=True)]


def check(policy: GrowingPolicy, verifier: PathVerifier) -> float:
    """Compare the law of four tokens with the target's; return the mean number of accepted drafts."""
    accepted = 0.0
    for world in worlds(verifier.scheme):
        draft, chance = every_growth(world, verifier.scheme, policy)
        joint, mean = written(world, verifier, draft, chance)
        torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-9)
        accepted += mean
    return accepted


@pytest.mark.parametrize(
    ("policy", "verifier"),
    [*product(POLICIES, TREE_RULES), *product(("best first", "nosy"), DEAR_RULES)],
    ids=named,
)
def test_four_tokens_follow_the_target(policy: str, verifier: PathVerifier) -> None:
    assert check(POLICIES[policy], verifier) > 0.1


@pytest.mark.parametrize("verifier", CHAINS, ids=named)
@pytest.mark.parametrize(
    "policy",
    [Confident((1, 1, 1), 0.5), Confident((1, 1, 1), 0.3, PathProbability()), BestFirst(3, 3, 1, 1)],
    ids=["confident", "confident of the path", "best first"],
)
def test_chains_follow_the_target(policy: GrowingPolicy, verifier: PathVerifier) -> None:
    assert check(policy, verifier) > 0.1


@pytest.mark.parametrize("lift", [TopDown, BottomUp])
def test_pairs_of_a_hub_follow_the_target(lift: type) -> None:
    assert check(BestFirst(drafts=4, depth=3, children=2, beam=2), lift(SpecHubRule())) > 0.1


@pytest.mark.parametrize("policy", [Eagle2(2, 3, 4), Eagle2(3, 2, 5), Eagle2(2, 3, 2)], ids=str)
def test_deterministic_trees_may_be_pruned(policy: Eagle2) -> None:
    assert check(policy, TopDown(NaiveMatch(TopK()))) > 0.1


def test_shapes_do_follow_the_draft_and_counts_the_tokens_at_other_branches() -> None:
    """The cases above would prove nothing if every tree had one shape, or if branches did not look at each other."""
    draft, _ = every_growth(worlds(IID())[0], IID(), SHARED)
    tree = draft.tree
    assert len({tuple(row) for row in tree.parents.where(tree.valid, -2).tolist()}) > 3
    below_first: dict[int, set[int]] = {}
    for row in range(len(tree.tokens)):
        one, two = tree.tokens[row, 1:3].tolist()
        below_first.setdefault(one, set()).add(int((tree.children[row, 1] >= 0).sum()))
        assert tree.parents[row, 1:3].tolist() == [0, 0] and two >= 0
    assert any(len(counts) > 1 for counts in below_first.values())


# --- Several draft models --------------------------------------------------------------------------------------------

MERGED_RULES: list[PathVerifier] = [
    TopDown(RecursiveRejection(Product())),
    TopDown(NaiveMatch(Product())),
    BottomUp(RecursiveRejection(Product())),
    BottomUp(NaiveMatch(Product())),
]


DEAR_MERGED: list[PathVerifier] = [TopDown(ImportanceWeighted(Product())), TopDown(Race(Product()))]


@pytest.mark.parametrize(
    ("widths", "verifier"),
    [*product([(1, 1, 1), (2, 1)], MERGED_RULES), *product([(1, 1)], DEAR_MERGED)],
    ids=named,
)
def test_merged_trees_follow_the_target(widths: tuple[int, ...], verifier: PathVerifier) -> None:
    assert check(Merged(widths, 2), verifier) > 0.1


def test_three_members_follow_the_target() -> None:
    world, rule = DeepWorld.random(5, members=3), TopDown(RecursiveRejection(Product()))
    draft, chance = every_growth(world, Product(), Merged((1, 1), 3))
    torch.testing.assert_close(written(world, rule, draft, chance)[0], world.joint, rtol=0, atol=1e-9)


def test_merging_accepts_more_than_chains_beside_each_other() -> None:
    """Where both members propose a token, its node has a child of each; unmerged chains waste the second."""
    rule = TopDown(RecursiveRejection(Product()))
    worlds = [DeepWorld.random(seed, members=2) for seed in range(4)]
    for world in worlds:
        means = []
        for policy in (Merged((1, 1, 1), 2), Unmerged((1, 1, 1), 2)):
            draft, chance = every_growth(world, Product(), policy)
            joint, mean = written(world, rule, draft, chance)
            torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-9)
            means.append(mean)
        assert means[0] > means[1] + 1e-3


@dataclass(frozen=True)
class Unmerged(Merged):
    """The members' trees beside each other: every copy goes on alone."""

    def opened(self, drawn: Drawn) -> Tensor:
        return drawn.there

    def counts(self, opened: Opened) -> Tensor:
        ones = opened.there.long()
        return ones * self.members if opened.depth == 0 else ones

    def row_of_each_child(self, opened: Opened, most: int) -> Tensor:
        if opened.drawn is None:
            return super().row_of_each_child(opened, most)
        return opened.drawn.members.gather(-1, opened.places).unsqueeze(-1).expand(-1, -1, most)


def test_every_merged_draft_is_drawn_from_the_row_of_its_proposer() -> None:
    world = DeepWorld.random(1, members=2)
    draft, _ = every_growth(world, Product(), Merged((1, 1), 2))
    tree, twice = draft.tree, 0
    for row in range(len(tree.tokens)):
        one, two = tree.tokens[row, 1:3].tolist()
        kids = [[child for child in tree.children[row, node].tolist() if child >= 0] for node in (1, 2)]
        if one == two:
            twice += 1
            assert [len(each) for each in kids] == [2, 0]
            torch.testing.assert_close(draft.probs[row, 1], world.draft[1, one])
        else:
            assert [len(each) for each in kids] == [1, 1]
            torch.testing.assert_close(draft.probs[row, 1, 0], world.draft[1, one, 0])
            torch.testing.assert_close(draft.probs[row, 2, 0], world.draft[1, two, 1])
    assert 0 < twice < len(tree.tokens)


# --- What is not allowed ---------------------------------------------------------------------------------------------


def error(policy: GrowingPolicy, verifier: PathVerifier, deterministic: bool) -> float:
    """Return the total variation between what is written and the target; the scheme may lie about itself."""
    world = worlds(verifier.scheme)[0]
    draft, chance = every_growth(world, verifier.scheme, policy, deterministic=deterministic)
    return float((written(world, verifier, draft, chance)[0] - world.joint).abs().sum() / 2)


@pytest.mark.parametrize(
    "verifier",
    [
        TopDown(RecursiveRejection()),
        TopDown(RecursiveRejectionWithoutReplacement()),
        BottomUp(RecursiveRejection()),
        TopDown(TopThenSampleRule()),
    ],
    ids=named,
)
def test_ranking_sampled_drafts_again_is_biased(verifier: PathVerifier) -> None:
    """EAGLE-2's second phase keeps the likelier of what was drawn: the kept drafts are no draw of the scheme."""
    assert error(Eagle2(2, 2, 2), verifier, deterministic=True) > 0.01


@dataclass(frozen=True)
class DropsDoubtful(Confident):
    """BiLD's habit: the draft that was not sure enough is thrown away, though it had been drawn."""

    def pruned(self, path: Tensor, there: Tensor) -> Tensor:
        return there & (path >= self.threshold)


@pytest.mark.parametrize("verifier", CHAINS, ids=named)
def test_dropping_the_doubtful_draft_is_biased(verifier: PathVerifier) -> None:
    chain = (1, 1, 1)
    assert error(DropsDoubtful(chain, 0.3, PathProbability()), verifier, deterministic=True) > 0.01
    assert error(Confident(chain, 0.3, PathProbability()), verifier, deterministic=False) < 1e-9
