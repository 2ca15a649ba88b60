"""Grammars of calls: they take the canonical calls of every format, nothing else, and refuse what they cannot hold."""

import dataclasses
import json
import random
from typing import Any

import pytest
from chatml import chat_tokenizer
from tool_examples import EXAMPLES, TOOLS

from polydraft.errors import InvalidParameter
from polydraft.models.grammar.grammar import vocabulary_of
from polydraft.models.tools.answer_reader import AnswerReader
from polydraft.models.tools.call_formats import FORMATS, ToolFormat, format_named, seen_tokens
from polydraft.models.tools.call_grammar import Tool, call_grammar

pytest.importorskip("llguidance")
TOKENIZER = chat_tokenizer()
STRICT = [Tool(name, schema, strict=True) for name, schema in TOOLS.items()]


def matcher(own: ToolFormat, tools: list[Tool] = STRICT, **options: Any) -> Any:
    vocabulary = vocabulary_of(TOKENIZER, len(TOKENIZER))
    return vocabulary.start(call_grammar(own, tools, {}, **options)).deep_copy(), vocabulary.tokens


def takes(found: Any, text: str) -> bool:
    """Tell whether a text is one of the grammar, whole."""
    own, tokens = found[0].deep_copy(), found[1].tokenize_str(text)
    return own.try_consume_tokens(tokens) == len(tokens) and own.is_accepting()


@pytest.mark.parametrize("own", FORMATS, ids=lambda one: one.name)
def test_the_examples_are_of_their_grammar(own: ToolFormat) -> None:
    found, alone = matcher(own), matcher(own, parallel=False)
    some = [one for one in EXAMPLES if one.format == own.name and one.calls and "<think>" not in one.text]
    texts = [(one.text[one.text.find(own.mark) :].strip().removesuffix("<|call|>"), len(one.calls)) for one in some]
    taken = [one for one in texts if takes(found, one[0])]
    odd = {"mistral", "gemma"}  # ids behind arguments, and texts between single quotes
    assert taken or own.name in odd
    for text, count in taken:
        assert takes(alone, text) == (count == 1)
        behind = matcher(own, behind=own.mark)
        assert takes(behind, text.removeprefix(own.mark)) and not takes(behind, text + "x")


