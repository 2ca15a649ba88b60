"""The law of the text under every lossless rule of the catalogue and every kind of head.

Every draw of drafts and every verdict is a choice, and all choices are made in turn: summed up, texts have the target's
law, whatever a head's rows know of the tokens drafted above them.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from choices import distance, law_of
from doubles import tiny_model
from heads import LATTICE, NARROW, OF_FEW, RIDERS, TOY_HEADS, Riding, Seen, block_drafter, every_head, of_few
from torch import Tensor

import polydraft
from polydraft import Chain, Widths
from polydraft.catalogue import tables
from polydraft.drafters import HeadDrafter
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.drafters.heads.lilicorr import LiLiCorr
from polydraft.schemes import IID, Given, Scheme
from polydraft.trees import TreePolicy
from polydraft.verifiers import (
    BottomUp,
    NaiveMatch,
    NodeVerifier,
    Optimal,
    OutcomeLaw,
    PathVerifier,
    RecursiveRejectionWithoutReplacement,
    ScalableVerifier,
    SharedNoise,
    SpeculativeSampling,
    TopDown,
    TraversalVerification,
    most_drafts,
)

PROMPT = [1, 0, 1]


@dataclass(frozen=True)
class Case:
    """A rule for trees, the trees, and whether their scheme is the rule's usual one."""

    word: str
    rule: PathVerifier
    policy: TreePolicy
    usual: bool

    def __str__(self) -> str:
        lift = {TopDown: "top down", BottomUp: "bottom up"}.get(type(self.rule), "whole trees")
        return f"{self.word}, {lift}, {self.rule.scheme.name}"


def lifts(rule: Any) -> list[PathVerifier]:
    """Return a rule as it verifies trees; none if the law of its verdicts is not known."""
    if isinstance(rule, NodeVerifier):
        return [TopDown(rule), *([BottomUp(rule)] if isinstance(rule, ScalableVerifier) else [])]
    return [rule] if isinstance(rule, PathVerifier) else []


def drawn(scheme: Scheme) -> bool:
    """Tell whether a head can draft so, each node by itself; of drafts that share noise, see `SharedNoise` below."""
    return scheme.independent and scheme != Given()


def cases() -> list[Case]:
    """Return all lossless rules with all schemes of theirs, on the widest trees of two levels that can be summed."""
    found = list[Case]()
    for line in tables.RULES:
        schemes = [scheme for scheme in line.known if drawn(scheme)] if line.usual.lossless else []
        for rule in [*map(line.of, schemes), *(line.variants if schemes else ())]:
            wide = most_drafts(rule) > 1 and line.word != "block"
            policy = Widths((2, 1)) if wide else Chain(2)
            found += [Case(line.word, one, policy, rule == line.of(schemes[0])) for one in lifts(rule)]
    return found


CASES = cases()


def check_law(head: str, case: Case, vocab: int) -> None:
    target = Seen(vocab)
    law, failures = law_of(target, TOY_HEADS[head](vocab), case.rule, case.policy, [PROMPT], 3, steps=1)
    assert not failures
    assert distance(law, target.texts(PROMPT, 3)) < 1e-12


def test_no_rule_is_left_out() -> None:
    """But for shared noise, which has no law given the drafts, and follows below."""
    lossless = {line.word for line in tables.RULES if line.usual.lossless}
    assert lossless - {case.word for case in CASES} == {"shared-noise"}
    assert {"traversal", "recursive", "k-seq", "spec-hub", "importance-weighted", "race", "optimal"} <= lossless


