"""Errors we found in the literature: each biased rule is written down, enumerated and caught; ours passes beside it.

Where a published system is not lossless although it is said to be, or a published formula is wrong, a small function
here does what it does, and the test states what comes out of it. Rows are small enough that everything is exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from enumeration import enumerated
from torch import Tensor
from zoo import ZOO, row

from polydraft.probs import normalised, residual
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Given,
    Scheme,
    SpecHub,
    TopK,
    WithoutReplacement,
    enumerate_drafts,
)
from polydraft.theory import containment, optimal_set
from polydraft.verifiers import (
    KSeq,
    NaiveMatch,
    NodeVerifier,
    OutcomeLaw,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpecHubRule,
    SpeculativeSampling,
)
from polydraft.verifiers.nodes.k_seq import threshold

EXACT = 1e-12


def emitted(rule: NodeVerifier, target: Tensor, pairs: Tensor, chance: Tensor, draft: Tensor) -> Tensor:
    """Return the law of the emitted token when drafts come with these chances, whatever the rule expects."""
    rows = (torch.nn.functional.pad(one, (0, 1)).expand(len(pairs), -1) for one in (draft, target))
    return (chance @ rule.law(pairs, *rows).emitted(pairs))[:-1]


# --- Duplicate drafts skipped ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SkipsDuplicates(RecursiveRejection):
    """SpecHub's EAGLE port, mode RRS: a repeated draft is passed over, and the residual is not updated for it."""

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        repeats = torch.tril(drafts.unsqueeze(-1) == drafts.unsqueeze(-2), diagonal=-1).any(dim=-1)
        return super().law(drafts.masked_fill(repeats, -1), draft_probs, target_probs)


def test_skipping_duplicate_drafts_is_biased():
    """Recursive rejection with replacement must reject the repeated token for certain, and update the residual."""
    case = enumerated(SkipsDuplicates(), 2, *ZOO["duplicates bite"])
    assert case.emitted.tolist() == pytest.approx([0.05, 0.28, 0.3727, 0.2973, 0], abs=5e-5)
    assert case.error > 0.02
    assert enumerated(RecursiveRejection(), 2, *ZOO["duplicates bite"]).error < EXACT


# --- REST and Medusa: one sample per path ----------------------------------------------------------------------------


def one_sample_per_path(target: Tensor, children: list[int]) -> Tensor:
    """REST's sampled mode: every path draws its own token, the first path that matches is kept, and otherwise the
    next token is drawn afresh, so that a token has several chances to be drawn."""
    law, missed = torch.zeros_like(target), 1.0
    for child in children:
        law[child] += missed * target[child]
        missed *= 1 - float(target[child])
    return law + missed * target


def test_one_sample_per_path_is_biased():
    target = row(0.5, 0.3, 0.2)
    assert one_sample_per_path(target, [0, 1]).tolist() == pytest.approx([0.675, 0.255, 0.07], abs=EXACT)
    for scheme, draft in ((Given(), row(0.5, 0.5, 0)), (TopK(), row(0.6, 0.3, 0.1))):
        assert enumerated(NaiveMatch(scheme), 2, target, draft).error < EXACT


# --- TriForce: the middle level --------------------------------------------------------------------------------------


def middle_level(draft: Tensor, middle: Tensor, correction: Tensor) -> Tensor:
    """One token of a middle model that verifies a draft and draws `correction` after a rejection."""
    accepted = torch.minimum(draft, middle)
    return accepted + (1 - accepted.sum()) * correction


def outer_level(proposed: Tensor, believed: Tensor, target: Tensor) -> Tensor:
    """Speculative sampling of tokens that follow `proposed`, tested as if they followed `believed`."""
    kept = proposed * (target / believed).clamp_max(1)
    return kept + (1 - kept.sum()) * residual(target, believed)


