"""Trees that follow the draft: numbering, budgets, what is looked at and when, and what each policy does."""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.probs import Noise
from polydraft.schemes import IID, Coupled, Product, Scheme, TopK, TopThenSample, WithoutReplacement
from polydraft.trees import (
    BestFirst,
    Confident,
    Draft,
    Eagle2,
    EntropyBound,
    ExpectedAcceptance,
    Frontier,
    GrowingPolicy,
    Merged,
    PathProbability,
    TreePolicy,
    grow,
)
from polydraft.trees.growing import Drawn, Opened

VOCABULARY, LISTED = 9, 5


@dataclass
class Table:
    """Draft laws by the last token, of the given sharpness; `members` rows each, or a plain row."""

    sharp: float = 2.0
    members: int = 0
    asked: list[Frontier] = field(default_factory=list)

    def __post_init__(self):
        stream = torch.Generator().manual_seed(7)
        self.shortlist = torch.rand(VOCABULARY, VOCABULARY, generator=stream).argsort(dim=-1)[:, :LISTED]
        shape = (VOCABULARY, self.members, LISTED) if self.members else (VOCABULARY, LISTED)
        self.probs = (self.sharp * torch.randn(shape, generator=stream)).softmax(dim=-1)

    def __call__(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        self.asked.append(frontier)
        return self.shortlist[frontier.tokens], self.probs[frontier.tokens]


POLICIES: dict[str, GrowingPolicy] = {
    "best first": BestFirst(10, depth=4, children=3, beam=4),
    "best first, narrow": BestFirst(6, depth=6, children=2, beam=1),
    "expected": ExpectedAcceptance(10, depth=4, children=3, beam=4),
    "confident": Confident((3, 2, 1), 0.3),
    "confident path": Confident((2, 2, 2), 0.15, PathProbability()),
    "confident entropy": Confident((3, 1, 1), 0.5, EntropyBound(0.2)),
}
SCHEMES: list[Scheme] = [IID(), WithoutReplacement(), TopThenSample(), TopK(), Coupled(), Product()]
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


def grown(policy: TreePolicy, scheme: Scheme, rows: int = 5, seed: int = 0, table: Table | None = None) -> Draft:
    table = table or Table(members=2 if scheme == Product() else 0)
    return grow(torch.arange(rows), policy, scheme, table, Noise.from_seed(seed, rows))


@each_scheme
@each_policy
def test_a_grown_tree_is_a_tree_and_its_children_come_from_their_parents_rows(policy: GrowingPolicy, scheme: Scheme):
    table = Table(members=2 if scheme == Product() else 0)
    draft = grown(policy, scheme, table=table)
    tree, nodes = draft.tree, draft.tree.tokens.shape[1]
    assert nodes <= policy.shape.size
    assert int((tree.depth * tree.valid).max()) <= policy.shape.depth
    assert int((tree.children >= 0).sum(dim=-1).max()) <= policy.shape.max_children
    assert bool((tree.parents[:, 1:] < torch.arange(1, nodes)).all() and (tree.parents[:, 1:] >= 0).all())
    assert bool((tree.valid.sort(dim=-1, descending=True).values == tree.valid).all()), "padding comes last"
    for row, node in tree.valid.nonzero().tolist():
        children = [child for child in tree.children[row, node].tolist() if child >= 0]
        if not children:
            assert not bool(draft.probs[row, node].any()) and bool((draft.shortlist[row, node] == -1).all())
            continue
        token = tree.tokens[row, node]
        assert torch.equal(draft.shortlist[row, node], table.shortlist[token])
        assert torch.equal(draft.probs[row, node], table.probs[token])
        atoms = draft.atoms[row, children]
        assert draft.shortlist[row, node, atoms].tolist() == tree.tokens[row, children].tolist()
        assert float(scheme.probability(draft.probs[row, node], atoms)) > 0


@each_scheme
@each_policy
def test_the_numbers_of_scored_nodes_lead_back_to_them(policy: GrowingPolicy, scheme: Scheme):
    """A drafter finds the keys of node i under number `scored[i]`: token and ancestors must be those it was shown."""
    table = Table(members=2 if scheme == Product() else 0)
    draft = grown(policy, scheme, table=table)
    asked = {number: (one, place) for one in table.asked for place, number in enumerate(one.nodes)}
    assert [one.nodes.start for one in table.asked[1:]] == [one.nodes.stop for one in table.asked[:-1]]
    assert table.asked[-1].nodes.stop <= policy.shape.size
    for row, node in draft.tree.valid.nonzero().tolist():
        number = int(draft.scored[row, node])
        if number < 0:
            assert not bool((draft.tree.children[row, node] >= 0).any())
            continue
        frontier, place = asked[number]
        assert frontier.tokens[row, place] == draft.tree.tokens[row, node]
        assert frontier.depth == draft.tree.depth[row, node]
        above = draft.tree.ancestors[row, node].nonzero().squeeze(-1)
        seen = frontier.ancestors[row, place].nonzero().squeeze(-1).tolist()
        assert sorted(draft.scored[row, above].tolist()) == seen


@each_scheme
@each_policy
def test_a_row_is_what_it_is_alone(policy: GrowingPolicy, scheme: Scheme):
    together = grown(policy, scheme, rows=5)
    for row in range(5):
        table = Table(members=2 if scheme == Product() else 0)
        one = grow(torch.tensor([row]), policy, scheme, table, Noise.of_row(0, row))
        size = one.tree.tokens.shape[1]
        assert bool(one.tree.valid.all()) and int(together.tree.valid[row].sum()) == size
        assert torch.equal(one.tree.tokens[0], together.tree.tokens[row, :size])
        assert torch.equal(one.tree.parents[0], together.tree.parents[row, :size])
        assert torch.equal(one.atoms[0], together.atoms[row, :size])


def test_rows_have_shapes_of_their_own():
    shapes = {tuple(row) for row in grown(POLICIES["best first"], TopK(), rows=9).tree.parents.tolist()}
    assert len(shapes) > 2


@dataclass(frozen=True)
class Shifted(IID):
    """Independent drafts of which those at one depth are exchanged for others."""

    depth: int = 0
    seen: list[Tensor] = field(default_factory=list)

    def sample(self, draft_probs: Tensor, counts: Tensor, uniforms: Tensor, k: int) -> Tensor:
        self.seen.append(counts.clone())
        drafts = super().sample(draft_probs, counts, uniforms, k)
        moved = (drafts + 1) % draft_probs.shape[-1]
        return moved.where(drafts >= 0, -1) if len(self.seen) - 1 == self.depth else drafts


@each_policy
@pytest.mark.parametrize("depth", [0, 1])
def test_counts_do_not_depend_on_the_children_drawn(policy: GrowingPolicy, depth: int):
    """Other draws at one depth leave all counts up to this depth as they are, and change some further down."""
    counts = []
    for one in (depth, 99):
        scheme = Shifted(depth=one)
        grown(policy, scheme, rows=9)
        counts.append(scheme.seen)
    for before, after in zip(counts[0][: depth + 1], counts[1][: depth + 1], strict=True):
        assert torch.equal(before, after)
    if policy == POLICIES["best first"]:
        assert [one.tolist() for one in counts[0]] != [one.tolist() for one in counts[1]]


# --- Best first ------------------------------------------------------------------------------------------------------


# --- Expected acceptance ---------------------------------------------------------------------------------------------


def test_places_are_worth_what_they_are_expected_to_be_accepted_for():
    """An overlap of 0.6 with a half for later drafts: 0.6, 0.4 * 0.3 and 0.4 * 0.7 * 0.3."""
    one = torch.ones(1, 1, dtype=torch.float64)
    opened = Opened(0, one > 0, one, one.unsqueeze(-1), torch.tensor([0]), None, torch.tensor([[0]]), lambda: 0.6 * one)
    policy = ExpectedAcceptance(9, children=3, least=0.1, later=0.5)
    assert policy.acceptance(opened, 3)[0, 0].tolist() == pytest.approx([0.6, 0.12, 0.084])
    assert policy.counts(opened).tolist() == [[2]], "0.084 is less than the least"


def test_without_a_confidence_the_rows_entropy_speaks():
    rows, one = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]), torch.ones(1, 2, dtype=torch.float64)
    opened = Opened(0, one > 0, one, rows, torch.tensor([0]), None, torch.tensor([[0, 1]]))
    found = ExpectedAcceptance(4).acceptance(opened, 1)[0, :, 0].tolist()
    assert found == pytest.approx([1 - (0.2 * 0.693147) ** 0.5, 1], abs=1e-6)


