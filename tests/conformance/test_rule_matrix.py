"""The matrix of rules: it agrees with theory, and wrong rules of every kind are seen and named."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import pytest
import torch
from torch import Tensor

from polydraft.conformance import (
    Case,
    RuleReport,
    TreeReport,
    cases,
    check_rule,
    check_tree_rule,
    matrix,
    proved_rules,
    tree_matrix,
)
from polydraft.conformance.tree_rules import every_tree, worlds
from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.schemes import IID, Product, Scheme, TopK, TopThenSample, WithoutReplacement
from polydraft.theory import optimal_acceptance
from polydraft.trees import Draft
from polydraft.verifiers import (
    NaiveMatch,
    OutcomeLaw,
    PathLaw,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpeculativeSampling,
    TopDown,
    TopThenSampleRule,
    TreeVerifier,
)

FEW = cases(random=2)


@pytest.fixture(scope="module")
def found() -> list[RuleReport]:
    return matrix(k=2, rows=FEW)


def test_every_rule_is_covered_once_and_passes(found: list[RuleReport]) -> None:
    assert len(found) == len(proved_rules.node_rules()) == len({(one.rule, one.scheme) for one in found})
    for one in found:
        assert one.paired and not one.failed and not one.refusal, one
        assert one.exact == one.lossless, one
        assert one.drafts == (1 if one.rule == "speculative sampling" else 2)


def test_no_lossless_rule_accepts_more_than_the_optimum_or_misstates_what_it_accepts(found: list[RuleReport]) -> None:
    for one in found:
        assert one.misstated < 1e-9
        if one.lossless:
            assert one.excess < 1e-9 and one.gap >= 0
            assert all(accepted <= best + 1e-9 for accepted, best in zip(one.acceptance, one.optimum, strict=True))


def test_the_optimal_rules_have_no_gap(found: list[RuleReport]) -> None:
    for one in found:
        if one.rule == "race":
            assert one.gap < 0.005, one
        elif one.rule in ("optimal", "top then sample", "spechub", "speculative sampling") or one.scheme in (
            "top-k",
            "given",
        ):
            assert one.gap < 1e-9 or not one.lossless, one
    gaps = {(one.rule, one.scheme): one.gap for one in found}
    assert gaps["naive match", "iid"] > 0.1
    assert gaps["recursive rejection", "iid"] > 0.01


def test_lossy_rules_are_enumerated_and_marked(found: list[RuleReport]) -> None:
    lossy = [one for one in found if not one.lossless]
    assert {one.rule for one in lossy} == {"typical acceptance", "top-beta", "lenient"}
    assert all(one.deviation > 0.01 and not one.failed for one in lossy)


@pytest.mark.parametrize(
    "scheme", [one for one in proved_rules.schemes() if one != Product()], ids=lambda one: one.name
)
def test_the_optimum_by_going_through_all_sets_is_that_of_theory(scheme: Scheme) -> None:
    report = check_rule(NaiveMatch(scheme), 3, rows=[case for case in FEW if case.name.startswith("random")])
    draft = torch.stack([torch.nn.functional.pad(case.draft, (0, 1)) for case in FEW if case.name.startswith("random")])
    target = torch.stack([case.target_atoms for case in FEW if case.name.startswith("random")])
    for k, best in enumerate(report.optimum, start=1):
        assert best == pytest.approx(float(optimal_acceptance(draft, target, scheme, k).mean()), abs=1e-9)


def test_all_pairs_shows_which_other_drafts_a_rule_can_take() -> None:
    rules = [RecursiveRejection(), TopThenSampleRule(), SpeculativeSampling()]
    reports = {(one.rule, one.scheme): one for one in matrix(rules, k=2, all_pairs=True, rows=FEW)}
    assert len(reports) == 3 * (len(proved_rules.schemes()) - 1), "drafts from several rows are left out"
    assert reports["recursive rejection", "iid"].paired
    other = reports["recursive rejection", "without replacement"]
    assert not other.paired and not other.failed and other.deviation > 0.02
    assert reports["top then sample", "without replacement"].exact, "given the others the last draft is a draw"
    assert reports["speculative sampling", "top-k"].deviation > 0.02


@dataclass(frozen=True)
class Picky(RecursiveRejection):
    """A rule that looks at its drafts and refuses those of another scheme."""

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        if drafts.shape[-1] == 1 and len(drafts) < 40:
            raise UnpairedScheme("These drafts are not independent.")
        return super().law(drafts, draft_probs, target_probs)


def test_a_rule_that_refuses_other_drafts_says_why() -> None:
    reports = matrix([Picky()], k=1, all_pairs=True, rows=FEW[:30])
    refused = [one for one in reports if one.refusal]
    assert {"top-k", "given"} <= {one.scheme for one in refused}
    assert refused[0].refusal == "These drafts are not independent." and not refused[0].failed
    assert refused[0].as_dict()["deviation"] is None


@dataclass(frozen=True)
class Changed(RecursiveRejection):
    """A rule that is wrong in one way."""

    how: str = ""

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        honest = super().law(drafts, draft_probs, target_probs)
        child, rest = honest.child.clone(), honest.rest.clone()
        if self.how == "duplicates skipped":
            repeats = torch.tril(drafts.unsqueeze(-1) == drafts.unsqueeze(-2), diagonal=-1).any(dim=-1)
            return super().law(drafts.masked_fill(repeats, -1), draft_probs, target_probs)
        if self.how == "a little generous":
            child, rest = child + 1e-6 * rest.sum(-1, keepdim=True) * (drafts == drafts[..., :1]), rest * (1 - 1e-6)
        elif self.how == "tail forgotten":
            rest[..., -1] = 0
        elif self.how == "not a number":
            child = child / (target_probs[..., :1] > 0)
        elif self.how == "sum":
            rest = rest * 1.001
        elif self.how == "absent drafts accepted":
            child = child + 1e-3 * (drafts < 0)
        elif self.how == "negative":
            rest[..., 0] += 0.01
            rest[..., 1] -= 0.01
        return OutcomeLaw(child, rest)


HOW = ("duplicates skipped", "a little generous", "tail forgotten", "not a number", "sum", "negative")


@pytest.mark.parametrize("how", HOW)
def test_a_wrong_rule_is_seen(how: str) -> None:
    rows = [*FEW, Case("all drafts the same", FEW[0].target, FEW[0].draft, 0.0)]
    assert not check_rule(Changed(), 2, rows=rows).failed
    report = check_rule(Changed(how=how), 2, rows=rows)
    assert report.failed and report.deviation > 1e-8
    assert report.worst[0].size == report.deviation and len(report.worst) == 3
    assert report.rule == f"recursive rejection (how={how})"
    if how == "not a number":
        assert report.deviation == inf and report.as_dict()["deviation"] is None
    if how == "duplicates skipped":
        assert {one.drafts for one in report.worst} == {2}


def test_accepting_an_absent_draft_is_seen() -> None:
    @dataclass(frozen=True)
    class Wrong(RecursiveRejectionWithoutReplacement):
        def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
            honest = super().law(drafts, draft_probs, target_probs)
            moved = 1e-3 * (drafts < 0)
            return OutcomeLaw(honest.child + moved, honest.rest * (1 - moved.sum(-1, keepdim=True)))

    report = check_rule(Wrong(), 2, rows=FEW)
    assert report.failed and report.worst[0].case.startswith("one-hot")


@dataclass(frozen=True)
class Bare:
    """The least that a rule of one's own needs: no acceptance, no dataclass conventions."""

    scheme: Scheme = IID()
    name = "mine"
    lossless = True

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        return OutcomeLaw(torch.zeros(drafts.shape, dtype=target_probs.dtype), target_probs)