def test_a_middle_level_that_corrects_from_its_own_row_is_biased():
    """TriForce draws from the middle row m after a rejection, not from norm((m - d)+), and then tests against m."""
    target, middle, draft = row(0.2, 0.3, 0.5), row(0.3, 0.3, 0.4), row(0.7, 0.2, 0.1)
    wrong = middle_level(draft, middle, correction=middle)
    assert wrong.tolist() == pytest.approx([0.42, 0.32, 0.26], abs=EXACT)
    assert outer_level(wrong, middle, target).tolist() == pytest.approx([0.28, 0.32, 0.40], abs=EXACT)
    right = middle_level(draft, middle, correction=residual(middle, draft))
    torch.testing.assert_close(right, middle, rtol=0, atol=EXACT)
    torch.testing.assert_close(outer_level(right, middle, target), target, rtol=0, atol=EXACT)
    rule = SpeculativeSampling()
    inner = enumerated(rule, 1, middle, draft).emitted[:-1]
    assert enumerated(rule, 1, target, inner).error < EXACT


# --- HSD: the last acceptance is not capped --------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """Target and draft laws of two tokens; the second rows depend on the first token."""

    target: tuple[Tensor, Tensor]
    draft: tuple[Tensor, Tensor]

    @classmethod
    def random(cls, seed: int, size: int = 3) -> "Chain":
        stream = torch.Generator().manual_seed(seed)

        def law(*shape: int) -> Tensor:
            mass = torch.rand(shape, generator=stream, dtype=torch.float64) ** 2 + 0.01
            return mass / mass.sum(dim=-1, keepdim=True)

        return cls((law(size), law(size, size)), (law(size), law(size, size)))

    @property
    def joint(self) -> Tensor:
        return self.target[0].unsqueeze(-1) * self.target[1]


def hierarchical(chain: Chain, capped: bool) -> tuple[Tensor, float]:
    """HSD on a chain of two drafts: the joint law of two tokens, and the mean number of accepted drafts.

    With a_i = min(1, a_{i-1} target / draft), the block is accepted with a_2, else one draft with D / (D + 1 - a_1),
    where D = |(a_1 target - draft)+|, and the correction is drawn from that difference. The published code accepts the
    block with the joint ratio of all tokens instead of a_2: it is not capped on the way.
    """
    law, accepted = torch.zeros_like(chain.joint), 0.0
    size = len(chain.target[0])
    for first, second in product(range(size), repeat=2):
        chance = float(chain.draft[0][first] * chain.draft[1][first, second])
        ratio = float(chain.target[0][first] / chain.draft[0][first])
        last = float(chain.target[1][first, second] / chain.draft[1][first, second])
        once = min(1.0, ratio)
        whole = min(1.0, (once if capped else ratio) * last)
        left = (once * chain.target[1][first] - chain.draft[1][first]).clamp_min(0)
        half = (1 - whole) * float(left.sum()) / (float(left.sum()) + 1 - once)
        law[first, second] += chance * whole
        law[first] += chance * half * normalised(left, left)
        start = residual(chain.target[0], chain.draft[0])
        law += chance * (1 - whole - half) * start.unsqueeze(-1) * chain.target[1]
        accepted += chance * (2 * whole + half)
    return law, accepted


def test_an_uncapped_block_is_biased():
    """HSD's longer blocks come from the missing cap: with it the rule is exact and accepts what block verification
    accepts."""
    worst = 0.0
    for seed in range(20):
        chain = Chain.random(seed)
        capped, fewer = hierarchical(chain, capped=True)
        torch.testing.assert_close(capped, chain.joint, rtol=0, atol=EXACT)
        uncapped, more = hierarchical(chain, capped=False)
        assert fewer == pytest.approx(block_efficiency(chain), abs=EXACT)
        assert more >= fewer
        worst = max(worst, float((uncapped - chain.joint).abs().sum() / 2))
    assert worst > 0.05


