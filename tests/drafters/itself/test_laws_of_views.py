"""Texts drafted over few keys follow the target's law: over all draws of several steps, and in many sampled texts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from choices import Law, Toy, distance, law_of
from doubles import tiny_model
from key_views import few, text_of
from sampled import FALSE_ALARM_RATE, NEW, PROMPT, VOCAB, exact_law, p_value
from sampled import target as sampled_target
from torch import Tensor

import polydraft
from polydraft import IID, ByShape, Chain, Chunks, Mass, Optimal, Recent, SelfDrafter, Snap, TopDown, View, Widths
from polydraft.drafters import DraftRequest, Keys
from polydraft.engine import Ending, Method, Prompts, TargetLaw
from polydraft.engine.loop.step import begin, step
from polydraft.models import HuggingFaceModel, TreeCache
from polydraft.probs import Noise, SamplingParams
from polydraft.trees import Draft, TreePolicy
from polydraft.verifiers import PathVerifier, SpeculativeSampling

EVERY: list[Keys] = [Recent(1, 2, room=2), Snap(3, 2), Mass(3, 2), Chunks(3, 1, 2)]
WHOLE, BRANCHING = TopDown(SpeculativeSampling()), TopDown(Optimal(IID()))


@cache
def model() -> HuggingFaceModel:
    """Return a target in double precision whose law is far from even."""
    return HuggingFaceModel(tiny_model("llama", 2, seed=3))


def texts(found: Sequence[int], missing: int, prompt: Sequence[int]) -> Law:
    """Return the law of so many more tokens behind a text, by the model's own passes."""
    if not missing:
        return {(): 1.0}
    with torch.no_grad():
        row = model().model(torch.tensor([[*prompt, *found]])).logits[0, -1].softmax(-1).tolist()
    law: Law = {}
    for token, chance in enumerate(row):
        law |= {(token, *text): chance * share for text, share in texts([*found, token], missing - 1, prompt).items()}
    return law


CASES = [
    *((keys, WHOLE, Chain(1)) for keys in EVERY),
    *(pytest.param(keys, BRANCHING, Widths((2,)), marks=pytest.mark.slow) for keys in EVERY),
]


@pytest.mark.parametrize(("keys", "rule", "policy"), CASES, ids=str)
def test_over_all_draws_of_two_steps_the_law_is_the_targets(keys: Keys, rule: PathVerifier, policy: TreePolicy) -> None:
    """Keys are chosen at the first step and anew at the second."""
    prompt = [0, 1, 1, 0, 1]
    rest = partial(texts, prompt=prompt)
    target: Any = model()
    found, failures = law_of(target, few(keys), rule, policy, [prompt], 3, steps=2, rest=rest)
    assert not failures and distance(found, texts([], 3, prompt)) < 1e-12


@pytest.mark.slow
def test_beside_another_row_the_law_is_the_targets() -> None:
    prompts = [[0, 1, 1, 0, 1], [1, 1, 0, 1, 0]]
    target: Any = model()
    found, failures = law_of(
        target,
        few(EVERY[1]),
        WHOLE,
        Chain(1),
        prompts,
        3,
        steps=2,
        rest=partial(texts, prompt=prompts[0]),
    )
    assert not failures and distance(found, texts([], 3, prompts[0])) < 1e-12


# What a choice may not read.


class ChoosingByTheDraft(SelfDrafter):
    """Wrong: it chooses keys by the token that it has drawn, and reports the row that these give."""

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft, Any]:
        drawn, after = super().draft(state, request)
        window = 2 + int(drawn.tree.tokens[0, 1])
        told, _ = few(Recent(0, window)).draft(state, request)
        return replace(drawn, probs=told.probs), after


def test_keys_that_are_chosen_by_the_draft_bias_the_text() -> None:
    """What the law above rests on: keys are chosen before the first draw."""
    target, prompt = Toy(), [0, 2, 1, 1]
    right, _ = law_of(target, few(Recent(0, 2)), WHOLE, Chain(1), [prompt], 2, steps=1)
    wrong, failures = law_of(target, ChoosingByTheDraft(View(keys=Recent(0, 2))), WHOLE, Chain(1), [prompt], 2, steps=1)
    assert not failures and distance(right, target.texts(prompt, 2)) < 1e-12
    assert distance(wrong, target.texts(prompt, 2)) > 1e-3


class Behind(Snap):
    """Wrong: it chooses by keys behind the committed text, those of tokens that were drawn."""

    def slots(self, known: int, keys: Tensor, queries: Tensor) -> Tensor:
        first = (keys[:, known:].sum((1, 2)).abs() * 1e6).long() % (known - self.budget)
        return first.unsqueeze(-1) + torch.arange(self.budget)


def drafted_again(keys: Keys) -> list[bool]:
    """Return for every step whether it drafts the same when it is taken again, after all of it was done once."""
    params = SamplingParams(temperature=1.0)
    prompts = Prompts(text_of([PROMPT]), (TargetLaw(params),), (Ending(max_length=30),), Noise.from_seed(3, 1))
    batch = begin(HuggingFaceModel(sampled_target()), Method(few(keys), ByShape(), Chain(3)), prompts)
    same = list[bool]()
    while batch.going:
        _, first, _ = step(batch)
        batch, again, _ = step(batch)
        same.append(torch.equal(first.tree.tokens, again.tree.tokens))
    return same


def test_keys_that_are_chosen_behind_the_text_are_other_ones_when_a_step_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So drafts would follow from their own random numbers, which the law of a draft must not."""
    assert all(drafted_again(Snap(3, 2)))
    monkeypatch.setattr(TreeCache, "keys_of", lambda self, layer, count: self.entries[2 * layer][0, :, : count + 3])
    assert not all(drafted_again(Behind(3, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("keys", EVERY, ids=str)
def test_many_texts_follow_the_targets_law(keys: Keys) -> None:
    ids = torch.tensor([PROMPT])
    output = polydraft.generate(
        sampled_target(),
        ids,
        attention_mask=torch.ones_like(ids),
        drafter=few(keys),
        policy=Chain(2),
        seed=20,
        max_new_tokens=NEW,
        num_return_sequences=8000,
        temperature=1.0,
        top_k=0,
    )
    place = torch.tensor([VOCAB**power for power in reversed(range(NEW))])
    counts = (output.sequences[:, len(PROMPT) :] * place).sum(-1).bincount(minlength=VOCAB**NEW)
    assert output.statistics.accepted and not output.statistics.fallback
    assert p_value(counts, exact_law(PROMPT)) > FALSE_ALARM_RATE
