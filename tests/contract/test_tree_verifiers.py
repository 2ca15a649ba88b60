"""What every tree verifier promises besides exactness."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from worlds import World

from polydraft.catalogue import tree_rules
from polydraft.probs import Noise
from polydraft.schemes import IID, Scheme, TopK
from polydraft.trees import Chain, Draft, Fixed, TokenTree, Topology, TreePolicy, TreeShape, Verdict, grow
from polydraft.verifiers import (
    BottomUp,
    NaiveMatch,
    PathVerifier,
    RecursiveRejection,
    SharedNoise,
    TopDown,
    TreeVerifier,
    expected_accepted,
    most_drafts,
)

TWOS, UNEVEN = Fixed(TreeShape(((2,), (2, 1)))), Fixed(TreeShape(((3,), (2, 0, 1))))
VERIFIERS: list[TreeVerifier] = [
    *(rule for rule in tree_rules() if rule.lossless),
    BottomUp(NaiveMatch(IID())),
    SharedNoise(TopK()),
]
KNOWN = [verifier for verifier in VERIFIERS if isinstance(verifier, PathVerifier)]


def named(verifier: TreeVerifier) -> str:
    return f"{type(verifier).__name__}, {verifier.name}, {verifier.scheme.name}"


each_verifier = pytest.mark.parametrize("verifier", VERIFIERS, ids=named)
each_known = pytest.mark.parametrize("verifier", KNOWN, ids=named)


def policy(verifier: TreeVerifier) -> TreePolicy:
    return {1: Chain(2), 2: TWOS}.get(most_drafts(verifier), UNEVEN)


def drafted(verifier: TreeVerifier, rows: int, world: World, noise: Noise) -> tuple[Draft, Tensor]:
    root = torch.zeros(rows, dtype=torch.int64)
    draft = grow(root, policy(verifier), verifier.scheme, world.propose, noise)
    return draft, world.target_rows(draft.tree)


def row_of(draft: Draft, row: int) -> Draft:
    return replace(draft.of([row]), most_children=None)


@each_verifier
def test_it_says_what_it_is(verifier: TreeVerifier):
    assert isinstance(verifier, TreeVerifier)
    assert verifier.name
    assert isinstance(verifier.scheme, Scheme)
    assert verifier.lossless is True
    assert isinstance(verifier, PathVerifier) == (verifier.name != SharedNoise.name)


@dataclass(frozen=True)
class Lossy(NaiveMatch):
    """Says of itself that it is not exact."""

    lossless = False


def test_a_lift_is_as_lossless_as_its_rule():
    assert not TopDown(Lossy()).lossless
    assert not BottomUp(Lossy()).lossless


@each_verifier
def test_the_verdict_is_a_path_and_a_token(verifier: TreeVerifier):
    noise = Noise.from_seed(0, 64)
    draft, rows = drafted(verifier, 64, World.random(1), noise)
    verdict = verifier.verify(draft, rows, noise.at(1))
    assert verdict.path.shape == (64, 2)
    assert {0, 1} <= set(verdict.length.tolist()) <= {0, 1, 2}
    for row, path in enumerate(verdict.path.tolist()):
        length = int(verdict.length[row])
        assert path[length:] == [-1] * (2 - length)
        assert [int(draft.tree.parents[row, node]) for node in path[:length]] == [0, *path][:length]
        assert bool(draft.tree.valid[row, path[:length]].all())
        end = path[length - 1] if length else 0
        assert float(rows[row, end, verdict.next_token[row]]) > 0


@each_verifier
def test_a_batch_gives_what_its_rows_give(verifier: TreeVerifier):
    noise = Noise.from_seed(3, 12)
    draft, rows = drafted(verifier, 12, World.random(2), noise)
    whole = verifier.verify(draft, rows, noise.at(1))
    for row in range(12):
        own = Noise((noise.generators[row],))
        alone = verifier.verify(row_of(draft, row), rows[row : row + 1], own.at(1))
        assert alone.path.tolist() == whole.path[row : row + 1].tolist()
        assert alone.next_token.tolist() == whole.next_token[row : row + 1].tolist()


@each_verifier
def test_without_drafts_it_draws_from_the_target(verifier: TreeVerifier):
    target = World.random(3).target[2].view(1, 16, 4).transpose(0, 1)
    verdict = verifier.verify(Draft.nothing(torch.zeros(16, dtype=torch.int64)), target, Noise.from_seed(1, 16))
    assert verdict.path.shape == (16, 0)
    assert verdict.length.tolist() == [0] * 16
    if verifier in KNOWN:
        other = TopDown(NaiveMatch()).verify(
            Draft.nothing(torch.zeros(16, dtype=torch.int64)), target, Noise.from_seed(1, 16)
        )
        assert torch.equal(verdict.next_token, other.next_token)


@each_verifier
def test_a_one_hot_target_decides_everything(verifier: TreeVerifier):
    """At temperature 0 the emitted tokens are the target's, and a drafted child that is its token is accepted."""
    world = World.random(4)
    hot = tuple(torch.nn.functional.one_hot(law.argmax(dim=-1), 4).double() for law in world.target)
    world, noise = World(hot, world.shortlist, world.draft), Noise.from_seed(5, 50)
    draft, rows = drafted(verifier, 50, world, noise)
    verdict = verifier.verify(draft, rows, noise.at(1))
    text = [int(hot[0].argmax())]
    text.append(int(hot[1][text[0]].argmax()))
    text.append(int(hot[2][text[0], text[1]].argmax()))
    for row, emitted in enumerate(verdict.tokens(draft.tree).tolist()):
        length = int(verdict.length[row])
        assert emitted == text[: length + 1] + [-1] * (2 - length)
        children = draft.tree.children[row, verdict.path[row, length - 1] if length else 0]
        assert text[length] not in draft.tree.tokens[row, children[children >= 0]].tolist()