def test_a_rule_of_ones_own_needs_a_law_and_little_else() -> None:
    report = check_rule(Bare())
    assert report.exact and report.acceptance == (0.0, 0.0, 0.0) and report.drafts == 3
    assert report.optimum[0] < report.optimum[1] < report.optimum[2]
    assert report.gap > 0.9 and report.misstated == 0


@pytest.mark.parametrize("k", [0, 6])
def test_a_number_of_drafts_out_of_range_is_named(k: int) -> None:
    with pytest.raises(InvalidParameter, match=f"k must lie in 1 to 5, since all drafts are listed, but is {k}"):
        check_rule(Bare(), k)


def test_a_misstated_acceptance_is_seen() -> None:
    class Boasting(RecursiveRejection):
        def acceptance(self, draft_probs: Tensor, target_probs: Tensor, counts: Tensor) -> Tensor:
            return super().acceptance(draft_probs, target_probs, counts) + 0.01

    report = check_rule(Boasting(), 2, rows=FEW)
    assert report.exact and report.misstated == pytest.approx(0.01)


def test_the_zoo_has_what_breaks_rules() -> None:
    every = cases()
    assert len({str(case) for case in every}) == len(every) > 40
    for case in every:
        assert float(case.target.sum()) + case.tail == pytest.approx(1) and float(case.draft.sum()) == pytest.approx(1)
    assert any((case.draft * case.target).sum() == 0 for case in every), "disjoint supports"
    assert any(case.draft.max() == 1 for case in every) and any(
        bool(((0 < case.draft) & (case.draft < 1e-29)).any()) for case in every
    )
    rows = FEW[0].draft_rows(Product())
    assert rows.shape == (2, 5) and not torch.allclose(rows[0], rows[1])
    assert [float(row.sum()) for row in rows] == pytest.approx([1, 1])


