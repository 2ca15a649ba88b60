"""The lowest of successive drafts in a block, and the quadrature behind it, against enumeration and denser nodes."""

import numpy as np
import pytest
import torch
from torch import Tensor
from two_weights import MANY_DRAFTS, TwoWeights

from polydraft.schemes import WithoutReplacement, enumerate_drafts
from polydraft.theory import SuccessiveLaw, time_nodes
from polydraft.theory.quadrature import _log_end
from polydraft.theory.successive_law import fewer_rung, odds_of_ringing
from polydraft.verifiers.selection.successive import Successive


def draft_row(size: int, spread: float, seed: int) -> Tensor:
    normal = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (spread * normal).softmax(dim=-1)


def all_inside(draft: Tensor, k: int, members: list[int]) -> float:
    drafts, chance = enumerate_drafts(WithoutReplacement(), draft, k)
    return float(chance[torch.isin(drafts, torch.tensor(members)).all(dim=-1)].sum())


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_chance_that_no_low_draft_is_in_a_block_agrees_with_the_enumeration(k: int):
    draft = draft_row(6, 1.0 + 2.0 * (k % 2), k)
    blocks = Successive.of(draft.numpy(), k)
    for low, high in ((0, 5), (1, 5), (3, 5), (0, 4), (2, 4), (1, 4)):
        found = blocks.missed(low, high)
        for j in range(low, high + 1):
            expected = 1 - all_inside(draft, k, [*range(low), *range(j, high)])
            assert found[j] == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("k", [3, 4])
@pytest.mark.parametrize("rare", [1e-20, 1e-60, 1e-100, 1e-200, 1e-300])
def test_a_token_that_has_long_rung_before_all_others_leaves_chances_at_most_one(k: int, rare: float):
    """With odds cut to keep their products in range, the integral was 1e34 here for rates of 1e-100."""
    for common in range(6):
        draft = rare * torch.tensor([1, 2, 3, 1.5, 1, 2], dtype=torch.float64)
        draft[common] = 1.0
        law = SuccessiveLaw.of(draft.unsqueeze(0), torch.tensor([k]))
        blocks = Successive.of(draft.numpy(), k)
        for low, high in ((0, 3), (0, 5), (1, 4), (2, 6), (3, 5)):
            found = blocks.missed(low, high)
            order = torch.tensor([[*range(low), *range(low, high)[::-1], *range(high, 6)]])
            expected = law.missed_chain(order)[0, low : high + 1].flip(-1).numpy()
            np.testing.assert_allclose(found[low : high + 1], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8, 20])
def test_prefixes_have_the_containment_of_the_law(k: int):
    """Rows with fewer drafts, with fewer tokens than drafts, and without any mass are among them."""
    rows = torch.stack([draft_row(24, spread, k) for spread in (0.0, 1.0, 4.0, 9.0, 1.0, 1.0)])
    rows[4, 3:], rows[5] = 0.0, 0.0
    rows = rows / rows.sum(dim=-1, keepdim=True).clamp_min(1e-300)
    counts = [k, max(k - 1, 0), k, k, k, k]
    law = SuccessiveLaw.of(rows, torch.tensor(counts))
    nodes = zip(rows.numpy(), counts, strict=True)
    found = np.stack([Successive.of(row, count).law.missed_chain()[0].numpy() for row, count in nodes])
    np.testing.assert_allclose(found, law.missed_chain().numpy(), rtol=1e-12, atol=0)


@pytest.mark.long(3)
@pytest.mark.parametrize("case", MANY_DRAFTS, ids=str)
def test_the_lowest_of_many_drafts_agrees_with_fractions(case: TwoWeights):
    """With odds cut to keep their products in range, the last case was wrong by 0.086."""
    draft, size = case.row(), case.size
    blocks = Successive.of(draft.numpy(), case.drafts)
    for low, high in ((0, size - 1), (case.heavy // 2, size - 3), (2, size - case.light // 4)):
        found = blocks.missed(low, high)
        inside = [case.containment([*range(low), *range(j, high)]) for j in range(low, high + 1)]
        expected = np.array([float(1 - chance) for chance in inside])
        np.testing.assert_allclose(found[low : high + 1], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [3, 4, 8, 16, 24])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 6.0])
def test_denser_nodes_change_containment_by_less_than_one_in_1e13(k: int, spread: float):
    draft, counts = draft_row(64, spread, k).expand(1, -1), torch.tensor([k])
    law = SuccessiveLaw.of(draft, counts)
    dense = SuccessiveLaw(law.rates, law.counts, law.most, time_nodes(law.rates, law.counts, law.most, 4.0))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(k)).expand(1, -1)
    torch.testing.assert_close(law.chain(order), dense.chain(order), rtol=0, atol=1e-13)


def test_nodes_are_few_and_fewer_would_not_do():
    draft, counts = draft_row(64, 1.0, 0).expand(1, -1), torch.tensor([4])
    law = SuccessiveLaw.of(draft, counts)
    assert law.nodes.time.shape[-1] <= 24
    half = SuccessiveLaw(law.rates, law.counts, law.most, time_nodes(law.rates, law.counts, law.most, 0.5))
    assert float((half.chain() - law.chain()).abs().max()) > 1e-13


def test_rows_that_share_a_batch_have_their_own_nodes():
    """Rows that need fewer nodes than their neighbours carry zero weight at the others, and are what they are alone."""
    rows, counts = torch.stack([draft_row(64, spread, 3) for spread in (0.0, 2.0, 6.0)]), torch.tensor([3, 4, 4])
    together = SuccessiveLaw.of(rows, counts)
    used = (together.nodes.weight > 0).sum(dim=-1).tolist()
    assert used[0] < used[-1] == together.nodes.time.shape[-1]
    for row in range(3):
        alone = SuccessiveLaw.of(rows[row, None], counts[row, None])
        torch.testing.assert_close(together.chain()[row, None], alone.chain(), rtol=0, atol=1e-13)


def test_nodes_end_where_all_but_nothing_is_left():
    """The bound on the time at which `counts` clocks have rung holds, and is not far from what would do."""
    for size, k, spread in ((4, 4, 0.0), (64, 4, 1.0), (64, 8, 4.0), (300, 20, 2.0)):
        row, counts = draft_row(size, spread, size).unsqueeze(0), torch.tensor([k])
        end = _log_end(row.sort(dim=-1).values.cumsum(dim=-1), counts, k).exp()
        times = torch.stack([end, end / 4], dim=-1)
        late, early = fewer_rung(*odds_of_ringing(row, times, 600.0 / k), counts, k)[0, :, -1].tolist()
        assert late < 1e-15 < early


def test_tokens_as_they_stand_need_no_order():
    draft = torch.stack([draft_row(9, 2.0, seed) for seed in range(5)])
    law = SuccessiveLaw.of(draft, torch.tensor([1, 2, 3, 4, 5]))
    torch.testing.assert_close(law.chain(), law.chain(torch.arange(9).expand(5, -1)), rtol=0, atol=1e-15)
