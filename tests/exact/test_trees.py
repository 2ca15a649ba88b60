"""Exactness of top-down verification on trees of depth two, by enumerating every draft tree."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import FastNoise, World, as_draft, check_by_chi_square, completed, every_tree, on_tokens, text_law

from polydraft.catalogue import node_rules
from polydraft.errors import UnpairedScheme
from polydraft.probs import Noise, sample, to_atoms, without
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Given,
    Product,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
)
from polydraft.trees import Chain, Draft, Frontier, Verdict, Widths, grow
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    ByShape,
    KSeq,
    NaiveMatch,
    NodeVerifier,
    OutcomeLaw,
    PathVerifier,
    Race,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    ScalableVerifier,
    SpecHubRule,
    SpeculativeSampling,
    TopDown,
    TopThenSampleRule,
    TraversalVerification,
    Valued,
    expected_accepted,
    most_drafts,
)
from polydraft.verifiers.nodes.importance_weighted import ImportanceWeighted
from polydraft.verifiers.nodes.optimal import Optimal

RULES: list[NodeVerifier] = [
    *(NaiveMatch(scheme) for scheme in (IID(), WithoutReplacement(), TopK(), TopThenSample(), Given())),
    RecursiveRejection(),
    RecursiveRejectionWithoutReplacement(),
    TopThenSampleRule(),
]
SQUARE = [(rule, (2, 2)) for rule in RULES] + [(SpeculativeSampling(), (1, 1))]
WIDE = [
    rule
    for rule in node_rules()
    if rule.lossless and rule.scheme != Product() and rule.scheme.independent and most_drafts(rule) > 1
]
"""The rules of two drafts and more at a node, with every scheme."""
NARROW = [(rule, widths) for rule in RULES for widths in ((1, 2), (2, 1))]


def cases(some: list[tuple[NodeVerifier, tuple[int, int]]]) -> pytest.MarkDecorator:
    names = [f"{rule.name}, {rule.scheme.name}, {widths}" for rule, widths in some]
    return pytest.mark.parametrize(("rule", "widths"), some, ids=names)


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


@cases(SQUARE + NARROW)
def test_two_tokens_follow_the_target(rule: NodeVerifier, widths: tuple[int, int]):
    for seed in range(3):
        world = World.random(seed)
        draft, probability = every_tree(world, rule.scheme, widths)
        assert float(probability.sum()) == pytest.approx(1, abs=1e-12)
        joint = (probability.view(-1, 1, 1) * two_token_law(world, rule, draft, widths[0])).sum(dim=0)
        torch.testing.assert_close(joint, world.joint.sum(dim=-1), rtol=0, atol=1e-12)


@cases(SQUARE + NARROW)
def test_the_law_of_the_verdict_is_the_node_laws_followed_down(rule: NodeVerifier, widths: tuple[int, int]):
    for seed in range(3):
        world = World.random(seed)
        draft, probability = every_tree(world, rule.scheme, widths)
        rows = world.target_rows(draft.tree)
        law = TopDown(rule).path_law(draft, rows)
        joint = text_law(world, draft, law)
        torch.testing.assert_close(joint.sum(dim=-1), two_token_law(world, rule, draft, widths[0]), rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.einsum("b,bxyz->xyz", probability, joint), world.joint, rtol=0, atol=1e-12)
        length = law.accepted(draft.tree)
        assert torch.equal(length, expected_accepted(TopDown(rule), draft, rows))
        assert 0 < float(probability @ length) < 2


def token_at(draft: Draft, rows: Tensor, row: int, node: int, weights: Tensor, uniforms: tuple[float, float]) -> int:
    """Draw an atom by its weight, and for the tail a token off the shortlist."""
    listed = draft.shortlist[row, node]
    weights = weights if float(weights.sum()) > 0 else to_atoms(rows[row, node], listed)
    atom = int(sample(weights, torch.tensor(uniforms[0], dtype=torch.float64)))
    if atom < len(listed):
        return int(listed[atom])
    off = without(rows[row, node], listed)
    return int(sample(off if float(off.sum()) > 0 else rows[row, node], torch.tensor(uniforms[1], dtype=torch.float64)))


def at_node(draft: Draft, rows: Tensor, row: int, node: int) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Return a node's children, their atoms, its draft row or rows, and the target on its atoms."""
    children = [child for child in draft.tree.children[row, node].tolist() if child >= 0]
    padded = torch.nn.functional.pad(draft.probs[row, node], (0, 1))
    return children, draft.atoms[row, children], padded, to_atoms(rows[row, node], draft.shortlist[row, node])


