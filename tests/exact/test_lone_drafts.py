"""One draft at a node: rules that take a short cut there come to what their general computation gives."""

import pytest
import torch
from torch import Tensor
from zoo import ZOO

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
from polydraft.verifiers import (
    ImportanceWeighted,
    KSeq,
    NodeVerifier,
    Optimal,
    Race,
    SpecHubRule,
    SpeculativeSampling,
    TopThenSampleRule,
)
from polydraft.verifiers.outcome_law import law_of_shares, lone_draft

INDEPENDENT: list[Scheme] = [IID(), TopThenIID(0), TopThenIID(1), TopThenSample(), SpecHub(), TopK(), Given()]
RULES: list[NodeVerifier] = [
    *(Optimal(scheme) for scheme in [*INDEPENDENT, WithoutReplacement(), ConditionalPoisson()]),
    *(Race(scheme) for scheme in [*INDEPENDENT, Product()]),
    ImportanceWeighted(),
    ImportanceWeighted(Product()),
    KSeq(),
    SpecHubRule(),
    TopThenSampleRule(),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}, {rule.scheme.name}")
@pytest.mark.parametrize(("target", "draft"), ZOO.values(), ids=list(ZOO))
def test_the_short_cut_is_the_general_law(rule: NodeVerifier, target: Tensor, draft: Tensor):
    """The general computation is asked with room for a second draft, which is absent.

    Given drafts of probability 1e-30 it may answer anything: rounding errors enter with their own size.
    """
    row, wanted = (torch.nn.functional.pad(one.double(), (0, 1)) for one in (draft, target))
    places = torch.arange(len(draft))
    if rule.scheme.deterministic or (isinstance(rule.scheme, TopThenIID) and rule.scheme.top):
        ones = torch.ones(1, dtype=torch.int64)
        places = rule.scheme.sample(draft.double()[None], ones, torch.zeros(1, 8).double(), 1)[0]
    places = torch.cat([places[draft[places] > 1e-12], torch.tensor([-1])]).unsqueeze(-1)
    rows = row.expand(len(places), *([2] if isinstance(rule.scheme, Product) else []), -1)
    targets = wanted.expand(len(places), -1)
    alone = rule.law(places, rows, targets)
    general = rule.law(torch.nn.functional.pad(places, (0, 1), value=-1), rows, targets)
    torch.testing.assert_close(alone.child[:, 0], general.child[:, 0], rtol=0, atol=1e-9)
    torch.testing.assert_close(alone.rest, general.rest, rtol=0, atol=1e-9)


def test_only_nodes_with_room_for_one_draft_have_a_short_cut():
    row = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    assert lone_draft(IID(), torch.tensor([[0, -1]]), row, row) is None
    found = lone_draft(IID(), torch.tensor([[1]]), row, row)
    assert found is not None
    assert torch.equal(found[0], SpeculativeSampling().shares(torch.tensor([[1]]), row, row))


def test_a_subnormal_residual_is_emitted_without_overflow():
    target = torch.tensor([[1.0, 1e-42, 0.0]])
    law = law_of_shares(torch.tensor([[0.5]]), torch.tensor([[1.0, 0.0, 0.0]]), target)
    torch.testing.assert_close(law.rest, torch.tensor([[0.0, 0.5, 0.0]]))