def test_a_path_is_the_product_of_what_was_expected_at_its_nodes():
    """Sure nodes get a chain and doubtful ones end it, whatever the tokens' own probabilities are."""
    sizes = {}
    for sure in (0.9, 0.1):
        overlap = partial(_constant, sure)
        policy = ExpectedAcceptance(8, depth=8, children=1, beam=1, least=0.05)
        draft = grow(torch.arange(3), policy, IID(), Table(), Noise.from_seed(1, 3), overlap)
        sizes[sure] = (draft.tree.valid.sum(-1) - 1).tolist()
    assert sizes == {0.9: [8] * 3, 0.1: [1] * 3}, "0.1 ** 2 is less than the least, 0.9 ** 8 is not"


def _constant(value: float, frontier: Frontier) -> Tensor:
    return torch.full(frontier.tokens.shape, value)


@pytest.mark.parametrize("sharp", [0.1, 2.0, 20.0])
def test_the_budget_is_kept_and_used_up(sharp: float):
    policy = BestFirst(10, depth=4, children=3, beam=4)
    tree = grown(policy, TopK(), rows=9, table=Table(sharp)).tree
    assert (tree.valid.sum(dim=-1) - 1).tolist() == [10] * 9


def test_a_sure_draft_goes_deep_and_a_doubtful_one_wide():
    depths = []
    for sharp in (0.1, 20.0):
        tree = grown(BestFirst(8, depth=6, children=4), TopK(), rows=9, table=Table(sharp)).tree
        depths.append((tree.depth * tree.valid).amax(dim=-1).double().mean())
    assert float(depths[0]) < 3 and float(depths[1]) > 5


