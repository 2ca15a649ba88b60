"""Conversations: templates, tools, streams and log-probabilities, as the real client of OpenAI sees them."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chatml import CHATML, START, save_chat_model
from serving import client as in_process
from serving import served
from tokenizers.processors import TemplateProcessing

import polydraft
from polydraft.models import Pair, conversation_ids
from polydraft.server import Settings
from polydraft.server.wire.requests import ChatBody
from polydraft.server.worker import GrammarRequest

openai = pytest.importorskip("openai")
MESSAGES = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How many are there?"}]
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]
WITH_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}{% endif %}" + CHATML


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "chat", template=WITH_TOOLS)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(target=str(folder), model_name="chat", keys=("k",), batch_size=3) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0)


@pytest.fixture(scope="module")
def model(folder: Path) -> Pair:
    return polydraft.load(folder)


def alone(
    model: Pair, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any
) -> str:
    ids = conversation_ids(model.tokenizer, messages, tools)
    output = polydraft.generate(model.target, ids, max_new_tokens=10, **options)
    return model.tokenizer.decode(output.sequences[0, len(ids) :], skip_special_tokens=True)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_that_of_the_template(client: Any, model: Pair, stream: bool) -> None:
    fields = {"model": "chat", "messages": MESSAGES, "seed": 4, "temperature": 0.9, "max_completion_tokens": 10}
    if stream:
        parts = [one for one in client.chat.completions.create(**fields, stream=True) if one.choices]
        assert parts[0].choices[0].delta.role == "assistant" and parts[-1].choices[0].finish_reason
        text = "".join(one.choices[0].delta.content or "" for one in parts)
    else:
        answer = client.chat.completions.create(**fields)
        text = answer.choices[0].message.content
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert text == alone(model, MESSAGES, seed=4, temperature=0.9, top_k=0)


def test_tools_go_to_the_template_and_parts_are_joined(client: Any, model: Pair) -> None:
    said = [*MESSAGES[:1], {"role": "user", "content": [{"type": "text", "text": "How many "}, *_parts("are there?")]}]
    answer = client.chat.completions.create(
        model="chat", messages=said, tools=TOOLS, temperature=0, max_tokens=10, parallel_tool_calls=True
    )
    assert answer.choices[0].message.content == alone(model, MESSAGES, TOOLS, temperature=0)
    assert alone(model, MESSAGES, TOOLS, temperature=0) != "" and answer.usage.prompt_tokens > 10


def test_tokenize_tells_the_template_of_tools(address: str, model: Pair) -> None:
    for tools in (TOOLS, [], None):
        body = {"messages": MESSAGES, "tools": tools}
        told = httpx.post(f"{address}/tokenize", json=body, headers={"authorization": "Bearer k"}).json()
        assert told["tokens"] == conversation_ids(model.tokenizer, MESSAGES, tools)
    body = {"prompt": "a", "tools": TOOLS}
    told = httpx.post(f"{address}/tokenize", json=body, headers={"authorization": "Bearer k"})
    assert told.status_code == 400 and told.json()["error"]["param"] == "tools"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_the_template_leaves_out_is_refused_by_its_name(tmp_path: Path, path: str) -> None:
    folder = save_chat_model(tmp_path / "model")
    call = {"type": "function", "function": {"name": "count", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    cases: dict[str, dict[str, Any]] = {
        "tools": {"messages": MESSAGES, "tools": TOOLS},
        "messages.1.name": {"messages": [MESSAGES[0], {**MESSAGES[1], "name": "Ann"}]},
        "messages.2.tool_calls": {
            "messages": [*MESSAGES, answer, {"role": "tool", "content": "3", "tool_call_id": "1"}]
        },
        "messages.0.reasoning_content": {
            "messages": [{"role": "assistant", "content": "3", "reasoning_content": "r"}, MESSAGES[1]]
        },
    }
    with in_process(target=str(folder), model_name="m") as found:
        for name, body in cases.items():
            said = found.post(path, json=body)
            told = said.json()["error"]
            assert said.status_code == 400 and told["param"] == name and told["message"].startswith(name), told
            assert "this model's chat template takes no" in told["message"]
        for body in ({"messages": MESSAGES, "tools": []}, {"messages": MESSAGES}):
            assert found.post(path, json=body | ({"max_tokens": 1} if "chat" in path else {})).status_code == 200
        if "chat" in path:
            body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1}
            assert found.post(path, json={**body, "modalities": ["text"]}).status_code == 200


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def test_log_probabilities_of_a_chat(client: Any) -> None:
    answer = client.chat.completions.create(
        model="chat", messages=MESSAGES, logprobs=True, top_logprobs=3, temperature=0, max_tokens=5
    )
    told = answer.choices[0].logprobs.content
    assert len(told) == answer.usage.completion_tokens
    assert all(len(one.top_logprobs) == 3 and one.logprob == one.top_logprobs[0].logprob for one in told)


def test_the_bytes_of_half_a_character_are_its_own(client: Any, model: Pair) -> None:
    halves = model.tokenizer("\U0001f600", add_special_tokens=False)["input_ids"]
    assert len(halves) > 1
    answer = client.chat.completions.create(
        model="chat", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=1, logit_bias={halves[0]: 100}
    )
    told = answer.choices[0].logprobs.content[0]
    assert told.token == "\ufffd" and told.bytes == list("\U0001f600".encode()[: len(told.bytes)])
    assert all(one.bytes == list(one.token.encode()) for one in told.top_logprobs if "\ufffd" not in one.token)


def test_the_next_turn_reads_only_what_is_new(client: Any) -> None:
    first = client.chat.completions.create(model="chat", messages=MESSAGES, seed=1, max_tokens=5)
    said = [*MESSAGES, {"role": "assistant", "content": first.choices[0].message.content}, *MESSAGES[1:]]
    second = client.chat.completions.create(model="chat", messages=said, seed=1, max_tokens=5)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


@pytest.mark.parametrize("more", [{}, {"annotations": []}])
def test_an_answer_of_the_client_is_a_message_of_the_next_turn(client: Any, model: Pair, more: dict[str, Any]) -> None:
    first = openai.types.chat.ChatCompletionMessage(role="assistant", content="Three.").model_dump() | more
    assert first.keys() >= {"annotations", "audio", "function_call", "refusal", "tool_calls"}
    said = [*MESSAGES, first, *MESSAGES[1:]]
    answer = client.chat.completions.create(
        model="chat",
        messages=said,
        seed=1,
        max_tokens=10,
        stream=True,
        stream_options={"include_usage": None, "include_obfuscation": False},
        extra_body={
            "speculative": {"enabled": None, "drafter": None},
            "response_format": {"type": "text", "regex": None},
        },
    )
    text = "".join(one.choices[0].delta.content or "" for one in answer)
    plain = [*MESSAGES, {"role": "assistant", "content": "Three."}, *MESSAGES[1:]]
    assert text == alone(model, plain, seed=1, temperature=1.0, top_k=0)


def test_nulls_of_schemas_and_arguments_are_no_fields() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [None, 1], "default": None}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None}, "index": None}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}, "a": None}
    body = ChatBody.model_validate({"messages": messages, "guided_json": schema, "tools": [tool]})
    ask = body.as_ask("name")
    assert ask.grammar == GrammarRequest("json_schema", schema, "guided_json") and ask.tools == (tool,)
    told = ask.prompts[0][0]
    assert isinstance(told, dict) and told["content"] == ""
    assert told["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": None}}


def test_a_text_that_is_too_long_is_refused_by_the_name_of_what_asks_for_it(client: Any) -> None:
    for asked in ({"max_tokens": 10**6}, {"max_completion_tokens": 10**6}, {"min_tokens": 10**6}):
        with pytest.raises(openai.BadRequestError) as found:
            client.chat.completions.create(model="chat", messages=MESSAGES, extra_body=asked)
        assert found.value.param == next(iter(asked)) and found.value.code == "context_length_exceeded"


def test_errors_are_those_of_the_client(client: Any, address: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as found:
        client.chat.completions.create(model="chat", messages=MESSAGES, temperature=-1)
    assert found.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="model"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0).models.list()
    assert [one.id for one in client.models.list()] == ["chat"]


def test_nobody_is_told_where_the_model_lies(folder: Path) -> None:
    with in_process(target=str(folder), drafter=f"suffix:{folder.parent / 'store'}", vllm_metrics=True) as found:
        for path in ("/polydraft/options", "/metrics", "/v1/models", "/health", "/openapi.json"):
            told = found.get(path).text
            assert str(folder.parent) not in told and str(folder.parent.parent) not in told, path
        assert found.get("/v1/models").json()["data"][0]["id"] == "chat"
        assert found.get("/polydraft/options").json()["defaults"]["drafter"] == "suffix"
        asked = found.post("/v1/completions", json={"model": "chat", "prompt": "There are", "max_tokens": 2})
        assert asked.json()["model"] == "chat"


def test_a_model_has_the_name_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    places = {str(tmp_path / "own"): "own", "own": "own", "./own/": "own", "org/name": "org/name", "/gone/away": "away"}
    assert {place: Settings(target=place).name for place in places} == places
    assert Settings(target="own", model_name="m").name == "m"


def test_what_is_not_said_is_the_models_own(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "model")
    model: Any = polydraft.load(folder)
    model.target.generation_config.update(do_sample=True, min_p=0.4, repetition_penalty=1.8)
    model.target.generation_config.save_pretrained(str(folder))
    model = polydraft.load(folder)
    with in_process(target=str(folder), model_name="m") as found:
        texts = set[str]()
        own: dict[str, Any]
        for own in ({}, {"min_p": 0}, {"repetition_penalty": 1}, {"min_p": 0, "repetition_penalty": 1}):
            body = {"messages": MESSAGES, "max_tokens": 10, "seed": 1, **own}
            told = found.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            assert told == alone(model, MESSAGES, seed=1, temperature=1.0, top_k=0, **own)
            texts.add(told)
        assert len(texts) > 2


def test_special_tokens_are_added_unless_that_is_not_wanted(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "model")
    tokenizer: Any = polydraft.load(folder).tokenizer
    begin = tokenizer.convert_tokens_to_ids(START)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A", pair=f"{START} $A $B", special_tokens=[(START, begin)]
    )
    tokenizer.save_pretrained(str(folder))
    with in_process(target=str(folder), model_name="m") as found:
        told = found.post("/tokenize", json={"prompt": "There are"}).json()["tokens"]
        assert told[0] == begin
        for added in (None, True, False):
            body = {"prompt": "There are", "add_special_tokens": added, "max_tokens": 1, "seed": 1}
            usage = found.post("/v1/completions", json=body).json()["usage"]
            assert usage["prompt_tokens"] == len(told) - (added is False)
        body = {"messages": MESSAGES, "max_tokens": 1, "add_special_tokens": False}
        assert found.post("/v1/chat/completions", json=body).status_code == 200


def test_curl_gets_an_answer(address: str) -> None:
    body = json.dumps({"prompt": "There are", "max_tokens": 3, "seed": 1})
    head = ["-H", "content-type: application/json", "-H", "authorization: Bearer k"]
    run = subprocess.run(
        ["curl", "-sS", "-m", "30", *head, "-d", body, f"{address}/v1/completions"], capture_output=True, check=True
    )
    assert json.loads(run.stdout)["usage"]["completion_tokens"] == 3
    stream = json.dumps({"prompt": "There are", "max_tokens": 3, "seed": 1, "stream": True})
    run = subprocess.run(
        ["curl", "-sSN", "-m", "30", *head, "-d", stream, f"{address}/v1/completions"], capture_output=True, check=True
    )
    assert run.stdout.endswith(b"data: [DONE]\n\n")
