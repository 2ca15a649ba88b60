"""Equality of greedy texts: the first position that differs, the target's margin there, and what is rounding."""

from typing import Any

import pytest
import torch
from doubles import tiny_tokenizer
from transformers import PreTrainedModel

from polydraft.bench import Prompt
from polydraft.bench.speed import Arm, Generated, PromptBatch, SpeedSettings, hugging_face_arm, measure_speed, plain_arm
from polydraft.bench.speed.equality import compare_texts, first_difference, logit_margin
from polydraft.models import HuggingFaceModel, Pair
from polydraft.models.tiny import tiny_target

PROMPT = torch.tensor([1, 2, 3])


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target(vocabulary=101).requires_grad_(False)


def broken(model: PreTrainedModel, place: int, lossless: bool = True) -> Arm:
    """Return plain decoding with another token in one place of the last row."""
    plain = plain_arm(model)

    def run(*inputs: Any) -> Generated:
        *rows, last = plain.run(*inputs).tokens
        wrong = (*last[:place], (last[place] + 1) % 101, *last[place + 1 :]) if place < len(last) else last
        return Generated((*rows, wrong))

    return Arm("broken", run, lossless=lossless)


@pytest.mark.parametrize(
    ("found", "place"), [([1, 2, 3], None), ([1, 9, 3], 1), ([9, 9, 9], 0), ([1, 2], 2), ([1, 2, 3, 4], 3)]
)
def test_the_first_difference(found: list[int], place: int | None) -> None:
    assert first_difference([1, 2, 3], found) == place


def test_margin_is_the_difference_of_the_targets_logits(target: PreTrainedModel) -> None:
    logits = target(PROMPT.unsqueeze(0)).logits[0, -1]
    best, other = int(logits.argmax()), int(logits.argmin())
    margin, rounding = logit_margin(HuggingFaceModel(target), PROMPT, best, other)
    assert margin == pytest.approx(float(logits[best] - logits[other])) and margin > 0 and not rounding


def test_a_tie_is_rounding_and_a_small_gap_is_not() -> None:
    model = tiny_target(vocabulary=24, dtype=torch.float32)
    weights = model.get_output_embeddings().weight
    with torch.no_grad():
        weights[5], weights[7] = weights[4], weights[4] * 1.01
    door = HuggingFaceModel(model)
    assert logit_margin(door, PROMPT, 4, 5) == (0.0, True)
    margin, rounding = logit_margin(door, PROMPT, 4, 7)
    assert 0 < abs(margin) < 0.5 and not rounding


def test_every_row_is_compared_and_an_early_end_has_no_margin(target: PreTrainedModel) -> None:
    model = HuggingFaceModel(target)
    texts = [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    found = compare_texts(model, [PROMPT] * 3, texts, [(1, 2, 3), (4, 9, 6), (7, 8)])
    assert [(one.row, one.position, one.expected, one.found) for one in found] == [(1, 1, 5, 9), (2, 2, 9, -1)]
    assert found[0].margin is not None and (found[1].margin, found[1].rounding) == (None, False)
    logits = target(torch.tensor([[1, 2, 3, 4]])).logits[0, -1]
    assert found[0].margin == pytest.approx(float(logits[5] - logits[9]))


def test_a_broken_arm_is_caught_with_position_and_margin(target: PreTrainedModel) -> None:
    pair = Pair(target, None, tiny_tokenizer())
    prompts = [Prompt("1", "code", "def f(a):"), Prompt("2", "code", "class A:")]
    settings = SpeedSettings((0.0, 1.0), batch_sizes=(2,), max_new_tokens=6, warm_up_tokens=2)
    arms = [plain_arm(target), broken(target, 4), hugging_face_arm(target)]
    greedy, sampled = measure_speed(pair, arms, prompts, settings)
    by_name = {one.arm: one for one in greedy}
    assert by_name["hf"].same_text is True and by_name["plain"].same_text is True
    (difference,) = by_name["broken"].differences
    assert by_name["broken"].same_text is False
    assert (difference.row, difference.position) == (1, 4)
    ids = pair.tokenizer("class A:", return_tensors="pt")["input_ids"]
    plain = by_name["plain"].tokens[1]
    logits = target(torch.cat([ids[0], torch.tensor(plain[:4])]).unsqueeze(0)).logits[0, -1]
    assert difference.margin == pytest.approx(float(logits[plain[4]] - logits[(plain[4] + 1) % 101]))
    assert difference.margin > 0 and not difference.rounding
    assert all(one.same_text is None and not one.differences for one in sampled)
    assert PromptBatch.of([ids]).row(0).tolist() == ids[0].tolist()
