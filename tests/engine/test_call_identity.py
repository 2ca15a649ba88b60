"""Greedy answers with calls in every format: those of plain decoding, token for token, whatever drafts.

A conversation is random words; so are the model's weights, but for a push towards the mark at which calls begin, which
a random model would never write. Rows differ in length and lie side by side in a batch.
"""

from functools import cache
from typing import Any

import pytest
import torch
from chatml import TEXT, chat_model
from doubles import perturbed
from tool_examples import EXAMPLES, TOOLS
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast

import polydraft
from polydraft import Widths
from polydraft.models import AnswerForm, Tool, answer_form, format_names
from polydraft.models.tools.call_formats import format_named, seen_tokens
from polydraft.training.token_files import train_tokenizer

pytest.importorskip("llguidance")
ROWS, BATCHES, NEW = 12, 25, 36
"""Of 25 batches of 12 rows for each format the fast suite has the first."""
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]
FRAMES = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|tool_call|>"]
FORMS: list[dict[str, Any]] = [
    {"choice": "auto"},
    {"choice": "required", "parallel": False},
    {"choice": "required", "most_reasoning": 3, "thinks": True},
    {"choice": "auto", "parallel": False, "most_reasoning": 4, "thinks": True},
]
"""How the answers of a batch are held, batch after batch; "thinks" is that they begin within reasoning."""
DRAFTERS = ("ngram", "model", "tree")


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Some 500 tokens, trained on calls too, so that tokens hold parts of marks and text behind them."""
    made = train_tokenizer([*TEXT, *[one.text for one in EXAMPLES] * 5], vocab_size=480, context=4096)
    made.add_special_tokens({"additional_special_tokens": [*FRAMES, "<|im_start|>", "<|im_end|>"]})
    made.add_tokens(MARKS)
    made.eos_token = "<|im_end|>"
    return made


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a random target and a draft that is right some of the time, in double precision, which has no ties."""
    target = chat_model(tokenizer()).double()
    return target, perturbed(target, 0.02)


class TowardsMark(LogitsProcessor):
    """Push the next token of a mark: the first a little, the others far."""

    stateless = True

    def __init__(self, mark: list[int]) -> None:
        self.mark = mark

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        scores = scores.clone()
        for row, ids in zip(scores, input_ids.tolist(), strict=True):
            done = next((size for size in range(len(self.mark) - 1, 0, -1) if ids[-size:] == self.mark[:size]), 0)
            row[self.mark[done]] += 40.0 if done else 3.5
        return scores


@cache
def form(name: str, number: int) -> AnswerForm:
    own = tokenizer()
    options = dict(FORMS[number])
    thinks = options.pop("thinks", False)
    harmony = name == "harmony"
    own.chat_template = "<|channel|><|message|>" if harmony else "<think>" if thinks else "plain"
    begin = "<|channel|>analysis<|message|>" if harmony else "<think>"
    tools = [Tool(one, schema, strict=True) for one, schema in TOOLS.items()]
    return answer_form(own, tools, tool_format=name, prompt=begin if thinks else "", **options)


def prompts(batch: int) -> dict[str, Any]:
    """Return a batch of random conversations, padded on the left."""
    stream = torch.Generator().manual_seed(batch)
    lengths = torch.randint(5, 24, (ROWS,), generator=stream).tolist()
    ids = torch.randint(1, 400, (ROWS, max(lengths)), generator=stream)
    mask = torch.stack([(torch.arange(max(lengths)) >= max(lengths) - length).long() for length in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}


def check(name: str, batch: int, drafters: tuple[str, ...]) -> tuple[int, int]:
    """Compare the texts of a batch; return how many have the mark of calls, and how many drafts were accepted."""
    (target, draft), own = models(), form(name, batch % len(FORMS))
    mark = tokenizer()(format_named(name).mark, add_special_tokens=False)["input_ids"]
    asked, accepted = prompts(batch), 0
    how: dict[str, Any] = {
        "grammar": own.grammar,
        "tokenizer": tokenizer(),
        "logits_processor": [TowardsMark(mark)],
        "max_new_tokens": NEW,
        "temperature": 0,
    }
    plain = polydraft.generate(target, **asked, drafter="none", **how)
    ways: dict[str, dict[str, Any]] = {
        "ngram": {"drafter": "ngram"},
        "model": {"drafter": draft, "policy": 4},
        "tree": {"drafter": draft, "policy": Widths((3, 2, 1))},
    }
    for drafter in drafters:
        found = polydraft.generate(target, **asked, **ways[drafter], **how)
        assert torch.equal(found.sequences, plain.sequences), (name, batch, drafter)
        assert found.finish == plain.finish and found.statistics.drafted > 0
        accepted += found.statistics.accepted
    called = 0
    for ids, finish in zip(plain.sequences[:, asked["input_ids"].shape[1] :].tolist(), plain.finish, strict=True):
        decoder, reader = own.decoder(), own.reader()
        ended = finish == "eos"
        text = decoder.add(ids[: ids.index(tokenizer().eos_token_id)] if ended else ids) + decoder.rest()
        events = reader.feed(text) + reader.finish(cut=not ended)
        called += format_named(name).mark in text
        assert all(event.sound for event in events if event.kind == "end") or not ended, text
    return called, accepted


@pytest.mark.parametrize(("name", "number"), [(name, place) for place, name in enumerate(format_names())])
def test_twelve_conversations(name: str, number: int) -> None:
    called, accepted = check(name, number, (DRAFTERS[number % len(DRAFTERS)],))
    assert called > 2 and (accepted or number % len(DRAFTERS) == 0)


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_marks_in_angle_brackets_are_one_token_in_every_form(number: int) -> None:
    """llguidance takes an added token such as <tool_call> for a special one: answers ended behind it once."""
    check("hermes", number, ("tree",))


@pytest.mark.slow
@pytest.mark.parametrize("name", format_names())
def test_three_hundred_conversations(name: str) -> None:
    found = [check(name, batch, DRAFTERS) for batch in range(BATCHES)]
    called, accepted = (sum(one) for one in zip(*found, strict=True))
    assert called > 60 and accepted > 1000


def test_marks_are_tokens_and_parts_of_tokens() -> None:
    """What the formats above meet: marks of one token and of several, and tokens that go on behind a mark's end."""
    own = tokenizer()
    sizes = {name: len(own(format_named(name).mark, add_special_tokens=False)["input_ids"]) for name in format_names()}
    assert min(sizes.values()) == 1 and max(sizes.values()) > 1
    assert seen_tokens(format_named("harmony"), None, own.all_special_tokens) >= {"<|channel|>", "<|message|>"}