def test_the_deepest_level_goes_to_the_likeliest_places_of_all():
    """With one level left nothing is promised: 3 places among two rows of 0.6, 0.3, 0.1 under paths 0.7 and 0.3."""
    rows = torch.tensor([[[0.6, 0.3, 0.1], [0.1, 0.6, 0.3]]])
    path, there = torch.tensor([[0.7, 0.3]], dtype=torch.float64), torch.tensor([[True, True]])
    places = torch.tensor([[0, 1]])
    opened = Opened(1, there, path, rows, torch.tensor([2]), None, places)
    assert BestFirst(5, depth=2, children=3).counts(opened).tolist() == [[2, 1]]
    assert BestFirst(4, depth=2, children=3).counts(opened).tolist() == [[2, 0]]
    assert BestFirst(9, depth=2, children=2).counts(opened).tolist() == [[2, 2]]


def test_what_is_promised_below_counts_against_what_is_at_hand():
    """A root of 0.8 and 0.2: its first child promises 0.64 and 0.512, which are worth more than the second child."""
    rows, one = torch.tensor([[[0.8, 0.2]]]), torch.ones(1, 1, dtype=torch.float64)
    opened = Opened(0, one > 0, one, rows, torch.tensor([0]), None, torch.tensor([[0]]))
    counts = {drafts: int(BestFirst(drafts, depth=9, children=2).counts(opened)) for drafts in (1, 4, 7, 8, 9)}
    # 0.8 ** 7 = 0.2097 is worth more than 0.2, and 0.8 ** 8 = 0.168 is not
    assert counts == {1: 1, 4: 1, 7: 1, 8: 2, 9: 2}


def test_the_beam_limits_the_rows_of_one_depth():
    table = Table(0.1)
    grown(BestFirst(12, depth=4, children=4, beam=2), TopK(), table=table)
    assert [len(one.nodes) for one in table.asked] == [1, 2, 2] or [len(one.nodes) for one in table.asked] == [1, 2]


# --- EAGLE-2 ---------------------------------------------------------------------------------------------------------


def test_eagle_2_keeps_the_likeliest_paths_of_all_that_were_expanded():
    table, policy = Table(1.0), Eagle2(3, 3, 7)
    draft = grow(torch.tensor([4]), policy, TopK(), table, Noise.from_seed(0, 1))
    assert [len(one.nodes) for one in table.asked] == [1, 3, 3]
    expected = expanded(table, 4, width=3, depth=3)
    best = sorted(expected, key=lambda path: -expected[path])[:7]
    assert {tuple(path_of(draft, 0, node)) for node in range(1, 8)} == set(best)


