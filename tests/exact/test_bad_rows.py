"""Rows and drafts that no rule can be given are named with their value; degenerate ones have a defined law."""

import pytest
import torch
from enumeration import enumerated
from torch import Tensor
from zoo import row

from polydraft.catalogue import node_rules
from polydraft.conformance.proved_rules import label
from polydraft.errors import InvalidParameter, InvalidProbabilities, VocabularyMismatch
from polydraft.schemes import IID, Product, TopThenIID, TopThenSample
from polydraft.verifiers import ImportanceWeighted, NaiveMatch, NodeVerifier, check_rows, most_drafts

GOOD, DRAFT = row(0.5, 0.3, 0.2), row(0.4, 0.6, 0)
DRAFTS = torch.tensor([0, 1])
BAD = [
    (row(0.5, 0.4, 0), "{} has a row whose sum differs from 1 by 0.1"),
    (row(1.2, 0.3, -0.5), "{} has a negative or NaN entry: its smallest is -0.5"),
    (row(0.5, float("nan"), 0), "{} has a negative or NaN entry"),
    (row(0.5, float("inf"), 0), "{} has a row whose sum differs from 1 by inf"),
]
DRAWN = [rule for rule in node_rules() if rule.lossless and not rule.scheme.deterministic]
each_rule = pytest.mark.parametrize("rule", DRAWN, ids=lambda rule: f"{label(rule)}, {rule.scheme.name}")


def most(rule: NodeVerifier) -> int:
    return min(4, most_drafts(rule))


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_rows_that_are_no_distributions_are_named(bad: Tensor, message: str):
    with pytest.raises(InvalidProbabilities, match=message.format("draft_probs")):
        check_rows(DRAFTS, bad, GOOD)
    with pytest.raises(InvalidProbabilities, match=message.format("target_probs")):
        check_rows(DRAFTS, DRAFT, bad)
    with pytest.raises(InvalidProbabilities, match=message.format("draft_probs")):
        check_rows(DRAFTS, torch.stack([DRAFT, bad]), GOOD)  # two rows, as for Product


def test_rows_of_different_sizes_are_named():
    with pytest.raises(VocabularyMismatch, match="have 4 atoms and the target rows 3; put both on one shortlist"):
        check_rows(DRAFTS, row(0.4, 0.3, 0.3, 0), GOOD)


@pytest.mark.parametrize("draft", [-2, 2, 7])
def test_a_draft_off_the_shortlist_is_named(draft: int):
    with pytest.raises(InvalidParameter, match=f"from 0 to 1, or -1 where it is absent, but one is {draft}"):
        check_rows(torch.tensor([0, draft]), DRAFT, GOOD)


def test_good_rows_and_rows_without_drafts_pass():
    check_rows(DRAFTS, DRAFT, GOOD)
    check_rows(torch.tensor([[0, -1], [-1, -1]]), torch.stack([DRAFT, torch.zeros(3).double()]), GOOD.expand(2, 3))
    check_rows(torch.zeros(0, 2).long(), DRAFT.expand(0, 3), GOOD.expand(0, 3))


@each_rule
def test_equal_rows_are_always_accepted(rule: NodeVerifier):
    """No residual is left; rules that draft tokens for certain, or match, accept less and still emit the target."""
    same = row(0.4, 0.3, 0.2, 0.1)
    if isinstance(rule.scheme, Product):
        same = row(0.3, 0.2, 0.2, 0.3)  # its own mirror image
    for k in range(1, most(rule) + 1):
        case = enumerated(rule, k, same, same)
        assert case.error < 1e-12
        if not isinstance(rule, NaiveMatch) and not isinstance(rule.scheme, TopThenSample | TopThenIID):
            assert case.acceptance == pytest.approx(1, abs=1e-6 if isinstance(rule, ImportanceWeighted) else 1e-12)


@each_rule
def test_disjoint_supports_are_never_accepted(rule: NodeVerifier):
    target, draft = row(0, 0, 0.5, 0.5, 0, 0), row(0.5, 0.5, 0, 0, 0, 0)
    if isinstance(rule.scheme, Product):
        draft = row(0.5, 0.2, 0, 0, 0.2, 0.1)
    for k in range(1, most(rule) + 1):
        case = enumerated(rule, k, target, draft)
        assert not bool(case.outcome.child.any())
        torch.testing.assert_close(case.outcome.rest, case.target.expand_as(case.outcome.rest), rtol=0, atol=1e-12)


@each_rule
def test_one_hot_rows_have_one_answer(rule: NodeVerifier):
    hot = row(0, 1, 0)
    for k in range(1, most(rule) + 1):
        alike = enumerated(rule, k, hot, hot)
        assert alike.acceptance == pytest.approx(1, abs=1e-12)
        assert alike.emitted.tolist() == pytest.approx([0, 1, 0, 0], abs=1e-12)
        spread = enumerated(rule, k, row(0.2, 0.5, 0.3), hot)
        assert spread.acceptance == pytest.approx(0.5, abs=1e-12)
        assert spread.error < 1e-12


@each_rule
def test_more_drafts_than_the_support_has_tokens(rule: NodeVerifier):
    """Without repeats the drafts are the whole support, and a rule that is told more accepts no less than its mass."""
    target, draft = row(0.2, 0.3, 0.4, 0.1), row(0.7, 0.3, 0, 0)
    k = most(rule)
    case = enumerated(rule, k, target, draft)
    assert case.error < 1e-9
    if not isinstance(rule.scheme, IID | Product | TopThenIID):
        assert bool((case.drafts >= 0).sum(dim=-1).max() <= 2)
        assert case.acceptance == pytest.approx(0.5, abs=1e-9)
