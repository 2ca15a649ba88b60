"""The target drafting for itself over few of its own keys: a view, which no other room knows of."""

from typing import Any

import pytest
import torch
from choices import Toy, distance, law_of
from doubles import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft.drafters import Recent, SelfDrafter, View
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.schemes import IID, TopK, WithoutReplacement
from polydraft.trees import Chain, TreePolicy, Widths
from polydraft.verifiers import ByShape, NaiveMatch, Optimal, PathVerifier, TopDown

RULES = [
    (ByShape(), Chain(2)),
    (TopDown(NaiveMatch(TopK())), Widths((2, 1))),
    (TopDown(Optimal(IID())), Widths((2, 1))),
    (TopDown(Optimal(WithoutReplacement())), Widths((2,))),
]


@pytest.mark.long(1)
@pytest.mark.parametrize(("rule", "policy"), RULES, ids=str)
def test_four_tokens_follow_the_target(rule: PathVerifier, policy: TreePolicy) -> None:
    target, prompt = Toy(), [0, 2, 1, 1]
    found, failures = law_of(target, SelfDrafter(View(keys=Recent(1, 2))), rule, policy, [prompt], 4, steps=1)
    assert not failures and distance(found, target.texts(prompt, 4)) < 1e-12


def test_two_rows_follow_the_target() -> None:
    """Behind the first step rows end at different places, each with as many keys as it has."""
    target, prompts = Toy(2), [[0, 1], [1, 1]]
    found, failures = law_of(target, SelfDrafter(View(keys=Recent(1, 9))), ByShape(), Chain(1), prompts, 3, steps=2)
    assert not failures and distance(found, target.texts(prompts[0], 3)) < 1e-12


@pytest.mark.long(6)
@pytest.mark.parametrize("keys", [Recent(16, 64), Recent(0, 1), Recent(1, 2), Recent(4, 2, room=6)], ids=str)
@pytest.mark.parametrize("policy", [3, "2,2,1", "best-first:6x3:3"])
def test_greedy_texts_are_plain_ones(keys: Recent, policy: object, beside: Any) -> None:
    beside(SelfDrafter(View(keys=keys)), policy)


def test_all_keys_draft_what_the_target_writes(target: PreTrainedModel, beside: Any) -> None:
    found = beside(SelfDrafter(View(keys=Recent(16, 64))), 3, [[3, 1, 4, 1, 5]]).statistics
    assert found.accepted >= found.drafted - 3, "the last step may draft more than is wanted"


def test_rows_are_the_targets_over_these_keys(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that are kept saw all before them; the last one sees those that are kept, at their own places."""
    rows, tokens = list[Tensor](), [3, 1, 4, 1, 5, 9, 2, 6]
    proposed = polydraft.drafters.itself.self_drafter.draft_rows

    def noted(logits: Tensor, *rest: Any) -> Any:
        rows.append(logits)
        return proposed(logits, *rest)

    monkeypatch.setattr("polydraft.drafters.itself.self_drafter.draft_rows", noted)
    drafter = SelfDrafter(View(keys=Recent(1, 3)))
    polydraft.generate(target, torch.tensor([tokens]), drafter=drafter, policy=1, max_new_tokens=2, do_sample=False)
    seen = torch.ones(8, 8).tril()
    seen[-1, 1:4] = 0
    mask = torch.zeros(1, 1, 8, 8).masked_fill(seen == 0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = target(torch.tensor([tokens]), attention_mask=mask).logits[0, -1]
    torch.testing.assert_close(rows[0][0, 0], expected, atol=2e-5, rtol=1e-4)


def test_it_drafts_for_some_rows_of_a_running_batch(target: PreTrainedModel) -> None:
    prompts, options = {"a": [3, 1, 4, 1, 5], "b": [2, 7, 1], "c": [4, 4]}, {"max_new_tokens": 12, "do_sample": False}
    plain = {one.name: one.tokens for one in polydraft.generate_many(target, prompts, drafter="none", **options)}
    own = {name: {"drafter": SelfDrafter(View(keys=Recent(1, 3))), "policy": 3} for name in ("a", "c")}
    run = polydraft.generate_many(target, prompts, batch_size=2, per_prompt=own, drafter="none", **options)
    texts = {one.name: one for one in run}
    assert {name: text.tokens for name, text in texts.items()} == plain and not run.statistics.fallback
    assert all(texts[name].accepted for name in own)


@pytest.mark.wrong_types
@pytest.mark.parametrize("keys", [(-1, 3), (0, 0), (1.5, 3)])
def test_senseless_keys_are_refused(keys: tuple[int, int]) -> None:
    with pytest.raises(InvalidParameter, match="must be a whole number of at least"):
        Recent(*keys)


def test_a_target_that_cannot_branch_is_refused_by_name() -> None:
    ids, target = torch.tensor([[3, 1, 4]]), tiny_model("bloom")
    with pytest.raises(UnsupportedModel, match="cannot branch has no keys to draft from in part"):
        polydraft.generate(target, ids, drafter=SelfDrafter(View(keys=Recent())), max_new_tokens=4)
