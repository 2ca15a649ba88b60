"""Texts drafted over few keys follow the target's law: over all draws of several steps, and in many sampled texts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from choices import Law, OfLaw, Toy, distance, law_of
from doubles import tiny_model
from heads import adapter_drafter
from key_views import few, text_of
from sampled import FALSE_ALARM_RATE, PROMPT, VOCAB, of_many
from sampled import target as sampled_target
from stacks import stacks
from torch import Tensor
from views import skipping

from polydraft import IID, ByShape, Chain, Chunks, Mass, Optimal, Recent, SelfDrafter, Snap, TopDown, View, Widths
from polydraft.drafters import Drafter, DraftRequest, Keys, SkippingDrafter
from polydraft.engine import Ending, Method, Prompts, TargetLaw
from polydraft.engine.loop.step import begin, step
from polydraft.models import HuggingFaceModel, LayerSet, TreeCache
from polydraft.probs import Noise, SamplingParams
from polydraft.trees import Draft, TokenTree, TreePolicy
from polydraft.verifiers import PathVerifier, SpeculativeSampling
from polydraft.verifiers.trees.lifts import PathLaw

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


LAYERS = {
    "skip": SelfDrafter(View(layers=skipping(1))),
    "skip-mlp": SelfDrafter(View(layers=skipping(mlp=[1]))),
    "exit": SelfDrafter(View(layers=skipping(exit=1))),
    "exit, resumed": SelfDrafter(View(layers=skipping(exit=1)), resumes=True),
}
OVER_FEW = {str(keys): few(keys) for keys in EVERY}
ENUMERATED = [
    *(pytest.param(one, WHOLE, Chain(1), id=name) for name, one in (OVER_FEW | LAYERS).items()),
    *(
        pytest.param(one, BRANCHING, Widths((2,)), id=f"{name}, trees", marks=pytest.mark.slow)
        for name, one in (OVER_FEW | LAYERS).items()
    ),
]


@pytest.mark.parametrize(("drafter", "rule", "policy"), ENUMERATED)
def test_over_all_draws_of_two_steps_the_law_is_the_targets(
    drafter: SelfDrafter, rule: PathVerifier, policy: TreePolicy
) -> None:
    """In double precision, on layers that are real; keys are chosen at the first step and anew at the second."""
    prompt = [0, 1, 1, 0, 1]
    rest = partial(texts, prompt=prompt)
    target: Any = model()
    found, failures = law_of(target, drafter, rule, policy, [prompt], 3, steps=2, rest=rest)
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


# Known ways to bias a text: published drafters for the target's own views, written small.


HEAT = 0.5


class OneRow(Toy):
    """A target that writes every token by one law, and its view, which has another."""

    def __init__(self, row: Sequence[float], other: Sequence[float]) -> None:
        super().__init__(len(row))
        self.row, self.other = row, other

    def variant(self, weights: str = "", layers: LayerSet = LayerSet()) -> Toy:  # noqa: B008  a value
        return OneRow(self.other, self.row)

    def _logits(self, seen: Tensor) -> Tensor:
        return torch.tensor(self.row, dtype=torch.float64).log().expand(seen.shape)


class Argmax(IID):
    """Draws the likeliest token each time."""

    def sample(self, draft_probs: Tensor, counts: Tensor, uniforms: Tensor, k: int) -> Tensor:
        there = torch.arange(k) < counts.unsqueeze(-1)
        return draft_probs.argmax(-1, keepdim=True).expand(there.shape).where(there, -1)


def unseen(request: DraftRequest) -> DraftRequest:
    """Return what is asked for with random numbers of which nobody keeps a record: the engine mends what is in it."""
    return replace(request, noise=replace(request.noise, record=None))


class Likeliest(SelfDrafter):
    """Draft & Verify by its default: the likeliest token is drafted, and tested as one drawn from the whole row."""

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft, Any]:
        return super().draft(state, replace(unseen(request), scheme=Argmax()))


class PaddedComb(SelfDrafter):
    """SWIFT's trees: siblings of a chain end in a leaf, and paths are filled up with token 0.

    The filling is tested as a draft, by the row below the chain's own node, which is another branch's. Trees have two
    nodes below the root, and one below each.
    """

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft, Any]:
        drawn, after = super().draft(state, unseen(request))
        tokens, atoms = drawn.tree.tokens.clone(), drawn.atoms.clone()
        probs, listed = drawn.probs.clone(), drawn.shortlist.clone()
        probs[:, 2], listed[:, 2] = probs[:, 1], listed[:, 1]
        tokens[:, 4], atoms[:, 4] = 0, (listed[:, 2] == 0).long().argmax(-1)
        tree = TokenTree(tokens, drawn.tree.topology, drawn.tree.valid)
        return replace(drawn, tree=tree, atoms=atoms, probs=probs, shortlist=listed), after


class RawAtLeaves(PathLaw):
    """SWIFT's token behind a path that was accepted to its end: drawn from the row without its temperature."""

    def next_token(self, draft: Draft, target_probs: Tensor) -> Tensor:
        raw, inner = target_probs**HEAT, (draft.tree.children >= 0).any(-1, keepdim=True)
        return super().next_token(draft, target_probs).where(inner, raw / raw.sum(-1, keepdim=True))


