"""Policies that learn: Draft & Verify's threshold step by step, and a fitted classifier."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.trees import (
    AdaptiveThreshold,
    Chain,
    Classifier,
    Confident,
    Draft,
    TokenTree,
    Verdict,
    examples,
    fit_classifier,
    topology,
)
from polydraft.trees.growing import Drawn


def chains(lengths: list[int], longest: int) -> TokenTree:
    valid = torch.arange(longest + 1) <= torch.tensor(lengths).unsqueeze(-1)
    shape = Chain(longest).shape
    return TokenTree(torch.zeros_like(valid, dtype=torch.int64), topology(shape, len(lengths), valid.device), valid)


def kept(lengths: list[int], longest: int) -> Verdict:
    nodes = torch.arange(1, longest + 1).expand(len(lengths), longest)
    length = torch.tensor(lengths)
    return Verdict(nodes.where(nodes <= length.unsqueeze(-1), -1), length, torch.zeros_like(length))


def test_the_threshold_moves_as_the_paper_s_code_moves_it() -> None:
    """Reference: the update of Draft & Verify's code, for one row, in plain numbers."""
    policy, threshold, rate = AdaptiveThreshold(4, 0.6, goal=0.5), 0.6, 0.0
    for drafted, accepted in [(4, 0), (4, 4), (4, 4), (2, 2), (1, 0), (0, 0), (4, 3), (3, 3), (4, 4)]:
        policy = policy.after(chains([drafted], 4), kept([accepted], 4))
        if drafted:
            rate = 0.5 * rate + 0.5 * accepted / drafted
            aim = threshold + 0.01 if rate < 0.5 else threshold if drafted == 4 else threshold - 0.01
            threshold = 0.9 * threshold + 0.1 * aim
        assert float(policy.learnt.threshold) == pytest.approx(threshold, abs=1e-12)
        assert float(policy.learnt.rate) == pytest.approx(rate, abs=1e-12)


def test_each_row_learns_for_itself_and_a_new_text_begins_anew() -> None:
    policy = AdaptiveThreshold(4, 0.6, step=0.5, smoothing=0.0, forgetting=0.0)
    policy = policy.after(chains([4, 2, 4], 4), kept([0, 2, 4], 4))
    assert policy.learnt.threshold.tolist() == pytest.approx([1.0, 0.1, 0.6])
    fresh, taught = AdaptiveThreshold(4, 0.6), policy.select([1])
    assert policy.select([0, 2]).learnt.threshold.tolist() == pytest.approx([1.0, 0.6])
    assert policy.put(1, fresh).learnt.threshold.tolist() == pytest.approx([1.0, 0.6, 0.6])
    assert policy.put(1, fresh).learnt.rate.tolist() == pytest.approx([0.0, 0.0, 1.0])
    assert policy.put(0, taught).learnt.threshold.tolist() == pytest.approx([0.1, 0.1, 0.6])
    assert policy.put(3, taught).learnt.threshold.tolist() == pytest.approx([1.0, 0.1, 0.6, 0.1])
    assert fresh.put(2, taught).learnt.threshold.tolist() == pytest.approx([0.6, 0.6, 0.1])
    assert policy.select([3]).learnt.threshold.tolist() == pytest.approx([0.6]), "a row behind those that learnt"
    assert AdaptiveThreshold(4).select([0]).put(1, AdaptiveThreshold(4)).learnt is None
    chance = torch.tensor([[0.7], [0.7], [0.5]])
    nodes = torch.zeros(3, 1, dtype=torch.int64)
    drawn = Drawn(1, chance > 0, chance.double(), nodes, chance.unsqueeze(1), chance, nodes[:, 0], nodes, nodes)
    assert policy.opened(drawn).tolist() == [[False], [True], [False]]
    assert AdaptiveThreshold(4, 0.6).opened(drawn).tolist() == [[True], [True], [False]]


