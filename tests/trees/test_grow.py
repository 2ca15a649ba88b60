from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.probs import Noise
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Given,
    Product,
    Scheme,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
)
from polydraft.trees import Draft, Fixed, Frontier, TreePolicy, TreeShape, Widths, grow

VOCABULARY, LISTED = 7, 4
SHAPE = TreeShape(((3,), (2, 0, 1), (2, 1)))

SCHEMES: list[Scheme] = [
    IID(),
    WithoutReplacement(),
    TopK(),
    TopThenSample(),
    TopThenIID(1),
    ConditionalPoisson(),
    Product(),
    Given(),
]
REPEATING = {IID(), TopThenIID(1), Product()}
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


@dataclass
class Table:
    """Draft laws by the last token; `support` atoms of each row have mass; `members` rows each, or a plain row."""

    support: int = LISTED
    members: int = 0
    asked: list[Frontier] = field(default_factory=list)

    def __post_init__(self):
        stream = torch.Generator().manual_seed(0)
        self.shortlist = torch.rand(VOCABULARY, VOCABULARY, generator=stream).argsort(dim=-1)[:, :LISTED]
        shape = (VOCABULARY, self.members, LISTED) if self.members else (VOCABULARY, LISTED)
        mass = torch.rand(shape, generator=stream) + 0.1
        mass[..., self.support :] = 0
        self.probs = mass / mass.sum(dim=-1, keepdim=True)

    def __call__(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        self.asked.append(frontier)
        return self.shortlist[frontier.tokens], self.probs[frontier.tokens]


def table_for(scheme: Scheme, support: int = LISTED) -> Table:
    return Table(support, members=2 if scheme == Product() else 0)


def grown(scheme: Scheme, table: Table, rows: int = 3, seed: int = 0, shape: TreeShape = SHAPE) -> Draft:
    return grow(torch.arange(rows), Fixed(shape), scheme, table, Noise.from_seed(seed, rows))


@each_scheme
def test_every_child_comes_from_its_parents_shortlist(scheme: Scheme):
    table = table_for(scheme)
    draft = grown(scheme, table)
    tree = draft.tree
    assert tree.tokens[:, 0].tolist() == [0, 1, 2]
    assert tree.parents.tolist() == [list(SHAPE.parents)] * 3
    assert bool(tree.valid.all())
    assert draft.atoms[:, 0].tolist() == [-1] * 3
    for b, node in product(range(3), range(1, SHAPE.size)):
        parent = SHAPE.parents[node]
        above = tree.tokens[b, parent]
        assert torch.equal(draft.shortlist[b, parent], table.shortlist[above])
        assert torch.equal(draft.probs[b, parent], table.probs[above])
        assert tree.tokens[b, node] == table.shortlist[above, draft.atoms[b, node]]


@each_scheme
def test_siblings_are_the_scheme_s_drafts(scheme: Scheme):
    """Probability of the siblings in order is positive; where no randomness is left they are known."""
    table = table_for(scheme)
    draft = grown(scheme, table)
    drafts = draft.drafted_atoms()
    for b, node in product(range(3), range(SHAPE.size)):
        siblings = drafts[b, node][drafts[b, node] >= 0]
        if len(siblings):
            chance = scheme.probability(table.probs[draft.tree.tokens[b, node]], siblings)
            known = scheme.deterministic or (scheme == TopThenIID(1) and len(siblings) == 1)
            assert chance == 1 if known else 0 < chance < 1


@each_scheme
def test_nodes_without_support_have_no_children_and_their_children_none(scheme: Scheme):
    draft = grown(scheme, table_for(scheme, support=2))
    valid, parents = draft.tree.valid, draft.tree.parents
    expected = torch.ones_like(valid)
    if scheme not in REPEATING:
        expected[:, 3] = expected[:, 6] = False  # the root's third child, and that one's child
    assert torch.equal(valid, expected)
    assert bool((draft.atoms[~valid] == -1).all())
    assert bool((valid[:, 1:] <= valid.gather(-1, parents[:, 1:])).all())
    assert bool(((draft.tree.tokens >= 0) & (draft.tree.tokens < VOCABULARY)).all())


def test_each_depth_is_asked_for_once_and_told_who_its_ancestors_are():
    table = Table()
    draft = grown(IID(), table)
    assert [(frontier.depth, frontier.nodes) for frontier in table.asked] == [
        (0, range(1)),
        (1, range(1, 4)),
        (2, range(4, 6)),
    ]
    for frontier in table.asked:
        nodes = slice(frontier.nodes.start, frontier.nodes.stop)
        assert torch.equal(frontier.tokens, draft.tree.tokens[:, nodes])
        assert torch.equal(frontier.ancestors, draft.tree.ancestors[:, nodes, : nodes.stop])


def test_leaves_have_no_law():
    draft = grown(IID(), Table())
    leaves = slice(SHAPE.levels[-1].start, None)
    assert not bool(draft.probs[:, leaves].any())
    assert bool((draft.shortlist[:, leaves] == -1).all())


def test_the_shape_does_not_depend_on_what_is_drawn():
    one, two = grown(IID(), Table(), seed=1), grown(IID(), Table(), seed=2)
    assert not torch.equal(one.tree.tokens, two.tree.tokens)
    assert torch.equal(one.tree.parents, two.tree.parents)


def test_the_shape_is_decided_before_the_first_draft_row_is_known():
    table = Table()

    class Fickle(TreePolicy):
        """A policy that changes its mind when it sees a draft row."""

        @property
        def shape(self) -> TreeShape:
            return TreeShape(((1,), (1,), (1,))) if table.asked else SHAPE

    draft = grow(torch.arange(2), Fickle(), IID(), table, Noise.from_seed(0, 2))
    assert draft.tree.parents[0].tolist() == list(SHAPE.parents)


@each_scheme
def test_a_row_does_not_depend_on_the_rows_beside_it(scheme: Scheme):
    alone, together = grown(scheme, table_for(scheme), rows=1), grown(scheme, table_for(scheme), rows=3)
    assert torch.equal(alone.tree.tokens[0], together.tree.tokens[0])
    assert torch.equal(alone.probs[0], together.probs[0])


def test_one_child_is_drawn_by_the_draft_row():
    """Chi-square with false-alarm rate 1e-6, 3 degrees of freedom."""
    many, table = 4000, Table()
    root = torch.zeros(many, dtype=torch.int64)
    for scheme in (IID(), WithoutReplacement(), TopThenSample(), TopThenIID(0), ConditionalPoisson(), SpecHub()):
        draft = grow(root, Widths((1,)), scheme, table, Noise.from_seed(3, many))
        found = torch.bincount(draft.atoms[:, 1], minlength=LISTED)
        wanted = table.probs[0] * many
        assert float(((found - wanted) ** 2 / wanted).sum()) < 30.66


def test_siblings_are_drawn_in_turn_from_their_parents_rows():
    """Chi-square with false-alarm rate 1e-6, 3 degrees of freedom: child j has the law of row j mod 2 only."""
    many, table = 4000, Table(members=2)
    draft = grow(torch.zeros(many, dtype=torch.int64), Widths((3,)), Product(), table, Noise.from_seed(3, many))
    assert draft.probs.shape == (many, 4, 2, LISTED)
    for child in (1, 2, 3):
        found = torch.bincount(draft.atoms[:, child], minlength=LISTED)
        own, other = (
            float(((found - many * wanted) ** 2 / (many * wanted)).sum())
            for wanted in (table.probs[0, (child - 1) % 2], table.probs[0, child % 2])
        )
        assert own < 30.66 < other


def test_spechub_grows_trees_of_two_children_at_most():
    draft = grown(SpecHub(), Table(), shape=TreeShape(((2,), (2, 1))))
    assert bool(draft.tree.valid.all())
    with pytest.raises(InvalidParameter, match="at most 2 drafts per node, not 3"):
        grown(SpecHub(), Table())


def test_nodes_of_one_depth_are_drawn_with_noise_of_their_own():
    """Where two siblings hold the same token, their children have the same law, but differ now and then."""
    many = 400
    root = torch.zeros(many, dtype=torch.int64)
    draft = grow(root, Widths((2, 1)), IID(), Table(), Noise.from_seed(0, many))
    twins = draft.atoms[:, 1] == draft.atoms[:, 2]
    assert int(twins.sum()) > 50
    agree = (draft.atoms[:, 3] == draft.atoms[:, 4])[twins].double().mean()
    assert 0.1 < agree < 0.7


def test_the_root_alone_needs_no_drafter():
    table = Table()
    draft = grown(IID(), table, shape=TreeShape(()))
    assert draft.tree.tokens.tolist() == [[0], [1], [2]]
    assert table.asked == []
    assert draft.drafted_atoms().tolist() == [[[-1]]] * 3
