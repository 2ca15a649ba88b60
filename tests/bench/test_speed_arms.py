"""Arms: all give as many tokens as asked for, the same ones at temperature 0, and tell the truth about themselves."""

import copy
import logging

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from transformers import PreTrainedModel

from polydraft.bench.speed import (
    Arm,
    PromptBatch,
    SpeedSettings,
    assisted_arm,
    drafting_arm,
    hugging_face_arm,
    lookup_arm,
    plain_arm,
)
from polydraft.bench.speed.hugging_face_arms import Passes, observed, statistics_of
from polydraft.cli.benchmark.arm_spelling import build_arms, spell_arm
from polydraft.drafters import NgramDrafter
from polydraft.errors import InvalidParameter
from polydraft.models import Pair
from polydraft.models.tiny import tiny_draft, tiny_target
from polydraft.trees import Chain
from polydraft.verifiers import Rollback, TopDown, TypicalAcceptance

PROMPT = torch.tensor([[1, 2, 3, 4, 1, 2, 3]])
SHORT = torch.tensor([[5, 1, 2]])
TOKENS = 12


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target(vocabulary=24)


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return tiny_draft(target)


@pytest.fixture(scope="module")
def arms(target: PreTrainedModel, draft: PreTrainedModel) -> list[Arm]:
    return [
        plain_arm(target),
        drafting_arm("default", target, draft),
        drafting_arm("n-gram", target, NgramDrafter()),
        hugging_face_arm(target),
        assisted_arm(target, draft),
        lookup_arm(target),
    ]


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, SHORT]])
def test_at_temperature_0_all_arms_give_the_same_tokens(arms: list[Arm], prompts: list[torch.Tensor]) -> None:
    batch = PromptBatch.of(prompts)
    part = [arm for arm in arms if arm.most_rows is None or len(prompts) <= arm.most_rows]
    texts = [arm.run(batch, 0.0, TOKENS, 3).tokens for arm in part]
    assert len(part) == (6 if len(prompts) == 1 else 4)
    assert all(len(row) == TOKENS for row in texts[0]) and texts == [texts[0]] * len(part)
    assert 0 in texts[0][0]  # the token that other code might take for padding


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, SHORT]])
def test_texts_may_end_where_the_model_ends_them(
    arms: list[Arm], target: PreTrainedModel, prompts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = [arm for arm in arms if arm.most_rows is None or len(prompts) <= arm.most_rows]
    whole = part[0].run(PromptBatch.of(prompts), 0.0, TOKENS, 3).tokens
    end = whole[0][4]
    monkeypatch.setattr(target.generation_config, "eos_token_id", [end])
    expected = tuple(row[: row.index(end) + 1] if end in row else row for row in whole)
    assert len(expected[0]) <= 5
    for arm in part:
        assert arm.run(PromptBatch.of(prompts, until_end=True), 0.0, TOKENS, 3).tokens == expected, arm.name
        assert arm.run(PromptBatch.of(prompts), 0.0, TOKENS, 3).tokens == whole, arm.name
        for row in arm.run(PromptBatch.of(prompts, until_end=True), 1.0, TOKENS, 3).tokens:
            assert end not in row[:-1] and (len(row) == TOKENS or row[-1] == end), arm.name


def test_models_for_masks_are_no_assistants() -> None:
    """They draft no token by themselves, and may have a token more than the target."""
    draft = tiny_model(vocab=24, seed=2)
    draft.config.update({"pard_token": 23})
    pair = Pair(tiny_model(vocab=24), draft, tiny_tokenizer())
    assert "hf-assisted" not in [arm.name for arm in build_arms(pair, [], SpeedSettings())]
    with pytest.raises(InvalidParameter, match="drafts token by token, not for masks"):
        build_arms(pair, [spell_arm("hf-assisted")], SpeedSettings())


def test_sampled_text_follows_the_seed_and_leaves_torch_alone(arms: list[Arm]) -> None:
    before, batch = torch.get_rng_state(), PromptBatch.of([PROMPT])
    for arm in arms:
        texts = [arm.run(batch, 1.0, TOKENS, seed).tokens for seed in (3, 3, 4)]
        assert texts[0] == texts[1] != texts[2], arm.name
        assert all(len(row) == TOKENS for text in texts for row in text)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [plain_arm, hugging_face_arm])
def test_sampling_is_from_the_whole_distribution(make) -> None:
    batch = PromptBatch.of([SHORT] * 300)
    tokens = make(tiny_target(vocabulary=101)).run(batch, 100.0, 1, 0).tokens
    assert len({row[0] for row in tokens}) > 60  # Hugging Face's default would allow 50


def test_an_end_of_text_token_ends_no_text(draft: PreTrainedModel) -> None:
    ending = tiny_target(vocabulary=24)
    text = plain_arm(ending).run(PromptBatch.of([PROMPT]), 0.0, TOKENS, 0).tokens
    ending.config.eos_token_id = ending.generation_config.eos_token_id = text[0][2]
    for arm in (plain_arm(ending), drafting_arm("d", ending, draft), hugging_face_arm(ending), lookup_arm(ending)):
        assert arm.run(PromptBatch.of([PROMPT]), 0.0, TOKENS, 0).tokens == text
    assert assisted_arm(ending, draft).run(PromptBatch.of([PROMPT]), 0.0, TOKENS, 0).tokens == text


