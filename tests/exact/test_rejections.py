"""Rejected drafts without replacement, on the host: what is accepted on average, and the law of one node."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from polydraft.errors import NotConverged
from polydraft.schemes import WithoutReplacement, enumerate_drafts
from polydraft.verifiers import Optimal, OutcomeLaw, RecursiveRejectionWithoutReplacement
from polydraft.verifiers.nodes import recursive_without_replacement as rejections
from polydraft.verifiers.nodes.recursive_without_replacement import average_accepted

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
        np.testing.assert_allclose(RULE.marginal(draft, mass, torch.tensor(k)).numpy(), mean.numpy(), atol=1e-14)


def by_recursion(draft: np.ndarray, mass: np.ndarray, k: int) -> np.ndarray:
    """Return what k drafts accept of each token, by following every sequence of rejections on the rows themselves."""
    passed = np.minimum(mass, draft)
    rejected = 1 - passed.sum()
    if k == 1 or rejected <= 0:
        return passed
    left = np.maximum(mass - draft, 0) / rejected
    for token in np.flatnonzero(draft > mass):
        others = np.where(np.arange(len(draft)) == token, 0, draft)
        total = others.sum()
        if total > 0:
            passed = passed + (draft[token] - mass[token]) * by_recursion(others / total, left, k - 1)
    return passed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "size"), [(2, 300), (3, 60), (4, 16)])
def test_it_is_the_sum_over_all_sequences_of_rejections(k: int, size: int, kind: str, monkeypatch: pytest.MonkeyPatch):
    draft, mass = (row.numpy() for row in rows(size, 7, kind))
    with np.errstate(all="ignore"):
        found = average_accepted(draft, mass, k)
        np.testing.assert_allclose(found, by_recursion(draft, mass, k), rtol=0, atol=1e-12)
        monkeypatch.setattr(rejections, "TOGETHER", 7)  # as many sequences as fit
        np.testing.assert_array_equal(average_accepted(draft, mass, k), found)


def test_a_rejection_from_a_row_that_is_all_but_exhausted_keeps_its_digits():
    """After the first token is rejected 1e-9 of the draft row is left; what comes next is known in closed form."""
    draft, mass = np.array([1 - 1e-9, 7e-10, 3e-10, 0.0]), np.array([0.5, 0.2, 0.2, 0.1])
    # token 0 is rejected half of the time, and then drafts 1 and 2, of 0.7 and 0.3, meet 0.4, 0.4 and 0.2
    expected = [0.5, 0.5 * 0.4, 0.5 * 0.3, 0.0]
    np.testing.assert_allclose(average_accepted(draft, mass, 2), expected, rtol=0, atol=2e-9)


def test_four_drafts_of_a_long_list_are_exact():
    draft, mass = rows(257, 0, "plain")
    shares = RULE.shares(torch.tensor([3, 1, 4, 5]), draft, mass)
    three, four = (RULE.marginal(draft, mass, torch.tensor(k)) for k in (3, 4))
    assert bool((four <= mass).all()) and 0 < float(shares.sum()) <= 1
    assert float(three.sum()) < float(four.sum()) < 1


def test_more_sequences_than_can_be_looked_at_have_no_answer():
    draft, mass = rows(300, 0, "plain")
    assert RULE.follows(3, 300) and not RULE.follows(5, 300)
    with pytest.raises(NotConverged, match="The acceptance of 5 drafts"):
        RULE.marginal(draft, mass, torch.tensor(5))


class Reluctant(Optimal):
    """A rule that accepts no draft, node by node."""

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        return OutcomeLaw(torch.zeros_like(drafts, dtype=target_probs.dtype), target_probs)


@dataclass(frozen=True)
class Halved(Optimal):
    """A rule that accepts half as often; the marginal is not told."""

    def shares(self, drafts: Tensor, draft_probs: Tensor, target_mass: Tensor) -> Tensor:
        return Optimal(self.scheme).shares(drafts, draft_probs, target_mass) / 2


@dataclass(frozen=True)
class Silent(Optimal):
    """A rule whose marginal is none."""

    def marginal(self, draft_probs: Tensor, target_mass: Tensor, counts: Tensor) -> Tensor:
        return torch.zeros_like(target_mass)


def test_a_derived_rule_has_its_own_law_and_each_half_that_it_writes():
    draft, target = rows(6, 0, "plain")
    drafts = torch.tensor([1, 2])
    law, whole = Reluctant().law(drafts, draft, target), Optimal().divided(drafts, draft, target)
    assert not bool(law.child.any()) and torch.equal(law.rest, target)
    shares, marginal = Halved().divided(drafts, draft, target)
    assert torch.equal(shares, whole[0] / 2) and torch.equal(marginal, whole[1])
    shares, marginal = Silent().divided(drafts, draft, target)
    assert torch.equal(shares, whole[0]) and not bool(marginal.any())