def block_efficiency(chain: Chain) -> float:
    """Mean accepted drafts of block verification: sum_i E[a_i], the largest that is possible."""
    ratio = chain.target[0] / chain.draft[0]
    once = ratio.clamp_max(1)
    both = (once.unsqueeze(-1) * chain.target[1] / chain.draft[1]).clamp_max(1)
    chance = chain.draft[0].unsqueeze(-1) * chain.draft[1]
    pairs_first = torch.minimum(once.unsqueeze(-1) * chain.target[1], chain.draft[1]).sum(dim=-1)
    one = chain.draft[0] * (once - pairs_first)
    return float(2 * (chance * both).sum() + one.sum())


# --- Pruning after sampling ------------------------------------------------------------------------------------------


def keep_the_likelier(draft: Tensor, target: Tensor) -> Tensor:
    """Draw two drafts, keep the one that the drafter likes better, and verify it as a single draft."""
    pairs, chance = enumerate_drafts(IID(), draft, 2)
    first, second = pairs.unbind(dim=-1)
    kept = first.where(draft[first] >= draft[second], second)
    return emitted(SpeculativeSampling(), target, kept.unsqueeze(-1), chance, draft)


def keep_the_first(draft: Tensor, target: Tensor) -> Tensor:
    """Draw two drafts and drop the second without looking at it, as if one had been asked for."""
    pairs, chance = enumerate_drafts(IID(), draft, 2)
    return emitted(SpeculativeSampling(), target, pairs[:, :1], chance, draft)


def test_pruning_what_was_sampled_is_biased():
    """Which drafts are dropped may depend on the draft row, never on the tokens that were drawn."""
    target, draft = row(0.2, 0.3, 0.5), row(0.5, 0.3, 0.2)
    wrong = keep_the_likelier(draft, target)
    assert wrong.tolist() == pytest.approx([0.3, 0.21, 0.49], abs=EXACT)
    torch.testing.assert_close(keep_the_first(draft, target), target, rtol=0, atol=EXACT)


# --- K-SEQ with the single-draft residual ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SingleDraftResidual(KSeq):
    """K-SEQ's tests with the residual of one draft, norm((target - draft)+)."""

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        law = super().law(drafts, draft_probs, target_probs)
        return OutcomeLaw(law.child, law.rest.sum(dim=-1, keepdim=True) * residual(target_probs, draft_probs))


@dataclass(frozen=True)
class ThresholdResidual(KSeq):
    """K-SEQ's tests with the residual of its own test, norm(target - min(target / rho, draft))."""

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        law = super().law(drafts, draft_probs, target_probs)
        rho = threshold(draft_probs, target_probs, (drafts >= 0).sum(dim=-1)).unsqueeze(-1)
        once = torch.minimum(target_probs / rho, draft_probs)
        return OutcomeLaw(law.child, law.rest.sum(dim=-1, keepdim=True) * residual(target_probs, once))


K_SEQ_BITES = {
    "duplicates bite": ZOO["duplicates bite"],
    "another pair": (row(0.1, 0.5, 0.3, 0.1), row(0.4, 0.2, 0.2, 0.2)),
}