def fits(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Tell whether arguments are of the schema of one of the first two tools."""
    kinds = {"city": str, "days": int}
    return (
        value.keys() <= schema["properties"].keys()
        and {*schema.get("required", ())} <= value.keys()
        and all(
            isinstance(one, kinds[name]) if name in kinds else one in schema["properties"][name]["enum"]
            for name, one in value.items()
        )
    )


@pytest.mark.parametrize("own", FORMATS, ids=lambda one: one.name)
def test_random_texts_of_the_grammar_are_sound_calls(own: ToolFormat) -> None:
    """Whatever the grammar allows is read as calls whose arguments are of their schemas."""
    draw, ended = random.Random(own.name), 0
    first, tokens = matcher(own, [*STRICT[:2], Tool("free", {"type": "string"})])
    for _ in range(20):
        one, path = first.deep_copy(), list[int]()
        while len(path) < 250:
            bits = int.from_bytes(one.compute_bitmask(), "little")
            allowed = [token for token in range(len(TOKENIZER)) if bits >> token & 1]
            closing = [token for token in allowed if any(sign in tokens.decode_str([token]) for sign in '"}])>`')]
            if one.is_accepting() and (not allowed or draw.random() < 0.7):
                break
            path.append(draw.choice(closing if closing and draw.random() < 0.7 else allowed))
            assert one.consume_token(path[-1])
        if not one.is_accepting():
            continue
        ended += 1
        reader = AnswerReader(own, tools={**TOOLS, "free": {}})
        events = reader.feed(tokens.decode_str(path)) + reader.finish()
        names = [event.text for event in events if event.kind == "call"]
        assert names and all(event.sound for event in events if event.kind == "end"), tokens.decode_str(path)
        assert not [event for event in events if event.kind == "content"]
        for index, name in enumerate(names):
            text = "".join(event.text for event in events if event.kind == "arguments" and event.index == index)
            assert name == "free" or fits(json.loads(text), TOOLS[name]), text
    assert ended > 3


def test_marks_that_are_special_tokens_are_these_tokens() -> None:
    own, start = format_named("phi"), TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    marked = dataclasses.replace(own, begin="<|im_start|>[", mark="<|im_start|>")
    assert seen_tokens(marked, None, TOKENIZER.all_special_tokens) == {"<|im_start|>"}
    vocabulary = vocabulary_of(TOKENIZER, len(TOKENIZER))
    made = vocabulary.start(call_grammar(marked, STRICT, {"<|im_start|>": start}))
    bits = int.from_bytes(made.deep_copy().compute_bitmask(), "little")
    assert bits & (1 << len(TOKENIZER)) - 1 == 1 << start


DEEP: dict[str, Any] = {
    "type": "object",
    "properties": {"node": {"$ref": "#/$defs/node"}},
    "required": ["node"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"name": {"type": ["string", "null"]}, "next": {"$ref": "#/$defs/node"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", '{"name": "deep", "arguments": {"node": {"name": "a", "next": {"name": null}}}}'),
        ("pythonic", '[deep(node={"name": "a", "next": {"name": None}})]'),
        (
            "qwen-coder",
            '<tool_call>\n<function=deep>\n<parameter=node>\n{"name": "a", "next": {"name": null}}\n</parameter>\n'
            "</function>\n</tool_call>",
        ),
    ],
)
def test_schemas_that_refer_to_themselves(name: str, text: str) -> None:
    found = matcher(format_named(name), [Tool("deep", DEEP, strict=True)])
    assert takes(found, text) and not takes(found, text.replace('"a"', "1"))


def test_many_tools_and_names_that_hold_marks() -> None:
    tools = [Tool(f"tool-{number}_ü", TOOLS["weather"], strict=True) for number in range(128)]
    found = matcher(format_named("hermes"), tools)
    for number in (0, 99, 127):
        call = f'<tool_call>\n{{"name": "tool-{number}_ü", "arguments": {{"city": "x"}}}}\n</tool_call>'
        assert takes(found, call) and not takes(found, call.replace("_ü", "_u"))


@pytest.mark.parametrize(
    ("name", "tool", "said"),
    [
        ("hermes", Tool("a b", {}, strict=True), "has a function 'a b', which no call can name"),
        ("hermes", Tool("</tool_call>", {}, strict=True), "which no call can name"),
        (
            "hermes",
            Tool("f", {"type": "nonsense"}, strict=True),
            "The parameters of the tool f: The JSON schema cannot",
        ),
        (
            "glm",
            Tool("f", {"properties": {"a": {"type": "string", "pattern": "x"}}}, strict=True),
            "A text with pattern",
        ),
        ("glm", Tool("f", {"anyOf": [{}]}, strict=True), "Arguments with anyOf cannot be held"),
        ("pythonic", Tool("f", {"properties": {"a": {"contains": {}}}}, strict=True), "Arguments with contains cannot"),
        ("pythonic", Tool("f", {"properties": {"a": {"$ref": "#/$defs/x"}}}, strict=True), "which is not in it"),
        (
            "pythonic",
            Tool("f", {"properties": {"from": {}}}, strict=True),
            "An argument named 'from' cannot be written",
        ),
        ("gemma", Tool("f", {"properties": {"a=1, b": {}}}, strict=True), "cannot be written in calls as in Python"),
        ("pythonic", Tool("f", {"anyOf": [{}], "properties": {}}, strict=True), "Arguments with anyOf cannot be held"),
        ("pythonic", Tool("f", {"properties": {"a": {"type": "string", "enum": [1]}}}, strict=True), "has the type"),
        (
            "pythonic",
            Tool("f", {"properties": {"a": {"type": "string", "anyOf": [{}]}}}, strict=True),
            "put type into its parts",
        ),
        ("qwen-coder", Tool("f", {"properties": {"x>": {}}}, strict=True), "An argument named 'x>' cannot be written"),
        ("glm", Tool("f", {"properties": {" x": {}}}, strict=True), "An argument named ' x' cannot be written"),
        ("glm", Tool("f", {"properties": {"x": {"enum": ["a</arg_value>"]}}}, strict=True), "A value that holds </arg"),
        ("qwen-coder", Tool("f", {"properties": {}, "required": ["z"]}, strict=True), "requires 'z', which is none of"),
        (
            "hermes",
            Tool("f", {"type": "string"}, strict=True),
            "must be the schema of an object, not of the type 'string'",
        ),
    ],
)
def test_what_cannot_be_held_to_is_refused(name: str, tool: Tool, said: str) -> None:
    with pytest.raises(InvalidParameter, match=said) as found:
        call_grammar(format_named(name), [tool], {})
    assert str(found.value).endswith(".") and "\n" not in str(found.value)


STRANGE: list[dict[str, Any]] = [
    {"required": 5},
    {"required": [["a"]]},
    {"properties": 5},
    {"properties": [1]},
    {"properties": {"a": 5}},
    {"properties": {"a": {"enum": 5}}},
    {"properties": {"a": {"anyOf": 5}}},
    {"properties": {"a": {"type": "array", "minItems": "x"}}},
    {"properties": {"a": {"type": "object", "properties": 5}}},
    {"additionalProperties": 5},
]


@pytest.mark.parametrize("schema", STRANGE, ids=str)
@pytest.mark.parametrize("name", ["hermes", "glm", "pythonic"])
def test_what_is_no_schema_is_refused_in_a_sentence(name: str, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=r"^[^\n]*\.$"):
        call_grammar(format_named(name), [Tool("f", schema, strict=True)], {})


def read(own: ToolFormat, text: str, tools: dict[str, Any]) -> tuple[list[Any], list[bool]]:
    """Return the arguments of all calls in a text, and which calls are sound."""
    reader = AnswerReader(own, tools=tools)
    events = reader.feed(text) + reader.finish()
    parts = [event.text for event in events if event.kind == "arguments"]
    return parts, [event.sound for event in events if event.kind == "end"]


WRITTEN = {
    "glm": ("<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>", "</arg_value>"),
    "qwen-coder": (
        "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>",
        "</parameter>",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_values_hold_no_end_mark_but_inside_texts_of_json(name: str) -> None:
    own, (text, mark) = format_named(name), WRITTEN[name]
    plain = Tool("f", {"properties": {"x": {"type": "string"}}, "required": ["x"]}, strict=True)
    found = matcher(own, [plain])
    assert takes(found, text.format("a b")) and not takes(found, text.format(f"a{mark}b"))
    either = Tool("f", {"properties": {"x": {"type": ["string", "null"]}}, "required": ["x"]}, strict=True)
    whole = text.format(json.dumps(f"a{mark}b"))
    assert takes(matcher(own, [either]), whole)
    parts, sound = read(own, whole, {"f": either.parameters})
    assert sound == [True] and json.loads("".join(parts)) == {"x": f"a{mark}b"}


def test_what_is_no_json_and_what_stands_twice_is_not_sound() -> None:
    hermes = '<tool_call>\n{"name": "f", "arguments": {"x": NaN}}\n</tool_call>'
    assert read(format_named("hermes"), hermes, {"f": {}})[1] == [False]
    text, _ = WRITTEN["glm"]
    twice = text.replace("\n</tool_call>", "\n<arg_key>x</arg_key>\n<arg_value>2</arg_value>\n</tool_call>").format(1)
    assert read(format_named("glm"), twice, {"f": {}})[1] == [False]
    assert not any(read(format_named("pythonic"), "[f(a=1e999)]", {"f": {}})[1])