@pytest.mark.long(4)
@pytest.mark.parametrize("case", [one for one in CASES if one.usual], ids=str)
def test_every_rule_writes_the_targets_law_with_a_block_head(case: Case) -> None:
    check_law("block", case, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rule_and_scheme_writes_the_targets_law_with_three_tokens(case: Case) -> None:
    check_law("block", case, 3)


OTHERS = [head for head in TOY_HEADS if head != "block"]
FEW = [
    Case("traversal", TraversalVerification(), Widths((2, 1)), True),
    Case("optimal", BottomUp(Optimal(IID())), Widths((2, 1)), True),
    Case("recursive-wo", TopDown(RecursiveRejectionWithoutReplacement()), Widths((2, 1)), True),
    Case("naive", TopDown(NaiveMatch()), Widths((2, 2)), True),
]


@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.parametrize("head", OTHERS)
def test_other_heads_write_the_targets_law(head: str, case: Case) -> None:
    check_law(head, case, 2)


FEW_TOKENS = torch.tensor([0, 2])


@pytest.mark.long(2)
@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.parametrize("head", OF_FEW)
def test_heads_of_few_tokens_write_the_targets_law(head: str, case: Case) -> None:
    """Their rows are laws of two tokens of three, of which the third is never drafted."""
    target = Seen(3)
    law, failures = law_of(target, of_few(head, FEW_TOKENS, 3), case.rule, case.policy, [PROMPT], 3, steps=1)
    assert not failures
    assert distance(law, target.texts(PROMPT, 3)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("head", OTHERS)
def test_other_heads_write_the_targets_law_under_every_rule(head: str, case: Case) -> None:
    check_law(head, case, 2)


def rider_distance(kind: str, rule: PathVerifier, policy: TreePolicy, steps: int) -> float:
    """Return how far four tokens are from the target's law; the first step drafts nothing."""
    target = Riding(2)
    law, failures = law_of(target, RIDERS[kind](2), rule, policy, [PROMPT], 4, steps=steps)
    assert not failures
    return distance(law, target.texts(PROMPT, 4))


@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.parametrize("kind", ["SPACE, two masks", "PaSS"])
def test_riders_write_the_targets_law(kind: str, case: Case) -> None:
    assert rider_distance(kind, case.rule, case.policy, 2) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", RIDERS)
def test_riders_write_the_targets_law_under_every_rule(kind: str, case: Case) -> None:
    assert rider_distance(kind, case.rule, case.policy, 2) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.parametrize("kind", RIDERS)
def test_riders_write_the_targets_law_where_some_steps_cannot_draft(kind: str, case: Case) -> None:
    assert rider_distance(kind, case.rule, case.policy, 3) < 1e-12


@dataclass(frozen=True)
class DrawsFromTheTarget(SpeculativeSampling):
    """SPACE's code: a draft is accepted with min(1, p / q), and a rejected one is replaced by a draw from p."""

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        accepted = self.shares(drafts, draft_probs, target_probs)
        return OutcomeLaw(accepted, (1 - accepted) * target_probs)


@pytest.mark.parametrize("kind", ["SPACE", "SPACE, two masks"])
def test_spaces_own_rule_is_biased(kind: str) -> None:
    assert rider_distance(kind, TopDown(SpeculativeSampling()), Chain(2), 2) < 1e-12
    assert rider_distance(kind, TopDown(DrawsFromTheTarget()), Chain(2), 2) > 0.01


class LikeliestAsDrawn(IID):
    """ReDrafter's sampling mode: the beam's tokens are the likeliest ones, and are compared as if they were drawn."""

    def sample(self, rows: Tensor, counts: Tensor, uniforms: Tensor, k: int) -> Tensor:
        likeliest = rows.topk(k).indices
        return likeliest.where(torch.arange(k) < counts.unsqueeze(-1), -1)


def test_redrafters_own_rule_is_biased() -> None:
    target, head = Seen(3), TOY_HEADS["ReDrafter"](3)
    given: Any = (target, head)
    wrong, _ = law_of(*given, TopDown(SpeculativeSampling(LikeliestAsDrawn())), Chain(2), [PROMPT], 3, steps=1)
    right, _ = law_of(*given, TopDown(SpeculativeSampling()), Chain(2), [PROMPT], 3, steps=1)
    assert distance(right, target.texts(PROMPT, 3)) < 1e-12
    assert distance(wrong, target.texts(PROMPT, 3)) > 1e-3


@pytest.mark.parametrize("head", every_head())
def test_shared_noise_writes_the_text_of_its_seed_whatever_a_head_drafts(head: str) -> None:
    """The text is a function of seed and target, and without drafts it is a draw of the target's."""
    model, given = tiny_model(vocab=24), {"max_new_tokens": 16, "temperature": 1.0, "top_k": 0, "eos_token_id": None}
    prompts = torch.tensor([[3, 1, 4]]).expand(16, -1)
    options: dict[str, Any] = {**given, "verifier": SharedNoise(), "seed": 2}
    plain = polydraft.generate(model, prompts, drafter="none", **options)
    found = polydraft.generate(model, prompts, drafter=every_head()[head], policy=Widths((2, 2)), **options)
    assert torch.equal(found.sequences, plain.sequences) and found.statistics.accepted > 0
    assert len({tuple(one) for one in plain.sequences.tolist()}) == len(prompts)


@pytest.mark.long(2)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_rows_of_some_candidates_alone_write_the_targets_law(case: Case) -> None:
    """LiLiCorr's rows have two of three tokens, of which the others are never drafted."""
    head = block_drafter("lilicorr", vocab=3, width=4, block=3, anatomy=NARROW).network
    path = LiLiCorr(4, 2, replace(LATTICE, candidates=2))
    few = BlockHead(head.shape, path).double().eval().requires_grad_(False)
    target = Seen(3)
    law, failures = law_of(target, HeadDrafter(few, HeadEnds()), case.rule, case.policy, [PROMPT], 3, steps=1)
    assert not failures
    assert distance(law, target.texts(PROMPT, 3)) < 1e-12