@pytest.mark.parametrize("wrong", [SingleDraftResidual(), ThresholdResidual()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("pair", K_SEQ_BITES.values(), ids=[*K_SEQ_BITES])
def test_k_seq_needs_its_own_residual(wrong: KSeq, pair: tuple[Tensor, Tensor]):
    """What is left is target - min(target / rho, draft) (1 - (1 - beta)^k) / beta: k chances, not one."""
    assert enumerated(wrong, 2, *pair).error > 0.005
    assert enumerated(KSeq(), 2, *pair).error < EXACT


def test_the_two_wrong_residuals_of_k_seq_are_two():
    """As in docs/theory/errors.md: off by .034 and .070 in total variation."""
    for wrong, distance in ((SingleDraftResidual(), 0.0343), (ThresholdResidual(), 0.0701)):
        case = enumerated(wrong, 2, *ZOO["duplicates bite"])
        assert float((case.emitted - case.target).abs().sum() / 2) == pytest.approx(distance, abs=5e-5)


# --- SpecHub: the hub drawn twice, and shortcuts ---------------------------------------------------------------------


def unguarded_pairs(draft: Tensor) -> tuple[Tensor, Tensor]:
    """The first public code draws the second draft from the whole row where the hub came first: the hub may come
    twice, and the pair (hub, x) has probability q(hub) q(x) instead of q(hub) q(x) / (1 - q(hub))."""
    hub = int(draft.argmax())
    pairs = [(x, hub) for x in range(len(draft)) if x != hub] + [(hub, x) for x in range(len(draft))]
    chance = [draft[x] if y == hub != x else draft[hub] * draft[y] for x, y in pairs]
    drafts = torch.tensor([(x, y) if x != y else (x, -1) for x, y in pairs])
    return drafts, torch.stack(chance)


def test_spechub_needs_the_guard_against_drawing_the_hub_twice():
    target, draft = row(0.45, 0.35, 0.1, 0.1), row(0.4, 0.1, 0.25, 0.25)
    drafts, chance = unguarded_pairs(draft)
    assert float(chance.sum()) == pytest.approx(1, abs=EXACT)
    wrong = emitted(SpecHubRule(), target, drafts, chance, draft)
    assert float((wrong - target).abs().max()) > 0.01
    assert enumerated(SpecHubRule(), 2, target, draft).error < EXACT


def test_the_printed_law_of_spechub_is_no_law():
    """As printed in arXiv 2502.18779, section 5.3: q(x) whenever the second draft is the hub, even where x is."""
    draft = row(0.4, 0.1, 0.25, 0.25)
    after_hub = draft[0] * draft[1:].sum() / (1 - draft[0])
    assert float(draft.sum() + after_hub) == pytest.approx(1.4, abs=EXACT)
    _, chance = enumerate_drafts(SpecHub(), draft, 2)
    assert float(chance.sum()) == pytest.approx(1, abs=EXACT)


@dataclass(frozen=True)
class TakesTheHub(SpecHubRule):
    """The later public code keeps the hub outright where the target gives it more than 1 - 1e-4."""

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        law = super().law(drafts, draft_probs, target_probs)
        hub = draft_probs.argmax(dim=-1, keepdim=True)
        sure = target_probs.gather(-1, hub) > 1 - 1e-4
        return OutcomeLaw(torch.where(sure, (drafts == hub).double(), law.child), law.rest * ~sure)


def test_taking_a_likely_hub_outright_is_biased():
    target, draft = row(1 - 5e-5, 4e-5, 1e-5), row(0.5, 0.3, 0.2)
    assert enumerated(TakesTheHub(), 2, target, draft).error == pytest.approx(5e-5, abs=EXACT)
    assert enumerated(SpecHubRule(), 2, target, draft).error < EXACT


def smoothed_stage(target: Tensor, draft: Tensor, smoothing: float) -> Tensor:
    """The later public code tests (hub, x) against a row with 5e-5 added to every token, though x was not drawn from
    it; returns the emitted law off the hub when only stages 1 and 2 accept, and what they leave of those tokens."""
    onto_hub, others = draft[1:], draft[1:] / draft[1:].sum()
    after = (target[1:] - onto_hub).clamp_min(0)
    believed = draft[0] * (draft[1:] + smoothing) / (draft[1:] + smoothing).sum()
    accepted = draft[0] * others * (after / believed).clamp_max(1)
    return torch.minimum(target[1:], onto_hub) + accepted + (after - believed).clamp_min(0)


def test_smoothing_one_side_of_a_test_is_biased():
    """Over 32000 tokens the smoothing weighs 1.6 beside a row of weight 1: likely tokens are accepted too often."""
    rank = torch.arange(1, 32001, dtype=torch.float64)
    draft, target = (1 / rank**power / (1 / rank**power).sum() for power in (1.2, 1.1))
    exact = smoothed_stage(target, draft, 0.0)
    torch.testing.assert_close(exact, target[1:], rtol=0, atol=EXACT)
    error = smoothed_stage(target, draft, 5e-5) - target[1:]
    assert float(error.abs().sum()) > 0.01


# --- The elementary symmetric polynomials are not sampling without replacement ---------------------------------------


def polynomial_containment(draft: Tensor, members: list[int], k: int) -> float:
    """Q(H) = e_k(q; H) / e_k(q; all), printed for sampling without replacement (arXiv 2502.18779, section 4.2.2)."""

    def symmetric(row: list[float]) -> float:
        sums = [1.0] + [0.0] * k
        for one in row:
            sums = [1.0] + [sums[j] + one * sums[j - 1] for j in range(1, k + 1)]
        return sums[k]

    return symmetric([float(draft[i]) for i in members]) / symmetric(draft.tolist())


def enumerated_containment(scheme: Scheme, draft: Tensor, members: list[int], k: int) -> float:
    drafts, chance = enumerate_drafts(scheme, draft, k)
    inside = (drafts.unsqueeze(-1) == torch.tensor(members)).any(dim=-1).all(dim=-1)
    return float(chance[inside].sum())


def test_the_polynomial_formula_is_another_law():
    """It is that of independent draws conditioned on being distinct (ConditionalPoisson), not of successive draws."""
    draft, members = row(0.8, 0.1, 0.1), torch.tensor([False, True, True])
    printed = polynomial_containment(draft, [1, 2], 2)
    assert printed == pytest.approx(0.0588, abs=5e-5)
    cases: list[tuple[Scheme, float]] = [(WithoutReplacement(), 0.0222), (ConditionalPoisson(), printed)]
    for scheme, value in cases:
        assert enumerated_containment(scheme, draft, [1, 2], 2) == pytest.approx(value, abs=5e-5)
        assert float(containment(scheme, draft, members, torch.tensor(2))) == pytest.approx(value, abs=5e-5)


def test_a_rule_beats_the_optimum_of_the_polynomial_formula():
    """With it the "optimal" acceptance is below what recursive rejection reaches."""
    target, draft = row(0.98, 0.01, 0.01), row(0.8, 0.1, 0.1)
    printed = 1 + float(target[1:].sum()) - polynomial_containment(draft, [1, 2], 2)
    case = enumerated(RecursiveRejectionWithoutReplacement(), 2, target, draft)
    assert case.acceptance > printed + 0.01
    best = optimal_set(WithoutReplacement(), case.draft, case.target, torch.tensor(2)).acceptance
    assert case.acceptance <= float(best) + EXACT


def picked_at_random(target: Tensor, draft: Tensor, believed: Scheme) -> Tensor:
    """Draw two tokens without replacement, pick one at random and verify it against its law under another scheme."""
    drafts, chance = enumerate_drafts(WithoutReplacement(), draft, 2)
    guessed, share = enumerate_drafts(believed, draft, 2)
    law = torch.zeros_like(draft).index_add(0, guessed.flatten(), share.repeat_interleave(2) / 2)
    both = torch.cat([drafts[:, :1], drafts[:, 1:]])
    return emitted(SpeculativeSampling(), target, both, torch.cat([chance, chance]) / 2, law)


def test_verifying_successive_drafts_by_the_polynomial_law_is_biased():
    target, draft = row(0.2, 0.3, 0.5), row(0.8, 0.1, 0.1)
    wrong = picked_at_random(target, draft, ConditionalPoisson())
    assert wrong.tolist() == pytest.approx([0.20778, 0.29222, 0.5], abs=5e-6)
    torch.testing.assert_close(picked_at_random(target, draft, WithoutReplacement()), target, rtol=0, atol=EXACT)


def test_every_biased_rule_has_an_exact_one_beside_it():
    """The enumeration itself is checked: an exact rule shows no error at any of the rows above."""
    exact: list[Callable[[], NodeVerifier]] = [RecursiveRejection, KSeq, SpecHubRule]
    for build in exact:
        for target, draft in ZOO.values():
            assert enumerated(build(), 2, target, draft, 0.2).error < 1e-9
