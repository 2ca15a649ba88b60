"""What a client may send that is wrong: a 4xx with one sentence and the field's name, never a 500."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serving import MODEL, PROMPT, ask, client, error

import polydraft

CHAT = "/v1/chat/completions"
WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 1}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [8192]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": "a" * 40_000}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"foo": 1}, "foo"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"seed": -2}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"prompt": [5] * 1015, "max_tokens": None}, "prompt"),
    ({"max_tokens": True}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt": [5] * 1000, "n": 128, "echo": True, "logprobs": 20, "max_tokens": 0}, "n"),
    ({"prompt": [[5] * 1000] * 64, "echo": True, "logprobs": 20, "max_tokens": 0}, "logprobs"),
    ({"suffix": "b"}, "suffix"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 17, "max_tokens": None}, "min_tokens"),
    ({"min_tokens": 1, "max_tokens": 0, "echo": True}, "min_tokens"),
    ({"detokenize": False}, "detokenize"),
    ({"add_special_tokens": "no"}, "add_special_tokens"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"8192": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop_token_ids": [8192]}, "stop_token_ids"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"a": 1}}, "stream_options.a"),
    ({"stream": "yes"}, "stream"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction.content"),
    ({"speculative": {"drafter": "nobody"}}, "speculative.drafter"),
    ({"speculative": {"drafter": "suffix:/etc"}}, "speculative.drafter"),
    ({"speculative": {"drafter": "ngram:0"}}, "speculative.drafter"),
    ({"speculative": {"drafter": "ensemble"}}, "speculative.drafter"),
    ({"speculative": {"verifier": "nothing"}}, "speculative.verifier"),
    ({"speculative": {"drafter": "ngram", "verifier": "spec-hub"}}, "speculative"),
    ({"speculative": {"drafter": "model", "verifier": "block", "tree": "2,2"}}, "speculative"),
    ({"speculative": {"tree": "no"}}, "speculative.tree"),
    ({"speculative": {"tree": "9,9,9"}}, "speculative.tree"),
    ({"speculative": {"tree": "2,2", "max_draft_tokens": 2}}, "speculative.max_draft_tokens"),
    ({"speculative": {"max_draft_tokens": 1000}}, "speculative.max_draft_tokens"),
    ({"speculative": {"k": 1}}, "speculative.k"),
    ({"speculative": 1}, "speculative"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_grammar": "no grammar ("}, "guided_grammar"),
    ({"guided_json": {"type": "nothing"}}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_json"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": "("}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": {"type": 1}}}, "structured_outputs.json"),
]


@pytest.mark.parametrize(("fields", "name"), WRONG, ids=lambda one: json.dumps(one)[:40])
def test_what_is_wrong_is_refused_by_its_name(app: TestClient, fields: dict[str, Any], name: str | None) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, **fields} if "prompt" in fields or fields else fields
    answer = app.post("/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"})
    told = answer.json()["error"]
    assert answer.status_code == 400 and told["param"] == name, told
    assert told["type"] == "invalid_request_error"
    assert told["message"].endswith(".") and "\n" not in told["message"] and len(told["message"]) < 400


SHAPES: list[tuple[str, Any, str]] = [  # a field of one or several shapes, its value, and the sentence
    ("stop", ["a"] * 17, "stop must have at most 16 entries, but has 17."),
    ("stop", [1], "stop.0 must be a text, not 1."),
    ("stop", {"a": 1}, "stop must be a text or a list, not an object."),
    ("prompt", {}, "prompt must be a text or a list, not an object."),
    ("prompt", [-1], "prompt.0 must be at least 0, not -1."),
    ("prompt", [[1], [-1]], "prompt.1.0 must be at least 0, not -1."),
    ("prompt", [10**30], "prompt.0 must be at most 2147483647, not so large a number."),
    ("prompt", [1.5], "prompt.0 must be a whole number, a text or a list, not 1.5."),
    ("prompt", [True], "prompt.0 must be a whole number, a text or a list, not true."),
    ("prompt", [None], "prompt.0 must be a whole number, a text or a list, not null."),
    ("prompt", [[1.5]], "prompt.0.0 must be a whole number, not 1.5."),
    ("prompt", [[[1]]], "prompt.0.0 must be a whole number, not a list."),
    ("prompt", [[1], "a"], 'prompt.1 must be a list, not "a".'),
    ("prompt", [1, "a"], 'prompt.1 must be a whole number, not "a".'),
    ("prompt", ["a", 1], "prompt.1 must be a text, not 1."),
    ("prompt", ["a"] * 129, "prompt must have at most 128 entries, but has 129."),
    ("prompt", [1, "b" * 50], "prompt.1 must be a whole number, not a text of 50 characters."),
    ("speculative", True, "speculative must be an object, not true."),
    ("response_format", "json", 'response_format must be an object, not "json".'),
    ("guided_json", [1], "guided_json must be an object or a text, not a list."),
    ("prediction", {"type": "content", "content": 1}, "prediction.content must be a text or a list, not 1."),
    (
        "prediction",
        {"type": "content", "content": [{"type": "image", "url": "a"}]},
        "prediction.content.0.type must be 'text', not \"image\".",
    ),
    ("temperature", -1, "temperature must be at least 0, not -1."),
    ("top_p", 0, "top_p must be above 0, not 0."),
    ("n", 1.5, "n must be a whole number, not 1.5."),
    ("echo", "yes", 'echo must be true or false, not "yes".'),
]


@pytest.mark.parametrize(("field", "value", "sentence"), SHAPES, ids=lambda one: json.dumps(one)[:40])
def test_what_is_wrong_is_told_of_the_shape_that_was_meant(
    app: TestClient, field: str, value: Any, sentence: str
) -> None:
    told = app.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, field: value}).json()["error"]
    assert told["message"] == sentence and told["param"].split(".")[0] == field, told


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_neither_a_text_nor_true(app: TestClient, name: str) -> None:
    for value, shown in (("1", '"1"'), (True, "true")):
        told = app.post("/v1/completions", json={"prompt": "a", name: value}).json()["error"]
        kind = "a whole number" if name == "max_tokens" else "a number"
        assert (told["param"], told["message"]) == (name, f"{name} must be {kind}, not {shown}.")
    told = app.post("/v1/completions", json={"prompt": "a", "logit_bias": {"1": "1"}}).json()["error"]
    assert told["message"] == 'logit_bias.1 must be a number, not "1".'


STRANGE = ("list", "function", "functions", "int", "str", "bool", "body", "tagged-union[a]", "a.b", "a[0]", "0", "ü点")
UNSEEN = ("", " a", "a\nb", "a\u2028b", "\u202eb")
OUTSIDE: list[tuple[str, dict[str, Any], str]] = [  # where it is, the body around it, and its place
    ("/v1/completions", {"prompt": "a"}, ""),
    ("/v1/completions", {"prompt": "a", "speculative": {}}, "speculative."),
    (
        "/v1/completions",
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "messages.1."),
    (
        CHAT,
        {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages.0.tool_calls.0.function.",
    ),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages.0."),
    ("/detokenize", {"tokens": [1]}, ""),
    (
        "/v1/completions",
        {"prompt": "a", "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]}},
        "prediction.content.0.",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "messages.0.content.0."),
]


def put(body: Any, place: str, name: str) -> Any:
    """Return a body with another field, inside of what a place names."""
    body = json.loads(json.dumps(body))
    inside = body
    for part in place.split(".")[:-1]:
        inside = inside[int(part)] if isinstance(inside, list) else inside[part]
    inside[name] = 1
    return body


@pytest.mark.parametrize("name", [*STRANGE, *UNSEEN], ids=ascii)
@pytest.mark.parametrize(("path", "body", "place"), OUTSIDE, ids=[path + place for path, _, place in OUTSIDE])
def test_a_field_that_there_is_not_is_named_whatever_it_is_called(
    app: TestClient, path: str, body: dict[str, Any], place: str, name: str
) -> None:
    status, told = error(app, path, **put(body, place, name))
    assert status == 400 and told["param"] == place + name and told["code"] == "unknown_field"
    shown = name if name in STRANGE else repr(name)
    assert told["message"] == f"{place}{shown} is no field of this request; leave it out."


def test_a_long_name_is_told_in_part(app: TestClient) -> None:
    long: dict[str, Any] = {"x" * 10_000: 1}
    told = error(app, prompt="a", **long)[1]
    assert told["param"] == "x" * 100 + "..." and told["message"].startswith(told["param"])
    told = error(app, prompt="a", speculative={"y" * 10_000: 1})[1]
    assert told["param"] == "speculative." + "y" * 100 + "..." and told["message"].startswith(told["param"])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": {"str": 1}}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a", "stop": {"str": 1, "list[str]": 2}}, "stop"),
        ({"prompt": "a", "stop": ["a", 1]}, "stop"),
        ({"prompt": "a", "logit_bias": {"list": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"int": "a"}}, "logit_bias.int"),
        ({"prompt": "a", "guided_json": 1}, "guided_json"),
        ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, None),
        ({"prompt": "a", "prediction": {"type": "content", "content": {"str": 1}}}, "prediction.content"),
    ],
    ids=str,
)
def test_the_name_of_a_type_is_no_field(app: TestClient, fields: dict[str, Any], name: str | None) -> None:
    told = error(app, **fields)[1]
    name = name or "response_format.json_schema.schema"
    assert told["param"] == name and told["message"].startswith(name)


@pytest.mark.parametrize("name", ["a b", "", "x.y", "ü"])
def test_a_field_whose_text_is_half_a_character_is_named(app: TestClient, name: str) -> None:
    body = json.dumps({"prompt": "a", name: "\ud800"})
    answer = app.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    told = answer.json()["error"]
    assert told["param"] == name and told["message"].startswith(name or "''") and "surrogate" in told["message"]


def test_prompts_without_anything_have_sentences_of_their_own(app: TestClient) -> None:
    assert error(app, prompt=[])[1]["message"].startswith("prompt is an empty list; give a text")
    for prompt, place in (([[]], 0), ([[1], []], 1), (["a", []], 1)):
        told = error(app, prompt=prompt)[1]
        assert told["message"].startswith(f"prompt has an empty row at place {place}; give at least one token")


@pytest.mark.parametrize(("encoding", "shown"), [("gzip", "gzip"), ("deflate, br", "deflate, br"), ("x\ty", "'x\\ty'")])
def test_a_body_that_is_compressed_names_its_encoding(app: TestClient, encoding: str, shown: str) -> None:
    head = {"content-type": "application/json", "content-encoding": encoding}
    answer = app.post("/v1/completions", content=gzip.compress(b'{"prompt": "a"}'), headers=head)
    told = answer.json()["error"]
    assert answer.status_code == 415 and told["code"] == "unsupported_encoding"
    assert told["message"] == f"The Content-Encoding {shown} is not supported; send the body as it is."
    plain = app.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"content-encoding": "Identity"})
    assert plain.status_code == 200


def test_other_modalities_than_text_are_refused(app: TestClient) -> None:
    said = [{"role": "user", "content": "x"}]
    for wanted in (["audio"], ["text", "audio"], ["text", "text"], [], "text", {"text": 1}, [["text"]]):
        told = error(app, CHAT, messages=said, modalities=wanted)[1]
        assert (
            told["param"] == "modalities" and told["message"] == 'modalities must be ["text"] here: answers are texts.'
        )
    assert error(app, CHAT, messages=said, modalities=["text"])[1]["param"] == "messages"  # it has no template
    assert error(app, prompt="a", modalities=["text"])[1]["param"] == "modalities"


def test_a_seed_of_minus_one_is_none(app: TestClient) -> None:
    seeds = {ask(app, seed=-1, max_tokens=1)["polydraft"]["seeds"][0] for _ in range(3)}
    assert len(seeds) == 3 and min(seeds) >= 0
    told = error(app, prompt="a", seed=-2)[1]
    assert told["param"] == "seed" and "-1" in told["message"]


RAW = [
    b"",
    b"{",
    b"[1]",
    b'"a"',
    b"null",
    b"\xff\xfe",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "seed": ' + b"9" * 6000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"prompt": "a", "\\ud800": 1}',
]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("raw", RAW, ids=lambda raw: repr(raw[:20]))
def test_bodies_that_are_no_requests(app: TestClient, path: str, raw: bytes) -> None:
    answer = app.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"].endswith(".")


def test_a_body_is_read_as_json_only_where_it_says_so(app: TestClient) -> None:
    answer = app.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "not_json"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "a": 1}]}, "messages.0.a"),
        ({"messages": [{"role": "user", "content": "x", "annotations": [{}]}]}, "messages.0.annotations"),
        ({"messages": [{"role": None, "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}], "min_tokens": 10, "max_completion_tokens": 5}, "min_tokens"),
        (
            {"messages": [{"role": "user"}], "min_tokens": 10, "max_tokens": 20, "max_completion_tokens": 5},
            "min_tokens",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 1}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x"}], "echo": True}, "echo"),
        ({"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_chats_that_cannot_be_answered(app: TestClient, fields: dict[str, Any], name: str) -> None:
    status, told = error(app, CHAT, **fields)
    assert status == 400 and told["param"] == name, told


def test_tokens_that_cannot_be_spelt(app: TestClient) -> None:
    assert error(app, "/tokenize")[1]["param"] == "prompt"
    assert error(app, "/detokenize", tokens=[8192])[1]["param"] == "tokens"
    assert error(app, "/detokenize", tokens=["a"])[1]["param"] == "tokens.0"


def test_another_model_is_not_there(app: TestClient) -> None:
    status, told = error(app, prompt=PROMPT, model="gpt")
    assert (status, told["param"], told["code"]) == (404, "model", "model_not_found")
    assert ask(app, model=MODEL)["model"] == MODEL
    assert app.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert app.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 1024
    assert app.get("/v1/models/gpt").status_code == 404


def test_a_tuned_model_says_of_which_it_is_another_one(tmp_path: Path, app: TestClient) -> None:
    pair = polydraft.load("pair")
    pair.target.config.tuned_from = "first"
    pair.target.save_pretrained(tmp_path)
    pair.tokenizer.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="is another model than 'first'"):
        polydraft.load(tmp_path)
    with pytest.warns(UserWarning, match="is another model than 'first'"), client(target=str(tmp_path)) as found:
        assert found.get("/v1/models").json()["data"][0]["tuned_from"] == "first"
    assert app.get("/v1/models").json()["data"][0]["tuned_from"] is None


def test_head_is_get_without_a_body(app: TestClient) -> None:
    for path in ("/health", "/metrics", "/version", "/v1/models", "/polydraft/options", "/", "/page/index.html"):
        found, head = app.get(path), app.head(path)
        assert head.status_code == found.status_code == 200 and head.content == b"", path
        assert head.headers["content-type"] == found.headers["content-type"]
    assert app.head("/v1/completions").status_code == 405 and app.head("/nothing").status_code == 404


def test_addresses_that_are_not_there(app: TestClient) -> None:
    assert app.get("/v1/nothing").status_code == 404 and app.get("/v1/completions").status_code == 405
    assert "error" in app.get("/v1/nothing").json()


def test_the_server_goes_on_after_all_that(app: TestClient) -> None:
    assert ask(app, seed=1)["choices"][0]["finish_reason"] == "length"
    assert app.get("/health").json() == {"status": "ok"}
