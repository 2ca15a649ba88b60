"""Chats over HTTP: the copy's template says what the server should have read, and texts follow its law."""

import json
from pathlib import Path
from typing import Any

import pytest
from chatml import CHATML, save_chat_model
from serving import served

from polydraft.conformance.http.copied_law import CopiedModel
from polydraft.conformance.http.engines import ENGINES, SampleRequest, chatting, engine_named, read_texts
from polydraft.conformance.http.served_tests import ServerReport, ServerTest, check_copy, check_tiny
from polydraft.conformance.http.server_client import ServerClient
from polydraft.errors import InvalidParameter, ServerError
from polydraft.models import load

pytest.importorskip("fastapi", reason="the server needs the extra serve")

ASKED = SampleRequest("m", (5, 6), "ab", 2, 7, 3, 0.8, 0.9, 30, 1, "Hello.")
TEST = ServerTest(most_tokens=4_000)
ANSWER = {
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "cd"},
            "finish_reason": "length",
            "logprobs": {
                "content": [
                    {"token": "c", "bytes": [99], "logprob": -0.5, "top_logprobs": [{"token": "c", "logprob": -0.5}]},
                    {"token": "d", "bytes": None, "logprob": -1.0, "top_logprobs": []},
                ]
            },
        }
    ],
    "usage": {"prompt_tokens": 12},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "chat")


def checked(address: str, copy: Path, test: ServerTest = TEST) -> ServerReport:
    client, pair = ServerClient(address, chat=True), load(copy, dtype="float32")
    try:
        own = CopiedModel(pair.target, pair.tokenizer, None, test.params)
        return check_copy(client, own, test, lambda *_: None)
    finally:
        client.close()


def test_chats_are_tested_by_the_template_of_the_copy(folder: Path, tmp_path: Path) -> None:
    other = save_chat_model(tmp_path / "other", template=CHATML.replace("Be kind.", "Be very kind."))
    with served(target=str(folder), dtype="float32", batch_size=32) as address:
        report = checked(address, folder)
        assert report.passed and report.tokens >= 4_000 and not report.findings
        client, pair = ServerClient(address, chat=True), load(folder, dtype="float32")
        with pytest.raises(InvalidParameter, match="A tiny model has no chat template"):
            check_tiny(client, CopiedModel(pair.target, pair.tokenizer, None, TEST.params), TEST, lambda *_: None)
        client.close()
        with pytest.raises(ServerError, match=r"read \d+ tokens of a prompt that has \d+ .* another chat template\.$"):
            checked(address, other)


def test_a_copy_without_a_template_is_refused(folder: Path, tmp_path: Path) -> None:
    bare = save_chat_model(tmp_path / "bare", template=None)
    with served(target=str(folder), dtype="float32") as address, pytest.raises(InvalidParameter, match="no chat temp"):
        checked(address, bare)


@pytest.mark.parametrize("engine", [one for one in ENGINES if one.chat_fields], ids=lambda one: one.name)
def test_engines_are_sent_messages_and_no_filters_of_their_own(engine: Any) -> None:
    fields = chatting(engine).fields(ASKED)
    assert fields["messages"] == [{"role": "user", "content": "Hello."}] and "prompt" not in fields
    assert fields["logprobs"] is True and fields["top_logprobs"] == 1 and fields["n"] == 2 and json.dumps(fields)
    assert fields.get("top_k", 30) == 30 and fields.get("min_p", 0) == 0 and fields["seed"] == 7
    assert fields.get("return_token_ids", False) == (engine.name in ("polydraft", "vllm"))


@pytest.mark.parametrize("name", ["ollama", "transformers"])
def test_engines_whose_filters_stay_are_refused(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"Chats of {name} take no field"):
        chatting(engine_named(name))


def test_answers_of_chats_are_read() -> None:
    (text,) = read_texts(chatting(engine_named("openai")), ANSWER, 1, "there")
    assert text.text == "cd" and text.tokens is None and text.prompt_tokens == 12
    assert [one.spelling for one in text.told] == [b"c", b"d"] and text.told[0].likeliest == (-0.5,)
    told = {**ANSWER["choices"][0], "token_ids": [7, 8], "finish_reason": "stop"}  # pyright: ignore[reportIndexIssue]
    (text,) = read_texts(chatting(engine_named("vllm")), {**ANSWER, "choices": [told]}, 1, "there")
    assert text.tokens == (7, 8) and text.stopped