@each_verifier
def test_float32_rows_give_nearly_the_same_verdicts(verifier: TreeVerifier):
    noise = Noise.from_seed(7, 200)
    draft, rows = drafted(verifier, 200, World.random(6), noise)
    exact = verifier.verify(draft, rows, noise.at(1))
    single = replace(draft, probs=draft.probs.float())
    rounded = verifier.verify(single, rows.float(), noise.at(1))
    assert int((exact.path != rounded.path).any(dim=-1).sum()) <= 1


@pytest.mark.long(14)
@each_known
def test_accepted_lengths_have_the_expected_mean(verifier: PathVerifier):
    noise = Noise.from_seed(9, 1000)
    draft, rows = drafted(verifier, 1000, World.random(8), noise)
    expected = expected_accepted(verifier, draft, rows)
    assert expected.shape == (1000,)
    difference = verifier.verify(draft, rows, noise.at(1)).length - expected
    assert abs(float(difference.mean())) < 5 * float(difference.std()) / 1000**0.5


@each_known
def test_the_law_of_a_batch_is_that_of_its_rows(verifier: PathVerifier):
    noise = Noise.from_seed(3, 6)
    draft, rows = drafted(verifier, 6, World.random(2), noise)
    whole = verifier.path_law(draft, rows)
    for row in range(6):
        alone = verifier.path_law(row_of(draft, row), rows[row : row + 1])
        torch.testing.assert_close(whole.end[row], alone.end[0], rtol=0, atol=1e-13)
        torch.testing.assert_close(whole.rest[row], alone.rest[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("verifier", [TopDown(RecursiveRejection()), BottomUp(RecursiveRejection())], ids=named)
def test_rows_may_have_trees_of_different_shapes(verifier: PathVerifier):
    noise, world = Noise.from_seed(3, 2), World.random(2)
    wide = grow(torch.zeros(1, dtype=torch.int64), UNEVEN, IID(), world.propose, Noise.from_seed(3, 1))
    parents = torch.tensor([[-1, 0, 1, 0, 1, 3, 0]])  # the same tree, its nodes numbered depth first
    order = torch.tensor([0, 1, 4, 3, 5, 6, 2])
    tree = TokenTree(wide.tree.tokens[:, order], Topology(parents), wide.tree.valid[:, order])
    deep = Draft(tree, wide.atoms[:, order], wide.shortlist[:, order], wide.probs[:, order])
    assert torch.equal(tree.depth, wide.tree.depth[:, order])
    both = Draft(
        TokenTree(
            torch.cat([wide.tree.tokens, tree.tokens]),
            Topology(torch.cat([wide.tree.parents, parents])),
            torch.cat([wide.tree.valid, tree.valid]),
        ),
        torch.cat([wide.atoms, deep.atoms]),
        torch.cat([wide.shortlist, deep.shortlist]),
        torch.cat([wide.probs, deep.probs]),
    )
    law = verifier.path_law(both, world.target_rows(both.tree))
    for row, one in enumerate((wide, deep)):
        alone = verifier.path_law(one, world.target_rows(one.tree))
        torch.testing.assert_close(law.end[row], alone.end[0], rtol=0, atol=1e-14)
    verdict: Verdict = verifier.verify(both, world.target_rows(both.tree), noise)
    assert verdict.path.shape == (2, 2)