class Cold(Toy):
    """A toy whose texts are written at a temperature."""

    def after(self, text: Sequence[int]) -> Tensor:
        law = super().after(text) ** (1 / HEAT)
        return law / law.sum()


def test_likeliest_tokens_that_are_tested_as_drawn_ones_are_all_that_is_written() -> None:
    """(0, 0, 1) where (.2, .3, .5) is due."""
    target, view = OneRow((0.2, 0.3, 0.5), (0.3, 0.3, 0.4)), View("int8")
    right, _ = law_of(target, SelfDrafter(view), WHOLE, Chain(1), [[0]], 2, steps=1)
    wrong, failures = law_of(target, Likeliest(view), WHOLE, Chain(1), [[0]], 2, steps=1)
    assert not failures and distance(right, target.texts([0], 2)) < 1e-12
    assert distance(wrong, {(2, token): chance for (token,), chance in target.texts([0], 1).items()}) < 1e-12


def test_padding_that_is_tested_as_a_draft_biases_the_text() -> None:
    """Token 0, which is never right, as unknown tokens are, is rejected: what follows a leaf misses another's row."""
    target, shape = OneRow((0.0, 0.4, 0.6), (0.2, 0.5, 0.3)), Widths((2, 1))
    right, _ = law_of(target, SelfDrafter(View("int8")), BRANCHING, shape, [[1]], 2, steps=1)
    wrong, failures = law_of(target, PaddedComb(View("int8")), BRANCHING, shape, [[1]], 2, steps=1)
    assert not failures and distance(right, target.texts([1], 2)) < 1e-12
    assert distance(wrong, target.texts([1], 2)) > 0.02


def test_a_bonus_from_the_raw_row_biases_the_text() -> None:
    target, prompt, laws = Cold(), [0, 2, 1, 1], [TargetLaw(SamplingParams(temperature=HEAT))]
    for rule, low, high in ((WHOLE, -1, 1e-12), (OfLaw(WHOLE, RawAtLeaves), 0.02, 1)):
        found, failures = law_of(target, few(Recent(0, 2)), rule, Chain(1), [prompt], 2, steps=1, laws=laws)
        assert not failures and low < distance(found, target.texts(prompt, 2)) < high


# Many texts.

MANY, FEWER = 20_000, 12_000
WIDE = tiny_model("llama", VOCAB, hidden_size=32, intermediate_size=32, dtype=torch.float32)
"""A target whose rows of weights are long enough for four bits."""
Case = tuple[Drafter, TreePolicy | None, PathVerifier | None]
VIEWS: dict[str, SelfDrafter] = {
    "int8": SelfDrafter(View("int8")),
    **LAYERS,
    **OVER_FEW,
    "int8 of few keys": SelfDrafter(View("int8", keys=EVERY[1])),
    "exit of few keys": SelfDrafter(View(layers=skipping(exit=1), keys=EVERY[1])),
}
SAMPLED: dict[str, Case] = {
    **{name: (one, Chain(2), None) for name, one in VIEWS.items()},
    **{f"{name}, trees": (VIEWS[name], Widths((2, 1)), BRANCHING) for name in ("int8", "skip-mlp", "exit, resumed")},
    f"{EVERY[1]}, trees": (few(EVERY[1]), Widths((2, 1)), BRANCHING),
    "int4": (SelfDrafter(View("int4")), Chain(2), None),
    "adapter": (adapter_drafter(exit_layer=1), Chain(2), None),
    "skip=auto": (SkippingDrafter(every=1), Chain(2), None),
    **{f"stack: {name}": (one, None, None) for name, one in stacks(sampled_target()).items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("case", SAMPLED)
def test_many_texts_follow_the_targets_law(case: str, top_p: float) -> None:
    """Chi-square of the joint law of three tokens in 20,000 texts, for every view, its drafters and stacks.

    False alarms: one choice of seeds in a million (`FALSE_ALARM_RATE`). Power: 99 % for a law whose texts are off by
    8.2 % each, up or down, a total variation of .041 (.034 with top-p .9, which leaves fewer texts). `skip=auto`
    chooses for every text and step, 3 ms each, so it writes 12,000: a total variation of .052 (.044).
    """
    drafter, policy, rule = SAMPLED[case]
    samples, model = FEWER if case == "skip=auto" else MANY, WIDE if case == "int4" else None
    assert of_many(drafter, samples, policy, rule, model=model, top_p=top_p) > FALSE_ALARM_RATE


WRONG: dict[str, Case] = {
    "Draft & Verify": (Likeliest(View("int8")), Chain(2), None),
    "SWIFT": (PaddedComb(View(layers=skipping(mlp=[1]))), Widths((2, 1)), BRANCHING),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_many_texts_of_wrong_drafters_do_not(case: str) -> None:
    """Without top-p: where padding has no chance in its row, the engine leaves it out, and the text is right."""
    drafter, policy, rule = WRONG[case]
    assert of_many(drafter, FEWER, policy, rule) < FALSE_ALARM_RATE