def passing(rules: Sequence[TreeVerifier]) -> dict[tuple[str, str], TreeReport]:
    reports = {(one.rule, one.scheme): one for one in tree_matrix(rules)}
    assert len(reports) == len(rules)
    for one in reports.values():
        assert not one.failed and one.exact == one.lossless, one
    return reports


def test_tree_rules_are_exact_and_those_from_below_accept_more() -> None:
    quick = ("speculative", "block", "traversal", "top then sample", "shared noise", "typical")
    reports = passing([rule for rule in proved_rules.tree_rules() if rule.name.startswith(quick)])
    assert len(reports) == 11
    chain = reports["speculative sampling, top down", "iid"]
    block = reports["block verification", "iid"]
    assert chain.widths == block.widths == (1, 1)
    assert all(below >= above - 1e-12 for below, above in zip(block.accepted, chain.accepted, strict=True))
    assert block.accepted == pytest.approx(reports["speculative sampling, bottom up", "iid"].accepted)
    assert reports["shared noise", "coupled"].samples > 0 == block.samples


@pytest.mark.slow
def test_all_tree_rules_are_exact_and_the_optimal_ones_accept_most() -> None:
    reports = passing(proved_rules.tree_rules())
    for scheme in ("iid", "without replacement"):
        best = reports["optimal, top down", scheme].accepted
        lifted = [one for (name, drawn), one in reports.items() if drawn == scheme and name.endswith("top down")]
        others = [one.accepted for one in lifted if one.lossless]
        assert all(mean <= most + 1e-9 for accepted in others for mean, most in zip(accepted, best, strict=True))


@dataclass(frozen=True)
class Hasty(TopDown):
    """A wrong tree rule: it ends at the root more often than its node rule says."""

    share: float = 1e-3

    def path_law(self, draft: Draft, target_probs: Tensor) -> PathLaw:
        honest = super().path_law(draft, target_probs)
        end = honest.end * (1 - self.share)
        end[:, 0] += self.share
        return PathLaw(end, honest.rest)


def test_a_wrong_tree_rule_is_seen() -> None:
    assert not check_tree_rule(Hasty(RecursiveRejection(), share=0.0)).failed
    report = check_tree_rule(Hasty(RecursiveRejection()))
    assert report.failed and 1e-6 < report.deviation < 1e-3 and report.worst in {world.name for world in worlds()}
    assert check_tree_rule(TopDown(Changed(how="duplicates skipped"))).failed


class Sampler:
    """A tree rule without a law of its own: `TopDown` seen from outside only, with drafts of this scheme."""

    name, lossless = "from outside", True

    def __init__(self, rule: TopDown, scheme: Scheme) -> None:
        self.rule, self.scheme = rule, scheme

    def verify(self, *arguments: object) -> object:
        return self.rule.verify(*arguments)


def test_a_tree_rule_without_a_law_is_sampled() -> None:
    honest, wrong = (check_tree_rule(Sampler(TopDown(RecursiveRejection()), scheme)) for scheme in (IID(), TopK()))
    assert honest.samples == wrong.samples > 1000
    assert not honest.failed and wrong.failed and wrong.e_value >= 1e6
    assert honest.accepted == pytest.approx(check_tree_rule(TopDown(RecursiveRejection())).accepted, abs=0.06)


def test_widths_out_of_range_are_named_and_chains_stay_chains() -> None:
    with pytest.raises(
        InvalidParameter, match=r"widths must lie in 1 to 3, since all trees are listed, but are \(4, 1"
    ):
        check_tree_rule(TopDown(RecursiveRejection()), (4, 1))
    with pytest.raises(UnpairedScheme):
        check_tree_rule(TopDown(SpeculativeSampling()), (2, 2))
    assert check_tree_rule(TopDown(TopThenSampleRule()), (3, 1)).exact


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), TopThenSample()], ids=lambda one: one.name)
def test_all_trees_are_listed(scheme: Scheme) -> None:
    for world in worlds():
        draft, chance = every_tree(world, scheme, (2, 1))
        assert float(chance.sum()) == pytest.approx(1, abs=1e-12)
        assert float(world.joint.sum()) == pytest.approx(1, abs=1e-12)
        assert draft.tree.tokens.shape == (len(chance), 5)
