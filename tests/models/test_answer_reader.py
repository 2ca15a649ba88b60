"""Answers to events: every example of every format, cut anywhere, and what is no call."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest
from chatml import chat_tokenizer
from tool_examples import DS, EXAMPLES, TOOLS, Example
from transformers import PreTrainedTokenizerFast

from polydraft import StreamDecoder
from polydraft.errors import InvalidParameter
from polydraft.models import bytes_of
from polydraft.models.tools.answer_reader import AnswerEvent, AnswerReader
from polydraft.models.tools.call_formats import FORMATS, format_named, thinking_of

MARKS = {"mistral-v11": "[THINK]", "harmony": "<|channel|>"}


def events(
    example: Example, pieces: Iterable[str], tools: dict[str, Any] = TOOLS, *, cut: bool = False
) -> list[AnswerEvent]:
    """Return the events of pieces, with texts that follow each other as one."""
    thinking = thinking_of(MARKS.get(example.format, "<think>"))
    reader = AnswerReader(format_named(example.format), thinking, begun=example.begun, tools=tools)
    found: list[AnswerEvent] = []
    for one in [event for piece in pieces for event in reader.feed(piece)] + reader.finish(cut=cut):
        last = found[-1] if found else None
        if last and one.kind == last.kind and one.index == last.index and one.kind not in ("call", "end"):
            found[-1] = AnswerEvent(one.kind, last.text + one.text, one.index)
        else:
            found.append(one)
    return found


def text_of(found: Sequence[AnswerEvent], kind: str) -> str:
    return "".join(one.text for one in found if one.kind == kind)


def calls_of(found: Sequence[AnswerEvent]) -> list[tuple[str, str]]:
    names = [one.text for one in found if one.kind == "call"]
    assert [one.index for one in found if one.kind == "call"] == [*range(len(names))]
    return [
        (name, "".join(one.text for one in found if one.kind == "arguments" and one.index == index))
        for index, name in enumerate(names)
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one.format}: {one.text[:30]}")
def test_an_example_says_what_is_in_it(example: Example) -> None:
    found = events(example, [example.text])
    assert [(name, json.loads(text)) for name, text in calls_of(found)] == example.calls
    assert text_of(found, "content") == example.content
    assert text_of(found, "reasoning") == example.reasoning
    assert [one.sound for one in found if one.kind == "end"] == [True] * len(example.calls)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one.format}: {one.text[:30]}")
def test_a_stream_cut_anywhere_says_the_same(example: Example) -> None:
    whole = events(example, [example.text])
    assert events(example, example.text) == whole
    for place in range(len(example.text) + 1):
        assert events(example, [example.text[:place], example.text[place:]]) == whole
    for size in (2, 3, 5, 7):
        pieces = [example.text[at : at + size] for at in range(0, len(example.text), size)]
        assert events(example, pieces) == whole


@cache
def by_bytes() -> tuple[PreTrainedTokenizerFast, dict[bytes, int]]:
    """Return a tokenizer, and its tokens of one byte."""
    tokenizer = chat_tokenizer()
    return tokenizer, {bytes_of(tokenizer, token): token for token in reversed(range(len(tokenizer)))}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one.format}: {one.text[:30]}")
def test_a_stream_of_tokens_or_of_bytes_says_the_same(example: Example) -> None:
    tokenizer, ids = by_bytes()
    single = [ids[bytes([one])] for one in example.text.encode()]
    for tokens in (single, tokenizer(example.text, add_special_tokens=False)["input_ids"]):
        decoder = StreamDecoder(tokenizer)
        pieces = [*map(decoder.add, tokens), decoder.rest()]
        assert "".join(pieces) == example.text
        assert events(example, pieces) == events(example, [example.text])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one.format}: {one.text[:30]}")
def test_an_answer_that_ends_early_is_told_as_far_as_it_goes(example: Example) -> None:
    """The beginning of an answer gives the beginning of its calls, and all calls that begin end."""
    for place in range(len(example.text)):
        found = events(example, example.text[:place])
        calls = calls_of(found)
        assert sum(one.kind == "end" for one in found) == len(calls) <= len(example.calls)
        for (name, text), (wanted, _), (_, full) in zip(
            calls, example.calls, calls_of(events(example, [example.text])), strict=False
        ):
            assert name == wanted and full.startswith(text)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one.format}: {one.text[:30]}")
def test_an_answer_that_is_cut_off_shows_no_mark(example: Example) -> None:
    """Its content and reasoning are beginnings of the whole's, but in formats in which the answer is the call."""
    if format_named(example.format).anchored:
        assert text_of(events(example, '{"na', cut=True), "content") == '{"na'
        return
    for place in range(len(example.text)):
        found = events(example, example.text[:place], cut=True)
        assert example.content.startswith(text_of(found, "content").rstrip())
        assert example.reasoning.startswith(text_of(found, "reasoning").rstrip())
        told = events(example, example.text[:place])
        assert [one for one in found if one.kind not in ("content", "reasoning")] == [
            one for one in told if one.kind not in ("content", "reasoning")
        ]