def test_policies_that_do_not_learn_stay_what_they_are() -> None:
    for policy in (Chain(3), Confident((1, 1), 0.4)):
        assert policy.after(chains([2], 3), kept([1], 3)) is policy
        assert policy.select([0]) is policy and policy.put(1, replace(policy)) is policy


@pytest.mark.parametrize("wrong", [{"length": 0}, {"threshold": 1.1}, {"goal": -1}, {"smoothing": 2}, {"step": 7}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(wrong))):
        AdaptiveThreshold(**wrong)


def chain_draft(rows: Tensor, atoms: Tensor) -> Draft:
    """Build chains of which every node has the given row and draft; "b n K" and "b n"."""
    batch, nodes = atoms.shape
    tree = chains([nodes - 1] * batch, nodes - 1)
    return Draft(tree, atoms, torch.arange(rows.shape[-1]).expand(rows.shape), rows)


def test_examples_are_the_drafts_that_were_judged() -> None:
    rows = torch.tensor([[[0.5, 0.5], [0.9, 0.1], [0.2, 0.8], [0.0, 0.0]]]).repeat(2, 1, 1)
    atoms = torch.tensor([[-1, 0, 1, 1], [-1, 1, 0, 0]])
    features, accepted = examples(chain_draft(rows, atoms), kept([1, 3], 3))
    assert accepted.tolist() == [True, False, True, True, True]
    assert features[:, 0].tolist() == pytest.approx([0.5, 0.1, 0.5, 0.9, 0.2])
    assert features[:, 1].tolist() == pytest.approx([0.5, 0.9, 0.5, 0.9, 0.8])
    assert features[0, 2] == pytest.approx(0.693147, abs=1e-6)
    assert features[:, 3].tolist() == [1, 2, 1, 2, 3]


def test_a_fit_finds_the_classifier_that_made_the_labels() -> None:
    stream = torch.Generator().manual_seed(0)
    features = torch.rand(20_000, 4, generator=stream, dtype=torch.float64)
    true = torch.tensor([3.0, -2.0, 1.0, 0.5], dtype=torch.float64)
    chance = torch.sigmoid(features @ true - 1.0)
    accepted = torch.rand(len(features), generator=stream, dtype=torch.float64) < chance
    fitted = fit_classifier(features, accepted, penalty=1e-3)
    assert fitted.weights == pytest.approx(true.tolist(), abs=0.25)
    assert fitted.bias == pytest.approx(-1.0, abs=0.25)


def test_a_fit_of_separable_examples_is_finite_and_right() -> None:
    features = torch.tensor([[0.1, 1, 0, 1], [0.2, 1, 0, 1], [0.8, 1, 0, 1], [0.9, 1, 0, 1]])
    fitted = fit_classifier(features, torch.tensor([False, False, True, True]))
    score = features.double() @ torch.tensor(fitted.weights, dtype=torch.float64) + fitted.bias
    assert ((score > 0) == torch.tensor([False, False, True, True])).all()
    with pytest.raises(InvalidParameter, match="no examples"):
        fit_classifier(features[:0], torch.tensor([], dtype=torch.bool))


def test_a_classifier_is_a_confidence() -> None:
    rows, zero = torch.tensor([[[0.7, 0.3]]]), torch.zeros(1, 2, dtype=torch.int64)
    chance = torch.tensor([[0.7, 0.3]])
    drawn = Drawn(2, chance > 0, chance.double(), zero, rows, chance, torch.tensor([2]), zero, zero)
    found = Classifier((2.0, 1.0, 0.0, -0.5), 0.25).of(drawn)
    assert found[0].tolist() == pytest.approx(torch.sigmoid(torch.tensor([1.35, 0.55])).tolist(), abs=1e-6)
    assert Confident((1, 1), 0.7, Classifier((2.0, 1.0, 0.0, -0.5), 0.25)).opened(drawn).tolist() == [[True, False]]
    with pytest.raises(InvalidParameter, match=r"needs 4 weights .* but has 2"):
        Classifier((1.0, 2.0))
