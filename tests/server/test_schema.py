"""The server's own description of itself: what it says of answers is so, and thousands of bodies are sent by it."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chatml import save_chat_model
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from pydantic import TypeAdapter
from serving import PROMPT, ask, chunks, client, served

from polydraft.server.wire.answer_types import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Detokenized,
    ErrorBody,
    Health,
    ModelCard,
    ModelList,
    Tokenized,
    Version,
)

MODES: list[dict[str, Any]] = [
    {},
    {"logprobs": 2, "n": 2},
    {"speculative": {"trace": True, "detailed": True}},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stop_token_ids": [*range(50)]},
    {"prediction": {"type": "content", "content": "return n"}, "stop": ["e"]},
    {"speculative": {"enabled": False}},
]
CASES = {"positive": 1000, "negative": 2000}
"""So many bodies are sent that the description allows, and so many that it does not."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module")
def chats(folder: Path) -> Iterator[TestClient]:
    with client(target=str(folder), model_name="chat") as found:
        yield found


def test_every_address_is_described(app: TestClient) -> None:
    told = app.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= told["paths"].keys()
    fields = told["components"]["schemas"]["CompletionBody"]
    assert fields["additionalProperties"] is False and "speculative" in fields["properties"]
    assert "422" not in str(told["paths"]["/v1/completions"]["post"]["responses"].keys())
    for path, operations in told["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            assert "400" in answers and all(
                one.get("schema", one.get("itemSchema")) for one in answers["200"]["content"].values()
            ), path
    assert [*told["paths"]["/metrics"]["get"]["responses"]["200"]["content"]] == ["text/plain"]
    events = told["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]
    done, said = events["properties"]["data"]["anyOf"]
    names = [one["$ref"].split("/")[-1] for one in said["contentSchema"]["anyOf"]]
    assert names == ["CompletionChunk", "ErrorBody"] and {*names} <= told["components"]["schemas"].keys()
    assert done == {"const": "[DONE]"}


def test_only_what_is_taken_is_described(app: TestClient) -> None:
    schemas = app.get("/openapi.json").json()["components"]["schemas"]

    def words(kind: str, name: str) -> list[Any]:
        one = schemas[kind]["properties"][name]
        parts = one.get("anyOf", [one])
        return [word for part in parts for word in part.get("enum", [part["const"]] if "const" in part else [])]

    assert words("CompletionBody", "suffix") == [""] and words("CompletionBody", "detokenize") == [True]
    assert words("ChatBody", "tool_choice") == ["auto", "none", "required"] and words(
        "ChatBody", "add_special_tokens"
    ) == [False]
    assert schemas["DetokenizeBody"]["properties"]["tokens"]["items"]["maximum"] == 8191
    assert "$ref" not in str(schemas["CompletionBody"]["properties"]["best_of"])
    assert [one["required"] for one in schemas["TokenizeBody"]["oneOf"]] == [["prompt"], ["messages"]]


def fits(kind: type, told: Any) -> None:
    """Check that an answer has what is said of it, and nothing else."""
    TypeAdapter(kind).validate_python(told, strict=True)


@pytest.mark.long(4)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_answers_are_as_they_are_described(app: TestClient, chats: TestClient, mode: dict[str, Any]) -> None:
    plain = {name: value for name, value in mode.items() if name != "stream_options"}
    fits(Completion, ask(app, seed=1, **plain))
    fits(Completion, ask(app, seed=1, echo=True, **plain))
    for part in [*chunks(app, seed=1, **mode), *chunks(app, seed=1, echo=True, **mode)]:
        fits(CompletionChunk, part)
    if "logprobs" in mode:
        mode, plain = ({**one, "logprobs": True, "top_logprobs": 2} for one in (mode, plain))
    said = [{"role": "user", "content": "How many?"}]
    fits(ChatCompletion, ask(chats, seed=1, messages=said, **plain))
    for part in chunks(chats, seed=1, messages=said, **mode):
        fits(ChatCompletionChunk, part)


def test_other_answers_are_as_they_are_described(app: TestClient) -> None:
    kinds = {"/v1/models": ModelList, "/v1/models/polydraft-embedded": ModelCard, "/health": Health}
    for path, kind in {**kinds, "/version": Version, "/v1/models/other": ErrorBody, "/nothing": ErrorBody}.items():
        fits(kind, app.get(path).json())
    for texts in (True, False):
        fits(Tokenized, app.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": texts}).json())
    fits(Detokenized, app.post("/detokenize", json={"tokens": [5, 6]}).json())
    fits(ErrorBody, app.post("/detokenize", json={"tokens": [8192]}).json())


def test_fields_that_are_taken_are_described(app: TestClient) -> None:
    schemas = app.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["CompletionBody"]["properties"]["seed"]["anyOf"][0]["minimum"] == -1
    assert "compact" in schemas["CompletionBody"]["properties"] and "compact" in schemas["ChatBody"]["properties"]
    assert "disable_any_whitespace" in schemas["StructuredFields"]["properties"]
    assert "modalities" in schemas["ChatBody"]["properties"] and "tools" in schemas["TokenizeBody"]["properties"]
    assert {"verifier", "lossless"} <= {*schemas["Seeds"]["required"]} & {*schemas["AllDraftCounts"]["required"]}
    for path, operations in app.get("/openapi.json").json()["paths"].items():
        for method, one in operations.items():
            assert ("415" in one["responses"]) == (method == "post") and "503" in one["responses"], path


def sent(operation: Any, address: str, mode: str, most: int) -> Counter[int]:
    """Send bodies that the description allows or forbids to an address, check the answers, and count their numbers.

    A body that is forbidden may be taken all the same, such as one with nulls; what is refused is refused in OpenAI's
    shape.
    """
    schemathesis = pytest.importorskip("schemathesis")
    checks = [one for one in schemathesis.checks.CHECKS.get_all() if one.__name__ in CHECKS]
    assert len(checks) == len(CHECKS)
    counted: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    @settings(max_examples=most, deadline=None, suppress_health_check=[*HealthCheck], database=None, derandomize=True)
    def send(case: Any) -> None:
        answer = case.call(base_url=address, timeout=240)
        counted[answer.status_code] += 1
        if mode == "positive":
            case.validate_response(answer, checks=checks)
        assert answer.status_code < 500, (answer.status_code, case.body)
        if answer.status_code != 200:
            fits(ErrorBody, answer.json())
            assert answer.json()["error"]["message"].endswith(".") and len(answer.json()["error"]["message"]) < 500

    send()
    return counted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_answer_is_as_it_is_described_whatever_is_sent(folder: Path) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    with served(target=str(folder), batch_size=16, max_length=96) as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        bodies = [one for one in operations if one.method.upper() == "POST"]
        allowed = {one.path: sent(one, address, "positive", CASES["positive"] // len(bodies)) for one in operations}
        forbidden = {one.path: sent(one, address, "negative", CASES["negative"] // len(bodies)) for one in bodies}
        assert httpx.get(f"{address}/health").status_code == 200
    for counted, mode in ((allowed, "positive"), (forbidden, "negative")):
        assert sum(map(Counter.total, counted.values())) >= CASES[mode], counted
    assert all(one[200] for path, one in allowed.items() if "{" not in path), allowed
    assert all(one[400] > one[200] for one in forbidden.values()), forbidden
