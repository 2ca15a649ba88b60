"""Answers that must match something, in OpenAI's words and in vLLM's."""

import json
import re
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serving import PROMPT, alone, ask, error

import polydraft
from polydraft.models import Pair

pytest.importorskip("llguidance", reason="grammars need llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "strict": True, "schema": SCHEMA}}


@pytest.mark.long(1)
@pytest.mark.parametrize(
    "fields",
    [{"response_format": FORMAT}, {"guided_json": SCHEMA}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}],
)
def test_an_answer_is_of_its_schema(app: TestClient, fields: dict[str, Any]) -> None:
    answer = ask(app, seed=2, n=2, max_tokens=200, temperature=0.7, **fields)
    for choice in answer["choices"]:
        if choice["finish_reason"] == "stop":  # white space may go on for ever
            assert json.loads(choice["text"]).keys() == {"a", "b"}
        else:
            assert choice["text"].lstrip().startswith("{")


COMPACT: list[dict[str, Any]] = [
    {"response_format": FORMAT, "compact": True},
    {"response_format": {"type": "json_object"}, "compact": True},
    {"guided_json": SCHEMA, "compact": True},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
    {"structured_outputs": {"json": SCHEMA}, "compact": True},
]


@pytest.mark.long(1)
@pytest.mark.parametrize("fields", COMPACT, ids=str)
def test_json_has_no_blanks_where_none_are_wanted(app: TestClient, fields: dict[str, Any]) -> None:
    for choice in ask(app, seed=2, n=3, max_tokens=60, temperature=1.5, **fields)["choices"]:
        assert choice["text"].startswith("{") and choice["text"][1:2] in ("", '"', "}")
        if choice["finish_reason"] == "stop":
            assert choice["text"].endswith("}") and json.loads(choice["text"]) is not None
        if "object" not in str(fields) and choice["finish_reason"] == "stop":
            assert choice["text"] == json.dumps(json.loads(choice["text"]), separators=(",", ":"))


def test_a_compact_answer_is_that_of_the_single_run(app: TestClient, pair: Pair) -> None:
    answer = ask(app, seed=2, temperature=1.0, max_tokens=20, response_format=FORMAT, compact=True)
    grammar = polydraft.Grammar.json_schema(SCHEMA, compact=True)
    options = {"temperature": 1.0, "max_new_tokens": 20, "grammar": grammar, "tokenizer": pair.tokenizer}
    assert answer["choices"][0]["text"] == alone(pair, PROMPT, seed=2, **options)
    assert answer["choices"][0]["text"] in [f'{{"a":{a},"b":{b}}}' for a in (1, 2) for b in ("true", "false")]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"compact": True}, "compact"),
        ({"compact": True, "guided_regex": "a"}, "compact"),
        ({"compact": True, "response_format": {"type": "text"}}, "compact"),
        ({"compact": 1, "response_format": FORMAT}, "compact"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs"),
        ({"compact": True, "guided_json": {"x-guidance": {"whitespace_flexible": True}}}, "guided_json"),
    ],
    ids=str,
)
def test_blanks_of_nothing_are_refused(app: TestClient, fields: dict[str, Any], name: str) -> None:
    status, told = error(app, prompt=PROMPT, **fields)
    assert status == 400 and told["param"] == name and told["message"].endswith("."), told


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[a-c]{3}x"},
        {"structured_outputs": {"regex": "[a-c]{3}x"}},
        {"response_format": {"type": "regex", "regex": "[a-c]{3}x"}},
        {"guided_grammar": 'start: /[a-c]{3}/ "x"'},
    ],
)
def test_an_answer_matches_and_is_that_of_the_single_run(app: TestClient, pair: Pair, fields: dict[str, Any]) -> None:
    answer = ask(app, seed=2, temperature=1.0, max_tokens=20, **fields)
    text = answer["choices"][0]["text"]
    assert re.fullmatch("[a-c]{3}x", text) and answer["choices"][0]["finish_reason"] == "stop"
    if "guided_regex" in fields:
        grammar = polydraft.Grammar.regex("[a-c]{3}x")
        options = {"temperature": 1.0, "max_new_tokens": 20, "grammar": grammar, "tokenizer": pair.tokenizer}
        assert text == alone(pair, PROMPT, seed=2, **options)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "("},
        {"guided_grammar": "start: nothing"},
        {"guided_json": "{"},
        {"guided_json": {"type": "nonsense"}},
    ],
)
def test_a_grammar_that_is_none_is_refused(app: TestClient, fields: dict[str, Any]) -> None:
    status, told = error(app, prompt=PROMPT, **fields)
    assert status == 400 and told["param"] == next(iter(fields)) and told["message"].endswith(".")
