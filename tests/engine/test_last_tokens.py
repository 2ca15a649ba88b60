"""Where a text has room for one token nothing is drafted, and what comes is what comes without drafts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import polydraft
from polydraft import Chain, GenerationOutput, ModelDrafter, NgramDrafter
from polydraft.drafters import DraftRequest, EnsembleDrafter, merge, merge_beside, route_first
from polydraft.models import draft_model
from polydraft.models.tiny import tiny_draft, tiny_target
from polydraft.trees import Draft, TreePolicy

TARGET = tiny_target()
DRAFT = tiny_draft(TARGET)
PROMPT = torch.tensor([[0, 1, 1, 0, 1, 1]])
HOT: dict[str, Any] = {"temperature": 1.0, "top_k": 0}


class Watched(ModelDrafter):
    """Notes the shapes that it is asked for; a class of its own, of which nobody knows whether it is sound."""

    asked: list[TreePolicy]

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft, Any]:
        policy = request.policy
        self.asked.append(policy)
        return super().draft(state, request)


def watched() -> Watched:
    drafter = Watched(draft_model(DRAFT))
    object.__setattr__(drafter, "asked", [])
    return drafter


DRAFTERS: dict[str, Callable[[], Any]] = {
    "model": lambda: DRAFT,
    "n-gram": NgramDrafter,
    "merge": merge,
    "beside": lambda: merge_beside(ModelDrafter(draft_model(DRAFT))),
    "route": lambda: route_first(ModelDrafter(draft_model(DRAFT))),
    "ensemble": lambda: EnsembleDrafter((DRAFT, DRAFT)),
    "lookahead": lambda: "lookahead",
    "jacobi": lambda: "jacobi",
    "half": lambda: "self:skip=1",
    "of one's own": watched,
}


def generate(drafter: Any, new: int, ids: Tensor = PROMPT, **options: Any) -> GenerationOutput:
    mask = torch.ones_like(ids)
    output = polydraft.generate(TARGET, ids, attention_mask=mask, drafter=drafter, max_new_tokens=new, **options)
    assert isinstance(output, GenerationOutput)
    return output


@pytest.mark.long(10)
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_call_of_one_token_drafts_nothing(name: str, heat: float) -> None:
    for seed in range(3):
        output = generate(DRAFTERS[name](), 1, temperature=heat, seed=seed)
        plain = generate("none", 1, temperature=heat, seed=seed)
        assert torch.equal(output.sequences, plain.sequences)
        found = output.statistics
        assert (found.drafted, found.accepted, found.offered_at, found.sources) == (0, 0, [], {})
        assert (found.new_tokens, found.target_calls) == (1, 1)


def test_the_last_token_of_a_longer_text_has_no_drafts() -> None:
    for seed in range(6):
        run = polydraft.stream(TARGET, PROMPT, drafter=DRAFT, policy=Chain(2), max_new_tokens=7, seed=seed, **HOT)
        left, steps = 7, [block.rows[0] for block in run]
        for one in steps:
            assert bool(one.drafted) == (left > 1)
            left -= len(one.tokens)
        assert left == 0


def test_a_drafter_that_is_known_is_asked_for_nothing_and_another_as_ever() -> None:
    known, own = watched(), watched()
    object.__setattr__(known, "__class__", type("Known", (Watched,), {"sound": True}))
    for drafter in (known, own):
        generate(drafter, 1, policy=Chain(3), seed=2, **HOT)
    assert [len(policy.shape.counts) for policy in known.asked] == [0]
    assert [len(policy.shape.counts) for policy in own.asked] == [3]


@pytest.mark.parametrize("name", ["model", "merge", "beside", "route", "lookahead", "of one's own"])
def test_texts_are_the_same_beside_others_that_are_not_at_their_ends(name: str) -> None:
    """A text alone drafts nothing for its last token; beside others its row is drafted for, and means nothing."""
    drafter, prompts = DRAFTERS[name](), {str(row): PROMPT[0, row:] for row in range(3)}
    own = {str(row): {"max_new_tokens": 2 + 3 * row} for row in range(3)}
    run = polydraft.generate_many(
        TARGET, prompts, drafter=drafter, per_prompt=own, batch_size=3, seed=4, max_new_tokens=2, **HOT
    )
    texts = {one.name: one for one in run}
    for one in texts.values():
        alone = generate(drafter, len(one.tokens), prompts[one.name][None], seed=one.seed, **HOT)
        assert alone.sequences[0, len(prompts[one.name]) :].tolist() == one.tokens
    assert [len(texts[str(row)].tokens) for row in range(3)] == [2, 5, 8]


def test_what_is_kept_of_a_text_is_as_good_as_before() -> None:
    for name in ("model", "beside", "half"):
        drafter = DRAFTERS[name]()
        first = generate(drafter, 4, seed=3, keep_past=True, **HOT)
        more = torch.cat([first.sequences, PROMPT[:, :3]], dim=-1)
        on = generate(drafter, 9, more, past=first.past, seed=5, **HOT)
        assert torch.equal(on.sequences, generate(drafter, 9, more, seed=5, **HOT).sequences)
        assert on.statistics.prompt_known == first.sequences.shape[1] - 1
