import pytest
import torch
from torch import Tensor
from zoo import row

from polydraft.catalogue import parse_policy
from polydraft.errors import InvalidParameter
from polydraft.schemes import IID, Scheme, WithoutReplacement, enumerate_drafts
from polydraft.trees import (
    EAGLE_25,
    FALCON_165,
    MEDUSA_63,
    AdaptiveThreshold,
    BestFirst,
    Chain,
    Confident,
    Eagle2,
    EntropyBound,
    ExpectedAcceptance,
    Fixed,
    PathProbability,
    TreePolicy,
    TreeShape,
    TrunkThenBranch,
    Widths,
    policy,
)
from polydraft.verifiers import RecursiveRejection, SpeculativeSampling


def test_a_chain_is_a_tree_of_width_one():
    assert Chain(3).shape == Widths((1, 1, 1)).shape == TreeShape(((1,), (1,), (1,)))


def test_widths_are_children_per_node():
    shape = Widths((4, 2, 1)).shape
    assert [len(level) for level in shape.levels] == [1, 4, 8, 8]
    assert shape.counts == ((4,), (2,) * 4, (1,) * 8)


@pytest.mark.parametrize(("kind", "size"), [(Chain, 0), (Chain, -1), (Widths, (2, 0)), (Widths, (-1,))])
def test_trees_without_children_are_refused_when_they_are_built(kind: type, size: object):
    with pytest.raises(InvalidParameter, match="at least 1"):
        kind(size)


@pytest.mark.parametrize(
    ("kind", "size"), [(Chain, 4096), (Chain, 10**12), (Widths, (5000,)), (Widths, (2,) * 60), (Widths, (10**12,))]
)
def test_trees_that_are_too_large_are_refused_at_once(kind: type, size: object):
    with pytest.raises(InvalidParameter, match="4096"):
        kind(size)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("4,2,2,1", Widths((4, 2, 2, 1))),
        ("3", Widths((3,))),
        ("4, 2", Widths((4, 2))),
        ("chain:5", Chain(5)),
        ("eagle", Fixed(EAGLE_25)),
        ("medusa", Fixed(MEDUSA_63)),
        ("falcon", Fixed(FALCON_165)),
        ("trunk:2+3,2", TrunkThenBranch(2, (3, 2))),
        ("expected:8", ExpectedAcceptance(8)),
        ("expected:12x5:2", ExpectedAcceptance(12, depth=5, children=2)),
        ("best-first:16", BestFirst(16)),
        ("best-first:16x4", BestFirst(16, depth=4)),
        ("best-first:16:3", BestFirst(16, children=3)),
        ("best-first:16x4:3", BestFirst(16, depth=4, children=3)),
        ("eagle-2", Eagle2(10, 8, 59)),
        ("eagle-2:10x6", Eagle2(10, 6)),
        ("eagle-2:10x6:25", Eagle2(10, 6, 25)),
        ("confident:8", Confident((1,) * 8, 0.4)),
        ("confident:8:0.3", Confident((1,) * 8, 0.3)),
        ("confident:3,2,1:0.3", Confident((3, 2, 1), 0.3)),
        ("confident-path:4:.1", Confident((1,) * 4, 0.1, PathProbability())),
        ("confident-entropy:4:0.5", Confident((1,) * 4, 0.5, EntropyBound(0.2))),
        ("adaptive:8", AdaptiveThreshold(8)),
        ("adaptive:8:0.5", AdaptiveThreshold(8, 0.5)),
    ],
)
def test_policies_are_read_from_text(text: str, policy: TreePolicy):
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4,",
        "4;2",
        "a,b",
        "chain:",
        ":4",
        "chain:2,3",
        "chain:x",
        "tree:4",
        "Eagle",
        "0",
        "-1,2",
        "chain:0",
        "2.5",
        "9999",
        "eagle:3",
        "best-first",
        "best-first:0",
        "best-first:axb",
        "best-first:3x2:2:2",
        "best-first:9999",
        "trunk:2",
        "trunk:0+2",
        "eagle-2:3",
        "eagle-2:10x1000000000000",
        "confident:0",
        "confident:999999999999",
        "confident:8:1.5",
        "confident:8:nan",
        "confident:8:0.1:0.2",
        "adaptive",
        "adaptive:8:0.5:0.5",
    ],
)
def test_other_texts_are_refused(text: str):
    with pytest.raises(InvalidParameter):
        parse_policy(text)


def test_a_trunk_is_a_chain_with_a_tree_at_its_end():
    assert TrunkThenBranch(2, (3, 1)).shape == Widths((1, 1, 3, 1)).shape
    with pytest.raises(InvalidParameter, match="at least 1"):
        TrunkThenBranch(0, (3, 1))


def test_a_refusal_lists_what_can_be_written():
    with pytest.raises(InvalidParameter, match=r"chain.*trunk.*best-first.*eagle-2.*confident.*adaptive"):
        parse_policy("tree:4")


def test_the_contract_is_written_down():
    text = " ".join((policy.__doc__ or "").split())
    assert "The number of children at a node is decided before they are drawn" in text
    assert "Pruning after sampling is allowed only under a deterministic scheme" in text


TARGET, DRAFT = row(0.1, 0.3, 0.6), row(0.5, 0.3, 0.2)


def emitted_by_one_draft(law: dict[int, float]) -> Tensor:
    """Verify one draft, drawn by this law, as if it came from the draft row itself."""
    drafts = torch.tensor(list(law)).unsqueeze(-1)
    weight = torch.tensor(list(law.values()), dtype=torch.float64)
    rule = SpeculativeSampling().law(drafts, DRAFT.expand(len(drafts), -1), TARGET.expand(len(drafts), -1))
    return weight @ rule.emitted(drafts)


def keep_one_of_two(scheme: Scheme, keep) -> dict[int, float]:
    law: dict[int, float] = {}
    drafts, probability = enumerate_drafts(scheme, DRAFT, 2)
    for pair, chance in zip(drafts.tolist(), probability.tolist(), strict=True):
        kept = keep(pair)
        law[kept] = law.get(kept, 0.0) + chance
    return law


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement()], ids=lambda scheme: scheme.name)
def test_pruning_after_sampling_is_biased(scheme: Scheme):
    """Drawing two, keeping the likelier and verifying one misses the target."""
    likelier = keep_one_of_two(scheme, lambda pair: max(pair, key=lambda atom: float(DRAFT[atom])))
    assert float((emitted_by_one_draft(likelier) - TARGET).abs().max()) > 0.05


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement()], ids=lambda scheme: scheme.name)
def test_a_count_decided_before_drawing_is_not(scheme: Scheme):
    """Keeping the first of two whatever it is has the law of drawing one."""
    first = keep_one_of_two(scheme, lambda pair: pair[0])
    torch.testing.assert_close(emitted_by_one_draft(first), TARGET, rtol=0, atol=1e-12)


def test_pruning_sampled_drafts_by_their_rank_is_caught_for_two_of_three_too():
    drafts, probability = enumerate_drafts(IID(), DRAFT, 3)
    pruned = drafts.sort(dim=-1).values[:, :2]
    rule, many = RecursiveRejection(), len(drafts)
    biased = probability @ rule.law(pruned, DRAFT.expand(many, -1), TARGET.expand(many, -1)).emitted(pruned)
    fair = probability @ rule.law(drafts[:, :2], DRAFT.expand(many, -1), TARGET.expand(many, -1)).emitted(drafts[:, :2])
    assert float((biased - TARGET).abs().max()) > 0.05
    torch.testing.assert_close(fair, TARGET, rtol=0, atol=1e-12)
