"""Rejected drafts without replacement, on the host: what is accepted on average, and the law of one node."""

import numpy as np
import pytest
import torch
from torch import Tensor

from polydraft.errors import NotConverged
from polydraft.schemes import WithoutReplacement, enumerate_drafts
from polydraft.verifiers import OutcomeLaw, RecursiveRejectionWithoutReplacement
from polydraft.verifiers.host import rejections
from polydraft.verifiers.host.rejections import average_accepted, tried_in_turn
from polydraft.verifiers.law import on_host

RULE = RecursiveRejectionWithoutReplacement()


def rows(size: int, seed: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return a draft row and a target mass."""
    draft, target = torch.rand(2, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    draft[-1] = 0
    if kind == "sparse":
        draft[::3], target[1::3] = 0, 0
    if kind == "certain":
        draft[1:] *= 1e-12
    if kind == "subnormal":
        draft[0], target[0] = 1e-310, 0.2
    if kind == "equal":
        target = draft.clone()
    if kind == "disjoint":
        draft[::2], target[1::2] = 0, 0
    return draft / draft.sum(), (0.3 if kind == "scaled" else 1) * target / target.sum()


KINDS = ("plain", "scaled", "sparse", "certain", "subnormal", "equal", "disjoint")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_what_is_accepted_on_average_is_the_mean_over_all_drafts(k: int, kind: str):
    """Of six tokens, every sequence of drafts enumerated; also for more drafts than there are tokens to draft."""
    for seed in range(3):
        draft, mass = rows(6, seed, kind)
        every, chance = enumerate_drafts(WithoutReplacement(), draft[:-1], k)
        shares = RULE.shares(every, draft.expand(len(every), -1), mass.expand(len(every), -1))
        present = (every >= 0) * shares * chance.unsqueeze(-1)
        mean = torch.zeros_like(mass).index_add(0, every.clamp_min(0).flatten(), present.flatten())
        np.testing.assert_allclose(average_accepted(draft.numpy(), mass.numpy(), k), mean.numpy(), atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "size"), [(2, 300), (3, 120), (4, 24)])
def test_the_host_has_the_marginal_of_tensors(k: int, size: int, kind: str, monkeypatch: pytest.MonkeyPatch):
    draft, mass = rows(size, 7, kind)
    expected = RULE.marginal(draft, mass, torch.tensor(k)).numpy()
    found = average_accepted(draft.numpy(), mass.numpy(), k)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    monkeypatch.setattr(rejections, "TOGETHER", 7)  # as many sequences as fit
    np.testing.assert_array_equal(average_accepted(draft.numpy(), mass.numpy(), k), found)


def test_a_rejection_from_a_row_that_is_all_but_exhausted_keeps_its_digits():
    """After the first token is rejected 1e-9 of the draft row is left; what comes next is known in closed form."""
    draft, mass = np.array([1 - 1e-9, 7e-10, 3e-10, 0.0]), np.array([0.5, 0.2, 0.2, 0.1])
    # token 0 is rejected half of the time, and then drafts 1 and 2, of 0.7 and 0.3, meet 0.4, 0.4 and 0.2
    expected = [0.5, 0.5 * 0.4, 0.5 * 0.3, 0.0]
    np.testing.assert_allclose(average_accepted(draft, mass, 2), expected, rtol=0, atol=2e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_on_the_host_has_the_law_of_tensors(kind: str):
    for seed, drafts in enumerate(([3, 1, 4], [2, -1, 0], [1, -1, -1])):
        draft, mass = rows(6, seed, kind)
        places = torch.tensor([place if place < 0 or draft[place] > 0 else -1 for place in drafts])
        if kind == "scaled":
            expected = RULE.shares(places, draft, mass)
            np.testing.assert_allclose(tried_in_turn(places.numpy(), draft.numpy(), mass.numpy())[0], expected)
            continue
        law = RULE.law(places, draft, mass)
        shares, left = RULE.law_at(places.numpy(), draft.numpy(), mass.numpy())
        np.testing.assert_allclose(shares, law.child.numpy(), rtol=0, atol=1e-14)
        if float(law.rest.sum()) > 1e-12:
            np.testing.assert_allclose(left / left.sum(), (law.rest / law.rest.sum()).numpy(), rtol=0, atol=1e-13)


def test_four_drafts_of_a_long_list_are_exact_on_the_host_and_too_many_for_tensors():
    draft, mass = rows(257, 0, "plain")
    drafts, several = np.array([3, 1, 4, 5]), torch.tensor(4)
    with pytest.raises(NotConverged, match="The acceptance of 4 drafts"):
        RULE.marginal(draft, mass, several)
    shares, marginal = RULE.at_node(drafts, draft.numpy(), mass.numpy())
    assert np.all(marginal <= mass.numpy()) and 0 < shares.sum() <= 1
    three = average_accepted(draft.numpy(), mass.numpy(), 3).sum()
    assert three < marginal.sum() < 1


def test_more_sequences_than_the_host_looks_at_are_left_to_tensors():
    draft, mass = rows(300, 0, "plain")
    with pytest.raises(NotConverged, match="The acceptance of 5 drafts"):
        RULE.at_node(np.array([3, 1, 4, 5, 9]), draft.numpy(), mass.numpy())


class WithItsOwnLaw(RecursiveRejectionWithoutReplacement):
    """A rule that accepts no draft, on the host in part."""

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        return OutcomeLaw(torch.zeros_like(target_probs[..., : drafts.shape[-1]]), target_probs)

    def at_node(
        self, drafts: np.ndarray, draft_row: np.ndarray, target_mass: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(len(drafts)), np.zeros(len(target_mass))


def test_a_rule_that_inherits_a_part_of_what_the_host_asks_is_not_asked():
    assert on_host(RULE) is RULE
    assert on_host(WithItsOwnLaw()) is None