def test_every_format_has_examples() -> None:
    assert {one.format for one in EXAMPLES if one.calls} == {one.name for one in FORMATS}
    with pytest.raises(InvalidParameter, match=r"tool format must be one of .*hermes.* but is 'x'"):
        format_named("x")


def test_a_call_is_told_while_it_is_written() -> None:
    reader = AnswerReader(format_named("hermes"), tools=TOOLS, name_call=lambda index, name: f"{name}-{index}")
    assert reader.feed("Hm. <tool_ca") == [AnswerEvent("content", "Hm.")]
    assert reader.feed('ll>\n{"name": "weather", "argu') == []
    assert reader.feed('ments": {"ci') == [
        AnswerEvent("call", "weather", 0, "weather-0"),
        AnswerEvent("arguments", '{"ci'),
    ]
    assert reader.feed('ty": "L\\') == [AnswerEvent("arguments", 'ty": "L')]
    assert reader.feed('"a}"}') == [AnswerEvent("arguments", '\\"a}"}')]
    assert reader.feed("}\n") == [AnswerEvent("end", sound=True)]
    assert reader.feed("</tool_call>") == reader.finish() == []


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', ("rm", "{}")),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', ("now", "[1]")),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": }}</tool_call>', ("now", '{"a": }')),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [', ("now", '{"a": [')),
        ("hermes", '<tool_call>{"name": "now", "arguments": ' + "[" * 30000, ("now", "[" * 30000)),
        ("deepseek-v3.1", f"{DS[0]}{DS[1]}now{DS[2]}true ", ("now", "true")),
        ("harmony", "<|channel|>commentary to=functions.rm<|message|>{}", ("rm", "{}")),
    ],
)  # fmt: skip
def test_calls_that_no_tool_takes_are_unsound(name: str, text: str, call: tuple[str, str]) -> None:
    found = events(Example(name, text), [text])
    assert calls_of(found) == [call] and [one.sound for one in found if one.kind == "end"] == [False]


def test_long_arguments_take_no_long_time() -> None:
    value = json.dumps({"query": 'x\\" \n' * 20_000})
    text = f'<tool_call>{{"name": "search", "arguments": {value}}}</tool_call>'
    found = events(Example("hermes", text), [text[at : at + 4] for at in range(0, len(text), 4)])
    assert calls_of(found) == [("search", value)] and found[-1].sound


@pytest.mark.parametrize("inside", ["f(x)", "1 + 1", "[x for x in y]", "{1: 2}", "b'x'", "*a", "**a", "'a'"])
def test_only_literals_with_names_are_arguments(inside: str) -> None:
    for text in (f"[weather(city={inside})]", f"[weather({inside})]"):
        if text != "[weather(city='a')]":
            found = events(Example("pythonic", text), [text])
            assert text_of(found, "content") == text and not calls_of(found)
