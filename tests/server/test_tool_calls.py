"""Calls of tools as OpenAI's client sees them: forced, chosen, streamed, and refused in one sentence."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chatml import save_chat_model
from fastapi.testclient import TestClient
from serving import client as in_process
from serving import error, served
from tool_models import WITHOUT_THOUGHTS, save_tool_model, tool

from polydraft.models import format_names

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance", reason="grammars need llguidance")
WEATHER = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 99}, "unit": {"enum": ["celsius", "kelvin"]}},
    "required": ["days", "unit"],
    "additionalProperties": False,
}
TOOLS = [tool("weather", WEATHER), tool("now", {"type": "object", "properties": {}, "additionalProperties": False})]
ASKED = [{"role": "user", "content": "How warm is it?"}]
NOW = {"type": "function", "function": {"name": "now"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tool_model(tmp_path_factory.mktemp("models") / "tools")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Any]:
    with served(target=str(folder), model_name="m", batch_size=4) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def asked(client: Any, **fields: Any) -> Any:
    given = {"model": "m", "messages": ASKED, "tools": TOOLS, "seed": 1, "max_tokens": 200, **fields}
    return client.chat.completions.create(**given)


def check(choice: Any) -> None:
    """Check that an answer calls tools, and does nothing else."""
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    for call in choice.message.tool_calls:
        given = json.loads(call.function.arguments)
        assert call.type == "function" and call.id.startswith("call_")
        if call.function.name == "now":
            assert given == {}
        else:
            assert (
                given.keys() == {"days", "unit"} and 1 <= given["days"] <= 99 and given["unit"] in ("celsius", "kelvin")
            )


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", NOW, ALLOWED], ids=["required", "named", "allowed"])
def test_a_call_is_forced(client: Any, choice: Any, temperature: float) -> None:
    answer = asked(client, tool_choice=choice, temperature=temperature, parallel_tool_calls=False, n=2)
    for one in answer.choices:
        check(one)
        assert len(one.message.tool_calls) == 1
        assert choice == "required" or one.message.tool_calls[0].function.name == "now"
    calls = [one.message.tool_calls[0].id for one in answer.choices]
    assert len({*calls}) == 2 and answer.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_stream_says_the_same(client: Any, choice: str) -> None:
    whole = asked(client, tool_choice=choice, temperature=1, max_tokens=60).choices[0]
    calls, content, finish = dict[int, dict[str, str]](), "", None
    for chunk in asked(client, tool_choice=choice, temperature=1, max_tokens=60, stream=True):
        (one,) = chunk.choices
        content += one.delta.content or ""
        finish = one.finish_reason or finish
        for piece in one.delta.tool_calls or ():
            if piece.index not in calls:
                assert piece.id and piece.type == "function" and piece.function.name
                calls[piece.index] = {"id": piece.id, "name": piece.function.name, "arguments": ""}
            else:
                assert piece.id is None and piece.function.name is None
            calls[piece.index]["arguments"] += piece.function.arguments
    assert finish == whole.finish_reason and content == (whole.message.content or "")
    told = [(one.function.name, one.function.arguments) for one in whole.message.tool_calls or ()]
    assert [(one["name"], one["arguments"]) for one in calls.values()] == told
    assert choice == "auto" or calls


def test_drafts_change_no_call(client: Any) -> None:
    found = [
        asked(client, tool_choice="required", temperature=0, extra_body={"speculative": {"drafter": drafter}})
        for drafter in ("none", "suffix", "merge")
    ]
    texts = [
        [(one.function.name, one.function.arguments) for one in answer.choices[0].message.tool_calls]
        for answer in found
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_call_and_its_result_are_told_to_the_model(client: Any) -> None:
    first = asked(client, tool_choice=NOW).choices[0].message
    result = {
        "role": "tool",
        "tool_call_id": first.tool_calls[0].id,
        "content": '<tool_call>{"name": "now"}</tool_call>',
    }
    said = [*ASKED, first.model_dump(), result]
    second = asked(client, messages=said, tools=[], max_tokens=5, temperature=0)
    assert second.usage.prompt_tokens > 40 and not second.choices[0].message.tool_calls  # what a tool says is no call


def test_the_beginning_of_a_mark_is_no_content(client: Any) -> None:
    """An answer that is cut off within a mark, or before a call has its name, has begun nothing that can be told."""
    for most in (3, 6, 14):
        given = {"tool_choice": "required", "max_tokens": most, "temperature": 0}
        whole = asked(client, **given).choices[0]
        assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == ("", None, "length")
        pieces = [chunk.choices[0].delta for chunk in asked(client, **given, stream=True)]
        assert not any(piece.content or piece.tool_calls for piece in pieces)


def test_a_call_that_never_ends_has_the_pieces_that_there_are(client: Any) -> None:
    long = {"type": "object", "properties": {"text": {"type": "string", "minLength": 900}}, "required": ["text"]}
    given = {"tools": [tool("write", long)], "tool_choice": "required", "max_tokens": 90, "temperature": 1}
    whole = asked(client, **given).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "length" and call.function.name == "write"
    assert re.match(r'\{\s?"text"\s?:\s?"', call.function.arguments)
    pieces = [one for chunk in asked(client, **given, stream=True) for one in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(one.function.arguments for one in pieces) == call.function.arguments


CYCLE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["next"],
    "additionalProperties": False,
}
LETTERS = {"type": "string", "pattern": "^[ab]{1,4}$"}
STRANGE: list[tuple[str, dict[str, Any]]] = [
    ("cycle", {**CYCLE, "$defs": {"node": CYCLE}}),
    ("pattern", {"type": "object", "properties": {"é": LETTERS}, "required": ["é"], "additionalProperties": False}),
    ("wetter_ö点", WEATHER),
]


@pytest.mark.parametrize(("name", "schema"), STRANGE, ids=lambda one: one if isinstance(one, str) else "")
def test_strange_schemas_and_names_hold(client: Any, name: str, schema: dict[str, Any]) -> None:
    given = {"tools": [tool(name, schema, strict=True)], "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(3):
        choice = asked(client, **given, seed=seed, temperature=1, max_tokens=400).choices[0]
        (call,) = choice.message.tool_calls
        assert call.function.name == name
        if choice.finish_reason == "tool_calls":
            found = json.loads(call.function.arguments)
            assert found.keys() == {*schema["required"]} and (name != "pattern" or {*found["é"]} <= {"a", "b"})


def test_as_many_tools_as_may_be(tmp_path: Path) -> None:
    names = WITHOUT_THOUGHTS.replace("{{ tool | tojson }}", "{{ tool.function.name }}")
    many = [tool(f"tool_{number}", WEATHER, strict=True) for number in range(129)]
    with in_process(target=str(save_chat_model(tmp_path, template=names)), model_name="m") as found:
        body = {"messages": ASKED, "tools": many[:128], "tool_choice": "required", "parallel_tool_calls": False}
        told = found.post("/v1/chat/completions", json={**body, "seed": 1}).json()["choices"][0]
        (call,) = told["message"]["tool_calls"]
        assert call["function"]["name"] in {one["function"]["name"] for one in many}
        status, refused = error(found, "/v1/chat/completions", **{**body, "tools": many})
        assert status == 400 and str(refused["param"]).startswith("tools") and refused["message"].endswith("."), refused


@pytest.mark.long(3)
@pytest.mark.parametrize("name", format_names())
def test_every_format_is_forced_and_read(folder: Path, name: str) -> None:
    with in_process(target=str(folder), model_name="m", tool_format=name) as found:
        body = {"messages": ASKED, "tools": TOOLS, "seed": 1, "tool_choice": "required", "parallel_tool_calls": False}
        told = found.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert told["finish_reason"] == "tool_calls" and len(told["message"]["tool_calls"]) == 1, told
        metrics = found.get("/metrics").text
        assert f'polydraft:tool_calls_total{{format="{name}",model_name="m",sound="true"}} 1.0' in metrics


CALLING = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]}
LONG = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": json.dumps(["x" * 100_000])}}]}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required", "tools": None}, "tool_choice", "there are no tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice", 'names "rm"'),
    ({"tool_choice": "any"}, "tool_choice", "must be"),
    ({"tools": [{"type": "web_search"}]}, "tools", "nothing else is called"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "names must differ"),
    ({"tools": [tool("a b", WEATHER, strict=True)]}, "tools", "no call can name"),
    ({"tools": [tool("f", {"type": "object", "uniqueItems": 1, "not": {}}, strict=True)]}, "tools", "of the tool f"),
    ({"max_reasoning_tokens": 5}, "max_reasoning_tokens", "does not mark"),
    ({"max_reasoning_tokens": -1}, "max_reasoning_tokens", "at least 0"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ({"tools": [tool("</tool_call>", WEATHER)], "tool_choice": "required"}, "tools", "no call can name"),
    ({"tools": [tool("f", {"$ref": "https://example.org/x"}, strict=True)]}, "tools", "of the tool f"),
    ({"tools": [tool("f", {"properties": {"a": {"pattern": "("}}}, strict=True)]}, "tools", "of the tool f"),
    ({"messages": [*ASKED, CALLING]}, "messages", "has calls without results"),
    ({"messages": [*ASKED, LONG, {"role": "tool", "content": "x"}]}, "messages", "The prompt has"),
]


@pytest.mark.parametrize(("fields", "name", "said"), BAD, ids=lambda one: str(one)[:40])
def test_what_cannot_be_called_is_refused(loaded: TestClient, fields: dict[str, Any], name: str, said: str) -> None:
    body = {name: value for name, value in {"messages": ASKED, "tools": TOOLS, **fields}.items() if value is not None}
    status, told = error(loaded, "/v1/chat/completions", **body)
    assert status == 400 and str(told["param"]).split(".")[0] == name, told
    assert said in told["message"] and told["message"].endswith("."), told


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[TestClient]:
    with in_process(target=str(folder), model_name="m") as found:
        yield found


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = save_tool_model(tmp_path_factory.mktemp("models") / "thinker", thinks=True)
    with in_process(target=str(folder), model_name="m") as found:
        yield found


def chat(found: TestClient, **fields: Any) -> dict[str, Any]:
    answer = found.post("/v1/chat/completions", json={"messages": ASKED, "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("most", [0, 3, 7])
def test_reasoning_is_bounded_and_told_apart(thinker: TestClient, most: int) -> None:
    """The effort, which the template takes, begins the reasoning in the prompt; the bound ends it."""
    fields = {"max_reasoning_tokens": most, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
    marks = sum(map(len, ("<think>", "</think>")))  # tokens at most
    for own in ({}, {"reasoning_effort": "high"}):
        found = chat(thinker, **fields, **own)
        (choice,) = found["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        thought = found["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert thought <= most + marks and (not own or thought > most)
        assert "</think>" not in str(choice) and (not own or most == 0 or choice["message"]["reasoning_content"])


def test_a_schema_holds_behind_reasoning(thinker: TestClient) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    answer = chat(thinker, response_format=shape, max_tokens=300, compact=True, max_reasoning_tokens=4)
    assert json.loads(answer["choices"][0]["message"]["content"]).keys() == {"days", "unit"}