def walked(rule: NodeVerifier, draft: Draft, rows: Tensor, row: int, uniforms: list[float]) -> list[int]:
    """Return the path of one row, node by node with numbers, and the token that follows it."""
    path, node = list[int](), 0
    while True:
        children, atoms, padded, target = at_node(draft, rows, row, node)
        point, law = uniforms[node + 1], rule.law(atoms, padded, target) if children else None
        sums = [0.0, *([] if law is None else law.child.cumsum(dim=-1).tolist())]
        kept = sum(point >= one for one in sums[1:])
        if kept == len(children):
            left = min(max((point - sums[-1]) / max(1 - sums[-1], 1e-300), 0.0), 1.0)
            rest = target if law is None else law.rest
            return [*path, token_at(draft, rows, row, node, rest, (left, uniforms[0]))]
        node = children[kept]
        path.append(node)


def tried(
    rule: ScalableVerifier,
    draft: Draft,
    rows: Tensor,
    row: int,
    uniforms: list[float],
    node: int = 0,
    scale: float = 1.0,
) -> list[int] | None:
    """Return the path of one row to the first trial that succeeds, and the token that follows it."""
    children, atoms, padded, target = at_node(draft, rows, row, node)
    mass = scale * target
    if children:
        shares = rule.shares(atoms, padded, mass)
        mass = (mass - rule.marginal(padded, mass, torch.tensor(len(children)))).clamp_min(0)
        left = 1.0
        for child, share in zip(children, shares.tolist(), strict=True):
            chance = min(share / left, 1.0) if left > 0 else 0.0
            found = tried(rule, draft, rows, row, uniforms, child, chance)
            if found:
                return [child, *found]
            left = max(left - share, 0.0)
        whole = float(mass.sum()) + 1 - scale
        scale = float(mass.sum()) / whole if whole > 0 else 0.0
    if node and uniforms[node + 2] >= scale:
        return None
    return [token_at(draft, rows, row, node, mass, (uniforms[1], uniforms[0]))]


def kept_of(verdict: Verdict, row: int) -> list[int]:
    return [*verdict.path[row, : int(verdict.length[row])].tolist(), int(verdict.next_token[row])]


@pytest.mark.long(60)
@cases([(rule, widths) for rule in [*RULES, *WIDE] for widths in ((2, 2), (2, 1), (1, 2))])
@pytest.mark.parametrize("listed", [2, 4])
def test_the_walk_of_a_batch_is_that_of_each_row(rule: NodeVerifier, widths: tuple[int, int], listed: int):
    """Of shortlists so short that tokens come from the tail, and of all tokens; token by token, not in law alone."""
    many, world = 60, World.random(7, listed=listed)
    draft = grow(
        torch.zeros(many, dtype=torch.int64), Widths(widths), rule.scheme, world.propose, FastNoise.seeded(2, many)
    )
    draft.tree.valid[::5, -1] = False
    rows, uniforms = world.target_rows(draft.tree), FastNoise.seeded(4, many).uniform(draft.tree.tokens.shape[-1] + 1)
    verdict = TopDown(rule).verify(draft, rows, FastNoise.seeded(4, many))
    for row in range(many):
        assert kept_of(verdict, row) == walked(rule, draft, rows, row, uniforms[row].tolist())


