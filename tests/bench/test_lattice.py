"""`bench lattice`: equal numbers of drafts, the catalogue's rules, and shares of an optimum that nobody exceeds."""

import pytest
import torch
from growing import DeepWorld, among, every_growth, target_rows
from new_rule import LINE

from polydraft.catalogue import tables
from polydraft.probs import Noise
from polydraft.schemes import IID, Scheme, SpecHub, TopK, WithoutReplacement, most_drafts_of
from polydraft.trees import Chain, Draft, TokenTree, Topology, TreePolicy, Widths
from polydraft.verifiers import BottomUp, Optimal, PathVerifier, SpeculativeSampling, TopDown
from polydraft_lab.subjects.lattice import Root, Watching
from polydraft_lab.subjects.lattice_groups import GROUPS, LatticeGroup, branches

DRAWN = [group for group in GROUPS if group.make is branches]


def lengths(policy: TreePolicy) -> list[int]:
    """Return the lengths of a tree's branches, which begin at the root."""
    counts: list[tuple[int, ...]] = [*policy.shape.counts]
    return [1 + sum(len(level) > place for level in counts[1:]) for place in range(counts[0][0])]


@pytest.mark.parametrize("group", DRAWN, ids=lambda one: one.name)
def test_branches_have_as_many_drafts_as_a_chain(group: LatticeGroup) -> None:
    for drafts in range(1, 41):
        policy = group.policy(drafts)
        found = lengths(policy)
        assert policy.shape.size == drafts + 1 == sum(found) + 1
        assert max(found) - min(found) <= 1 and len(found) == policy.shape.max_children
        assert len(found) <= most_drafts_of(group.scheme) and (drafts == 1 or len(found) > 1)
    assert lengths(group.policy(6)) == [3, 3] and lengths(group.policy(9)) == [5, 4]
    assert lengths(group.policy(16)) == ([8, 8] if group.scheme == SpecHub() else [6, 5, 5])


def group_of(shape: str, scheme: Scheme) -> LatticeGroup:
    return next(one for one in GROUPS if (one.shape, one.scheme) == (shape, scheme))


def test_all_rules_of_a_scheme_are_asked_and_a_lifted_optimal_one_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    independent = group_of("branches", IID()).rules(16)
    for name in ("k-seq", "importance weighted", "race", "recursive rejection", "optimal"):
        assert {f"{name}, top down", f"{name}, bottom up"} <= independent.keys()
    assert "traversal" in independent and [*independent][-1] == "optimal, bottom up"
    assert "traversal" in group_of("branches", WithoutReplacement()).rules(16)
    assert {"spechub, top down", "spechub, bottom up"} <= group_of("branches", SpecHub()).rules(16).keys()
    assert [*group_of("chain", IID()).rules(6)][-1] == "block verification"
    assert [*group_of("best first, top tokens", TopK()).rules(6)] == ["naive match, top down"]
    for group in GROUPS:
        assert all(rule.scheme == group.scheme and rule.lossless for rule in group.rules(6).values())
    monkeypatch.setattr(tables, "RULES", (*tables.RULES, LINE))
    assert [*group_of("branches", IID()).rules(6)][-2:] == ["first only, top down", "optimal, bottom up"]


def test_a_bottom_up_rule_with_too_many_orders_is_left_out() -> None:
    wide = group_of("branches", WithoutReplacement())
    name = "recursive rejection without replacement, {}"
    assert name.format("bottom up") in wide.rules(16) and name.format("bottom up") not in wide.rules(40)
    assert name.format("top down") in wide.rules(40)


def averaged(rule: PathVerifier, policy: TreePolicy, seed: int) -> tuple[float, float, float]:
    """Return what a rule keeps of a root's drafts over all drafts: by its verdicts, by `Root`, and the optimum."""
    world = DeepWorld.random(seed)
    draft, chance = every_growth(world, rule.scheme, policy)
    rows = target_rows(world, draft)
    law = rule.path_law(draft, rows)
    roots = [
        Root.of(one, rows[[row]]).kept(rule, rule.path_law(one, rows[[row]]))
        for row, one in ((row, among(draft, [row])) for row in range(len(chance)))
    ]
    best = Root.of(among(draft, [0]), rows[[0]]).optimum(rule.scheme)
    return float(((1 - law.end[:, 0]) * chance).sum()), float(torch.tensor(roots) @ chance.to(torch.float32)), best


RULES = [
    (name, rule, group)
    for group in (*DRAWN, group_of("chain", IID()), group_of("expected acceptance", WithoutReplacement()))
    for name, rule in group.rules(6).items()
]


@pytest.mark.long(8)
@pytest.mark.parametrize(("name", "rule", "group"), RULES, ids=[f"{group.name}, {name}" for name, _, group in RULES])
def test_what_is_kept_of_a_roots_drafts_is_what_verdicts_say_and_no_more_than_the_optimum(
    name: str, rule: PathVerifier, group: LatticeGroup
) -> None:
    """For every rule, lifted or for whole trees: averaged over all drafts, by enumeration."""
    policy = Chain(2) if group.shape == "chain" else Widths((2, 1))
    said, found, best = averaged(rule, policy, 5)
    assert found == pytest.approx(said, abs=1e-6) and found <= best + 1e-6
    if "optimal" in name or (group.shape == "chain" and "naive" not in name):
        assert found == pytest.approx(best, abs=1e-6)
    if "naive" in name:
        assert found < best - 0.01


def test_a_root_without_drafts_keeps_none() -> None:
    tree = Draft.nothing(torch.tensor([1]))
    root = Root.of(tree, torch.tensor([[[0.3, 0.4, 0.3]]]))
    rule = TopDown(Optimal(IID()))
    assert root.optimum(IID()) == 0
    assert root.kept(rule, rule.path_law(tree, torch.tensor([[[0.3, 0.4, 0.3]]]))) == 0


def test_rules_are_asked_what_they_accept_of_a_tree_on_average() -> None:
    target = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]]], dtype=torch.float64)
    drafted = torch.tensor([[[0.2, 0.6, 0.2], [0.4, 0.4, 0.2], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    atoms = torch.tensor([[-1, 1, 0]])
    tree = TokenTree(atoms.clamp_min(0), Topology(torch.tensor([[-1, 0, 1]])), atoms > -2)
    draft = Draft(tree, atoms, torch.arange(3).expand(1, 3, 3), drafted)
    decides = TopDown(SpeculativeSampling())
    watching = Watching(decides, [decides, BottomUp(SpeculativeSampling())])
    found = watching.verify(draft, target, Noise.from_seed(3, 1))
    alone = decides.verify(draft, target, Noise.from_seed(3, 1))
    assert torch.equal(found.length, alone.length) and watching.sizes == [2]
    first, second = 0.3 / 0.6, 0.1 / 0.4
    assert watching.accepted[0][0] == pytest.approx(first + first * second)
    assert watching.accepted[0][1] != pytest.approx(watching.accepted[0][0])