def expanded(table: Table, root: int, width: int, depth: int) -> dict[tuple[int, ...], float]:
    """EAGLE-2's first phase, path by path."""
    every: dict[tuple[int, ...], float] = {}
    beam: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        drawn: dict[tuple[int, ...], float] = {}
        for path, score in beam.items():
            last = path[-1] if path else root
            top = table.probs[last].topk(width)
            for chance, atom in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                drawn[(*path, int(table.shortlist[last, atom]))] = score * chance
        every |= drawn
        beam = dict(sorted(drawn.items(), key=lambda one: -one[1])[:width])
    return every


def path_of(draft: Draft, row: int, node: int) -> list[int]:
    nodes = draft.tree.ancestors[row, node, 1:].nonzero().squeeze(-1) + 1
    return draft.tree.tokens[row, nodes].tolist()


def test_of_equal_scores_the_parent_is_kept():
    """Rows that are sure give every path the score 1: what is kept must still be a tree."""
    table = Table()
    table.probs = torch.nn.functional.one_hot(torch.zeros(VOCABULARY, dtype=torch.int64), LISTED).float()
    tree = grown(Eagle2(2, 4, 3), TopK(), rows=2, table=table).tree
    assert tree.parents.tolist() == [[-1, 0, 1, 2]] * 2


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), TopThenSample(), Product(), Coupled()])
def test_eagle_2_refuses_sampled_drafts(scheme: Scheme):
    with pytest.raises(UnpairedScheme, match=f"exact for deterministic drafts .* only, not {scheme.name}"):
        grown(Eagle2(2, 2, 3), scheme)


def test_merged_trees_refuse_other_drafts_than_those_of_several_rows():
    with pytest.raises(UnpairedScheme, match="works with drafts that are product, not iid"):
        grown(Merged((1, 1)), IID())
    with pytest.raises(InvalidParameter, match="merges 3 members, but the drafter has 2"):
        grown(Merged((1, 1), 3), Product())


# --- Confidence ------------------------------------------------------------------------------------------------------


@each_scheme
def test_nothing_is_drafted_below_a_doubtful_token_and_the_token_itself_stays(scheme: Scheme):
    table = Table(members=2 if scheme == Product() else 0)
    draft = grown(Confident((2, 2, 1), 0.3), scheme, rows=9, table=table)
    doubtful = sure = 0
    for row, node in draft.tree.valid.nonzero().tolist():
        deep = int(draft.tree.depth[row, node])
        if not 0 < deep < 3:
            continue
        law = table.probs[draft.tree.tokens[row, draft.tree.parents[row, node]]]
        chance = float((law.mean(dim=0) if law.dim() == 2 else law)[draft.atoms[row, node]])
        children = int((draft.tree.children[row, node] >= 0).sum())
        assert children == ((2, 2, 1)[deep] if chance >= 0.3 else 0)
        doubtful, sure = doubtful + (chance < 0.3), sure + (chance >= 0.3)
    assert doubtful and sure


def test_no_pass_is_spent_where_no_row_goes_on():
    table = Table(0.1)
    grown(Confident((1,) * 6, 0.9), TopK(), table=table)
    assert len(table.asked) == 1


def test_the_entropy_bound_is_that_of_the_row_above():
    rows = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    nodes = torch.tensor([[0, 1, 1]])
    half = torch.full((1, 3), 0.5)
    drawn = Drawn(1, half > 0, half.double(), nodes, rows, half, torch.tensor([3]), nodes, nodes)
    found = EntropyBound(0.2).of(drawn)
    assert found[0].tolist() == pytest.approx([1 - (0.2 * 0.693147) ** 0.5, 1, 1], abs=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BestFirst(0),
        lambda: BestFirst(4, depth=0),
        lambda: ExpectedAcceptance(4, later=1.5),
        lambda: ExpectedAcceptance(4, least=-0.1),
        lambda: Eagle2(2, 2, 0),
        lambda: Merged((1, 0)),
        lambda: Merged((1,), 0),
        lambda: Confident((1,), 1.1),
        lambda: Confident((1,), -0.1),
    ],
)
def test_numbers_out_of_range_are_refused(make):
    with pytest.raises(InvalidParameter):
        make()