@pytest.mark.parametrize(
    "rule", [Race(Product()), ImportanceWeighted(Product()), NaiveMatch(Product()), Optimal(IID()), KSeq()]
)
def test_several_rows_whole_rows_and_absent_nodes_are_read(rule: Any):
    many, world = 60, World.random(8)
    size = world.target[0].shape[-1]
    table = torch.rand(size, 2, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
        rows = table[frontier.tokens % size]
        rows = rows / rows.sum(dim=-1, keepdim=True)
        several = isinstance(rule.scheme, Product)
        return torch.arange(size).expand(*rows.shape[:2], size), rows if several else rows[..., 0, :]

    draft = grow(torch.zeros(many, dtype=torch.int64), Widths((2, 1)), rule.scheme, propose, FastNoise.seeded(3, many))
    draft.tree.valid[::3, [2, 4]] = False
    rows, uniforms = world.target_rows(draft.tree), FastNoise.seeded(4, many).uniform(6)
    for each in (draft, replace(draft, whole=True)):
        verdict = TopDown(rule).verify(each, rows, FastNoise.seeded(4, many))
        assert set(verdict.length.tolist()) == {0, 1, 2}
        for row in range(many):
            assert kept_of(verdict, row) == walked(rule, each, rows, row, uniforms[row].tolist())


@pytest.mark.long(40)
@cases([(rule, widths) for rule in WIDE if isinstance(rule, ScalableVerifier) for widths in ((2, 2), (2, 1), (1, 2))])
@pytest.mark.parametrize("listed", [2, 4])
def test_the_trials_of_a_batch_are_those_of_each_row(rule: Any, widths: tuple[int, int], listed: int):
    """Token by token, with absent nodes, and of a target that need not be on the shortlist."""
    many, world = 60, World.random(7, listed=listed)
    draft = grow(
        torch.zeros(many, dtype=torch.int64), Widths(widths), rule.scheme, world.propose, FastNoise.seeded(2, many)
    )
    draft.tree.valid[::5, -1] = False
    rows, uniforms = world.target_rows(draft.tree), FastNoise.seeded(4, many).uniform(draft.tree.tokens.shape[-1] + 2)
    verdict = BottomUp(rule).verify(draft, rows, FastNoise.seeded(4, many))
    for row in range(many):
        assert kept_of(verdict, row) == tried(rule, draft, rows, row, uniforms[row].tolist())


@cases(SQUARE)
def test_the_walk_follows_the_node_laws(rule: NodeVerifier, widths: tuple[int, int]):
    """For one tree, by chi-square with false-alarm rate 1e-6."""
    many, world = 2**13, World.random(4)
    trees, probability = every_tree(world, rule.scheme, widths)
    likeliest = probability.argmax()
    draft = as_draft(world, widths, trees.atoms[likeliest].repeat(many, 1))
    verdict = TopDown(rule).verify(draft, world.target_rows(draft.tree), FastNoise.seeded(0, many))
    tokens = completed(world, verdict.tokens(draft.tree))
    check_by_chi_square(tokens[:, :2], two_token_law(world, rule, trees, widths[0])[likeliest])


@cases(SQUARE)
def test_three_tokens_of_grown_and_verified_trees_follow_the_target(rule: NodeVerifier, widths: tuple[int, int]):
    """From drafting to the bonus token, by chi-square with false-alarm rate 1e-6."""
    many, world, noise = 2**13, World.random(5), FastNoise.seeded(1, 2**13)
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
    many, world, noise = 2**13, World.random(5), FastNoise.seeded(1, 2**13)
    draft = grow(torch.zeros(many, dtype=torch.int64), Widths((2, 2)), TopK(), world.propose, noise)
    verdict = TopDown(RecursiveRejection()).verify(draft, world.target_rows(draft.tree), noise)
    with pytest.raises(AssertionError):
        check_by_chi_square(completed(world, verdict.tokens(draft.tree)), world.joint)


LONE = [
    SpeculativeSampling(),
    RecursiveRejection(),
    RecursiveRejectionWithoutReplacement(),
    TopThenSampleRule(),
    SpecHubRule(),
    KSeq(),
    *(ImportanceWeighted(scheme) for scheme in (IID(), Product())),
    *(Race(scheme) for scheme in (IID(), Product())),
    *(Optimal(scheme) for scheme in (WithoutReplacement(), TopThenIID(0), TopThenIID(1), ConditionalPoisson())),
]
WHOLE = [
    *map(TopDown, LONE),
    BlockVerification(),
    *(BottomUp(rule) for rule in (Optimal(), Optimal(TopThenIID(1)), RecursiveRejection(), TopThenSampleRule())),
    *(rule(scheme) for rule in (TraversalVerification, Valued) for scheme in (IID(), WithoutReplacement())),
]


@pytest.mark.parametrize("verifier", WHOLE, ids=[f"{verifier.name}, {verifier.scheme.name}" for verifier in WHOLE])
def test_lists_of_all_tokens_need_no_reordering(verifier: PathVerifier):
    """A chain drawn from whole rows: laws and verdicts are those of the same draft without the mark.

    Some chains end early; drafts that are certain are not drawn from the row.
    """
    many, world = 400, World.random(8)
    size = world.target[0].shape[-1]
    table = torch.rand(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table[:, 1], table[2] = 0.0, torch.nn.functional.one_hot(torch.tensor(3), size)

    def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
        rows = table[frontier.tokens % size]
        rows = rows / rows.sum(dim=-1, keepdim=True)
        product = isinstance(verifier.scheme, Product)
        return torch.arange(size).expand(rows.shape), rows.unsqueeze(-2) if product else rows

    draft = grow(torch.zeros(many, dtype=torch.int64), Chain(2), verifier.scheme, propose, FastNoise.seeded(3, many))
    draft.tree.valid[::3, 2] = False
    rows = world.target_rows(draft.tree)
    rows[1::3, 0] = table[0] / table[0].sum()  # a row of which nothing is rejected
    marked = replace(draft, whole=True)
    one, two = (verifier.path_law(each, rows) for each in (draft, marked))
    torch.testing.assert_close(one.end, two.end, rtol=0, atol=1e-12)
    torch.testing.assert_close(one.next_token(draft, rows), two.next_token(draft, rows), rtol=0, atol=1e-12)
    before, after = (verifier.verify(each, rows, FastNoise.seeded(4, many)) for each in (draft, marked))
    assert set(before.length.tolist()) == {0, 1, 2}
    assert torch.equal(before.path, after.path) and torch.equal(before.next_token, after.next_token)


def test_a_rule_for_each_shape_is_that_rule():
    """Chains are verified as blocks, trees with branches node by node; both are drawn by one scheme."""
    verifier, world, roots = ByShape(), World.random(2), torch.zeros(60, dtype=torch.int64)
    for widths, rule in (((1, 1), verifier.chain), ((2, 1), verifier.tree)):
        draft = grow(roots, Widths(widths), verifier.scheme, world.propose, FastNoise.seeded(3, 60))
        rows = world.target_rows(draft.tree)
        assert torch.equal(verifier.path_law(draft, rows).end, rule.path_law(draft, rows).end)
        found, expected = (one.verify(draft, rows, FastNoise.seeded(4, 60)) for one in (verifier, rule))
        assert torch.equal(found.path, expected.path) and torch.equal(found.next_token, expected.next_token)
    with pytest.raises(UnpairedScheme, match="must verify the same drafts, but are block verification of iid and"):
        ByShape(chain=BlockVerification())


class Reluctant(RecursiveRejection):
    """A rule that accepts no draft, exact all the same."""

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        return OutcomeLaw(torch.zeros_like(target_probs[..., : drafts.shape[-1]]), target_probs)


def test_a_rule_derived_from_another_keeps_its_own_law_on_chains():
    world, roots = World.random(2), torch.zeros(60, dtype=torch.int64)
    everything = replace(world, shortlist=(torch.arange(4), torch.arange(4).expand(4, 4)), draft=world.target[:2])
    draft = grow(roots, Widths((1, 1)), IID(), everything.propose, FastNoise.seeded(3, 60))
    rows = world.target_rows(draft.tree)
    found = [
        TopDown(rule).verify(replace(draft, whole=True), rows, FastNoise.seeded(4, 60)).length
        for rule in (RecursiveRejection(), Reluctant())
    ]
    assert bool(found[0].any()) and not bool(found[1].any())