def test_an_assistant_equal_to_the_target_is_accepted_always(target: PreTrainedModel) -> None:
    arm = assisted_arm(target, copy.deepcopy(target), num_assistant_tokens=4, assistant_confidence_threshold=0.0)
    counts = arm.run(PromptBatch.of([PROMPT]), 0.0, 15, 0).statistics
    assert counts.target_calls == 3 and counts.block_efficiency == 5
    assert counts.offered_at == counts.accepted_at == [3, 3, 3, 3]


def test_hugging_faces_assistant_is_counted_as_our_chain_is(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    ours = drafting_arm("chain", target, draft, policy=Chain(3)).run(PromptBatch.of([PROMPT]), 0.0, 31, 0).statistics
    settings = {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0}
    theirs = assisted_arm(target, draft, **settings).run(PromptBatch.of([PROMPT]), 0.0, 31, 0).statistics
    assert theirs.target_calls == ours.target_calls > 0
    assert theirs.accepted == ours.accepted > 0
    assert theirs.accepted_at[0] == ours.accepted_at[0]
    # with one token left Hugging Face drafts nothing, and the chain drafts all the same
    assert ours.offered_at[0] - 1 <= theirs.offered_at[0] <= ours.offered_at[0]


def test_passes_are_read_off_right() -> None:
    target = Passes([0, 7, 9], [9, 3, 3], [0.5, 0.25, 0.25])  # prompt 5, 4 drafts: 2 taken; 2 drafts: 1; 2: 2
    draft = Passes([0, 6], [5, 1], [0.125, 0.0625])
    counts = statistics_of(target, draft, 5, [8], 2.0)
    assert (counts.new_tokens, counts.target_calls, counts.steps) == (8, 3, 2)
    assert (counts.drafted, counts.accepted) == (8, 5)
    assert counts.offered_at == [3, 3, 1] and counts.accepted_at == [3, 2]
    parts = {"prefill": 0.625, "draft": 0.0625, "target": 0.5, "verify": 0.0}
    assert counts.seconds == {**parts, "total": 2.0, "rest": 2 - 1.1875}


def test_rows_of_a_batch_are_counted_each(target: PreTrainedModel) -> None:
    counts = hugging_face_arm(target).run(PromptBatch.of([PROMPT, SHORT]), 0.0, TOKENS, 0).statistics
    assert counts.target_calls == counts.new_tokens == 2 * TOKENS
    assert sum(counts.seconds.values()) == pytest.approx(2 * counts.seconds["total"])
    assert counts.seconds["target"] > 0


def test_rows_that_ended_take_no_passes(target: PreTrainedModel) -> None:
    seconds = Passes(before=[4, 4, 5], scored=[4, 1, 1], seconds=[0.1, 0.1, 0.1])
    statistics = statistics_of(seconds, Passes(), 4, [1, 3], 0.5)
    assert statistics.target_calls == statistics.new_tokens == 4


def test_the_assistant_and_the_logger_are_left_as_they_were(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    kept, level = draft.generation_config, logging.getLogger("transformers").level
    before = kept.to_dict()
    schedule = {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "heuristic"}
    assisted_arm(target, draft, **schedule).run(PromptBatch.of([PROMPT]), 0.0, TOKENS, 0)
    assert draft.generation_config is kept and kept.to_dict() == before
    with pytest.raises(ValueError, match="batch_size = 1"):
        assisted_arm(target, draft, **schedule).run(PromptBatch.of([PROMPT, SHORT]), 0.0, TOKENS, 0)
    assert draft.generation_config is kept and logging.getLogger("transformers").level == level
    assert not target._forward_hooks and not draft._forward_pre_hooks


def test_hooks_go_also_when_a_pass_fails(target: PreTrainedModel) -> None:
    with pytest.raises(KeyError), observed(target):
        target()
    assert not target._forward_hooks and not target._forward_pre_hooks


def test_an_arm_tells_what_it_did(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    done = drafting_arm("chain", target, draft, policy=Chain(2)).run(PromptBatch.of([PROMPT]), 0.0, 4, 0)
    assert done.setup["tree"] == "chain:2 (2 drafts, 1 + 1 by depth)" and done.setup["scheme"] == "top-k"
    assert plain_arm(target).run(PromptBatch.of([PROMPT]), 0.0, 4, 0).setup == {"drafter": "none"}
    assert not drafting_arm("lossy", target, draft, TopDown(TypicalAcceptance())).lossless
    assert not drafting_arm("rollback", target, draft, Rollback(threshold=0.0)).lossless


def test_a_batch_is_padded_on_the_left() -> None:
    batch = PromptBatch.of([PROMPT, SHORT])
    assert batch.input_ids[1].tolist() == [0, 0, 0, 0, 5, 1, 2]
    assert batch.attention_mask.sum(dim=-1).tolist() == [7, 3]
    assert torch.equal(batch.row(1), SHORT[0]) and torch.equal(batch.row(0), PROMPT[0])
