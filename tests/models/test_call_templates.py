"""Calls as chat templates of families of models write them: read again, and taken by the grammar of their format."""

import json
from functools import partial
from typing import Any

import pytest
from chatml import chat_tokenizer
from tool_examples import TOOLS
from tool_models import tool
from tool_templates import FAMILIES, Family, message

from polydraft.models import AnswerEvent, answer_form, conversation_ids
from polydraft.models.grammar.grammar import vocabulary_of
from polydraft.models.tools.call_formats import FORMATS, format_of, thinking_of
from polydraft.models.tools.call_grammar import Tool, call_grammar

FLAGS: dict[str, Any] = {
    "type": "object",
    "properties": {"exact": {"type": "boolean"}, "limit": {"type": ["number", "null"]}, "note": {}},
    "additionalProperties": False,
}
SCHEMAS = {**TOOLS, "set-flags": FLAGS}
Calls = list[tuple[str, dict[str, Any]]]
NASTY = "a \"quoted\" \\ {[ ü\n<b> 12, 'x'"
SOME: list[Calls] = [
    [("weather", {"city": "São Paulo", "days": 3, "unit": "celsius"})],
    [("now", {})],
    [("search", {"query": NASTY, "tags": ["]", {"k": None, "on": True}, -1.5]})],
    [("set-flags", {"exact": True, "limit": None}), ("weather", {"city": "12"}), ("weather", {"city": "Lima"})],
    [("set-flags", {"exact": False, "limit": 1e-07, "note": "so"})],
]
OFFERED = [tool(name, schema) for name, schema in SCHEMAS.items()]
ASKED = {"role": "user", "content": "How warm is it?"}


as_json = partial(json.dumps, ensure_ascii=False)


def rendered(family: Family, calls: Calls) -> str:
    """Return the text of an answer that calls, by the template."""
    tokenizer = chat_tokenizer(family.template)
    told = message(calls, family, as_json if family.texts else dict)
    before, whole = (
        str(tokenizer.apply_chat_template(said, tools=OFFERED, add_generation_prompt=asks, tokenize=False))
        for said, asks in (([ASKED], True), ([ASKED, told], False))
    )
    assert whole.startswith(before) and whole.endswith(family.end)
    return whole[len(before) : len(whole) - len(family.end)]


def read(family: Family, text: str, size: int) -> list[AnswerEvent]:
    form = answer_form(chat_tokenizer(family.template), [Tool(*one) for one in SCHEMAS.items()])
    reader = form.reader()
    pieces = (text[at : at + size] for at in range(0, len(text), size))
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


def called(events: list[AnswerEvent]) -> Calls:
    parts = {event.index: "" for event in events if event.kind == "call"}
    for event in events:
        if event.kind == "arguments":
            parts[event.index] += event.text
    names = [event.text for event in events if event.kind == "call"]
    return [(name, json.loads(parts[index])) for index, name in enumerate(names)]


def fitting(family: Family) -> list[Calls]:
    return [calls[:1] if family.single else calls for calls in SOME]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)
def test_calls_are_read_as_the_template_writes_them(family: Family) -> None:
    assert format_of(family.template).name == family.format
    for calls in fitting(family):
        text = rendered(family, calls)
        for size in (len(text), 1, 3):
            events = read(family, text, size)
            assert called(events) == calls, text
            assert all(event.sound for event in events if event.kind == "end")
            assert not [event for event in events if event.kind in ("content", "reasoning")], text


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)
def test_the_grammar_takes_calls_as_the_template_writes_them(family: Family) -> None:
    pytest.importorskip("llguidance")
    own, tokenizer = format_of(family.template), chat_tokenizer()
    vocabulary = vocabulary_of(tokenizer, len(tokenizer))
    strict = [Tool(name, schema, strict=True) for name, schema in SCHEMAS.items()]
    for behind in ("", own.mark):
        start, taken = vocabulary.start(call_grammar(own, strict, {}, behind=behind)), list[bool]()
        for calls in fitting(family):
            text = rendered(family, calls)
            assert text.count(own.mark) or not family.canonical
            tokens = vocabulary.tokens.tokenize_str(text.removeprefix(behind))
            matcher = start.deep_copy()
            taken.append(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
        assert all(taken) if family.canonical else not all(taken), taken


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)
def test_calls_stand_in_the_conversation_as_the_model_wrote_them(family: Family) -> None:
    """Whatever a client sends back, with arguments as an object or as its JSON."""
    tokenizer, (calls, *_) = chat_tokenizer(family.template), SOME
    told = message(calls, family)
    result = {"role": "tool", "tool_call_id": told["tool_calls"][0]["id"], "content": "warm"}
    ids = conversation_ids(tokenizer, [ASKED, told, result], OFFERED)
    assert rendered(family, calls) in tokenizer.decode(ids)


def test_every_format_has_a_family() -> None:
    assert {one.format for one in FAMILIES} == {one.name for one in FORMATS}
    assert thinking_of(FAMILIES[0].template) is None
