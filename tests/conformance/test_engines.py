"""What engines are asked and how their answers are read, in the shapes that each of them documents."""

import json
from dataclasses import replace
from threading import Event
from typing import Any

import httpx
import pytest

from polydraft.conformance.http.engines import (
    ENGINES,
    SampledText,
    SampleRequest,
    ToldToken,
    engine_named,
    engine_of,
    read_texts,
)
from polydraft.conformance.http.server_client import KEY, MOST_WAITS, ServerClient
from polydraft.errors import InvalidParameter, PolydraftError, ServerError

ASKED = SampleRequest("m", (5, 6), "ab", 2, 7, 3, 0.8, 0.9, 30, 1)
ASKED_LATER = replace(ASKED, seed=8)
VLLM = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 1,
            "text": "cd",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [7, 8, 0],
            "prompt_logprobs": None,
        },
        {
            "index": 0,
            "text": "cde",
            "logprobs": {
                "text_offset": [0, 1, 2],
                "token_logprobs": [-0.5, -1.0, -2.0],
                "tokens": ["c", "d", "e"],
                "top_logprobs": [{"c": -0.5}, {"x": -0.1, "d": -1.0}, {"e": -2.0}],
            },
            "finish_reason": "length",
            "token_ids": [7, 8, 9],
        },
    ],
    "usage": {"prompt_tokens": 2, "total_tokens": 8, "completion_tokens": 6},
}
SGLANG = [
    {
        "text": "cd",
        "output_ids": [7, 8],
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None]],
            "output_top_logprobs": [[[-0.5, 7, None]], [[-0.1, 9, None]]],
        },
    },
    {
        "text": "c",
        "output_ids": [7, 0],
        "meta_info": {"finish_reason": {"type": "stop", "matched": 0}, "prompt_tokens": 2},
    },
]
LLAMA_CPP = {
    "index": 0,
    "content": "cd",
    "tokens": [7, 8],
    "id_slot": 0,
    "stop": True,
    "model": "m",
    "tokens_predicted": 2,
    "tokens_evaluated": 2,
    "stop_type": "limit",
    "stopping_word": "",
    "completion_probabilities": [
        {"id": 7, "token": "c", "bytes": [99], "logprob": -0.5, "top_logprobs": [{"id": 7, "logprob": -0.5}]},
        {"id": 8, "token": "d", "bytes": [100], "logprob": -1.0, "top_logprobs": [{"id": 9, "logprob": -0.1}]},
    ],
}
OLLAMA = {
    "model": "m",
    "created_at": "2026-01-01T00:00:00Z",
    "response": "cd",
    "done": True,
    "done_reason": "stop",
    "total_duration": 1,
    "prompt_eval_count": 2,
    "eval_count": 2,
    "logprobs": [
        {"token": "c", "logprob": -0.5, "bytes": [99], "top_logprobs": [{"token": "c", "logprob": -0.5}]},
        {"token": "d", "logprob": -1.0, "bytes": [100], "top_logprobs": [{"token": "x", "logprob": -0.1}]},
    ],
}
PLAIN = {"choices": [{"index": 0, "text": "cd", "finish_reason": "length", "logprobs": None}], "usage": None}
ALL_OFF = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
LIKE_VLLM = {"prompt": [5, 6], "n": 2, "top_k": 30, "logprobs": 1, "ignore_eos": True, "return_token_ids": True}
LIKE_LLAMA = {**ALL_OFF, "seed": 7, "top_k": 30, "typical_p": 1.0, "repeat_penalty": 1.0, "mirostat": 0}


def told(first: Any, second: Any) -> tuple[ToldToken, ...]:
    return (ToldToken(-0.5, *first, (-0.5,)), ToldToken(-1.0, *second, (-0.1,)))


SHAPES: list[tuple[str, dict[str, Any], Any, list[SampledText]]] = [
    (
        "vllm",
        {**ALL_OFF, **LIKE_VLLM, "repetition_penalty": 1.0, "max_tokens": 3, "seed": 7, "temperature": 0.8},
        VLLM,
        [
            SampledText(
                "cde",
                (7, 8, 9),
                (
                    ToldToken(-0.5, None, b"c", (-0.5,)),
                    ToldToken(-1.0, None, b"d", (-0.1, -1.0)),
                    ToldToken(-2.0, None, b"e", (-2.0,)),
                ),
                False,
                2,
            ),
            SampledText("cd", (7, 8, 0), (), True, 2),
        ],
    ),
    (
        "sglang",
        {"input_ids": [5, 6], "return_logprob": True, "top_logprobs_num": 1},
        SGLANG,
        [SampledText("cd", (7, 8), told((7, b""), (8, b"")), False, 2), SampledText("c", (7, 0), (), True, 2)],
    ),
    (
        "llama.cpp",
        {**LIKE_LLAMA, "prompt": [5, 6], "n_predict": 3, "return_tokens": True, "n_probs": 1, "dry_multiplier": 0.0},
        LLAMA_CPP,
        [SampledText("cd", (7, 8), told((7, b""), (8, b"")), False, 2)],
    ),
    (
        "ollama",
        {"prompt": "ab", "raw": True, "stream": False, "logprobs": True, "top_logprobs": 1},
        OLLAMA,
        [SampledText("cd", None, told((None, b"c"), (None, b"d")), True, 2)],
    ),
    ("transformers", {"prompt": "ab", "stream": False, "temperature": 0.8}, PLAIN, [SampledText("cd")]),
    ("openai", {"prompt": "ab", "n": 2, "temperature": 0.8, "top_p": 0.9, "seed": 7}, PLAIN, [SampledText("cd")]),
]


@pytest.mark.parametrize(("word", "fields", "answer", "texts"), SHAPES, ids=[one[0] for one in SHAPES])
def test_fields_and_answers(word: str, fields: dict[str, Any], answer: Any, texts: list[SampledText]) -> None:
    engine = engine_named(word)
    sent = engine.fields(ASKED)
    assert fields.items() <= sent.items() and json.loads(json.dumps(sent)) == sent
    assert read_texts(engine, answer, len(texts), "there") == texts
    with pytest.raises(ServerError, match="asked for 9 texts and gave"):
        read_texts(engine, answer, 9, "there")


def test_what_is_nested_says_as_much() -> None:
    sampling = engine_named("sglang").fields(ASKED)["sampling_params"]
    assert {
        **ALL_OFF,
        "n": 2,
        "top_k": 30,
        "top_p": 0.9,
        "ignore_eos": True,
        "max_new_tokens": 3,
    }.items() <= sampling.items()
    assert {**LIKE_LLAMA, "num_predict": 3}.items() <= engine_named("ollama").fields(ASKED)["options"].items()
    config = json.loads(engine_named("transformers").fields(ASKED)["generation_config"])
    assert config["do_sample"] and config["top_k"] == 30 and config["max_new_tokens"] == 3
    assert engine_named("vllm").fields(SampleRequest("m", (), "ab", 1, 0, 1))["top_k"] == -1, "0 is no filter there"
    assert engine_named("llama.cpp").fields(SampleRequest("m", (), "ab", 1, 0, 1))["prompt"] == "ab"


@pytest.mark.parametrize(
    ("owner", "word"),
    [("vllm", "vllm"), ("llamacpp", "llama.cpp"), ("library", "ollama"), ("polydraft", "polydraft"), ("me", "openai")],
)
def test_engines_are_told_by_who_owns_their_models(owner: str, word: str) -> None:
    assert engine_of([{"id": "m", "owned_by": owner}]).name == word


def test_an_engine_that_is_none_is_refused_with_what_is_meant() -> None:
    with pytest.raises(InvalidParameter, match="no engine 'llamacpp'"):
        engine_named("llamacpp")
    assert len({one.name for one in ENGINES}) == 7


@pytest.mark.parametrize(
    "answer", [{}, [], {"choices": [{}]}, {"choices": 3}, {"choices": [{"text": "a", "token_ids": ["x"]}]}]
)
def test_another_shape_is_refused(answer: Any) -> None:
    for engine in ENGINES:
        with pytest.raises(ServerError, match=r"does not answer as .* does|gave 0"):
            read_texts(engine, answer, 1, "there")


MODELS = {"data": [{"id": "m", "owned_by": "vllm"}]}


def client(answer: Any, **known: Any) -> ServerClient:
    """Return a client of a server whose answers to anything but the list of models are these, one after the other."""
    answers = answer if isinstance(answer, list) else [answer]

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models" and not known.get("first"):
            return httpx.Response(200, json=MODELS)
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    waits = known.setdefault("waits", [])
    transport = httpx.MockTransport(respond)
    return ServerClient("http://s", transport=transport, sleep=waits.append, key=known.get("key"))


def html() -> httpx.Response:
    return httpx.Response(200, html="<html>Hello</html>")


BAD_SERVERS: list[tuple[Any, str]] = [
    (html(), "answers a web page: give the address of an OpenAI-compatible server"),
    (httpx.Response(404, html="<html>"), "answers with status 404: a web page"),
    (httpx.Response(200, text="hello"), "answers no JSON"),
    (httpx.Response(200, json={"object": "list"}), "has no list of models"),
    (httpx.Response(401, json={"error": {"message": "no"}}), f"wants a key .status 401.: set {KEY}"),
    (httpx.Response(403, text=""), f"wants a key .status 403.: set {KEY}"),
    (httpx.Response(500, json={"detail": "a\nb"}), "answers with status 500: a b"),
    (httpx.Response(200, json={"data": [{"id": "a"}, {"id": "b"}]}), "has 2 models: name one by --model; it has a, b"),
    (httpx.ConnectError("refused"), "There is no server at http://s .refused."),
    (httpx.ReadTimeout("late"), "does not answer in 300 seconds"),
    (httpx.ReadError("reset"), "^http://s breaks off"),
    (httpx.Response(503), f"was busy {MOST_WAITS} times in a row"),
]


@pytest.mark.parametrize(("answer", "said"), BAD_SERVERS, ids=[said for _, said in BAD_SERVERS])
def test_bad_servers_are_refused_in_a_sentence(answer: Any, said: str) -> None:
    with pytest.raises(PolydraftError, match=said) as found:
        client(answer, first=True)
    assert "\n" not in str(found.value) and str(found.value).endswith(".")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "", "http://", "http://me:secret@host"])
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(InvalidParameter, match="--url must"):
        ServerClient(url)
    if "secret" in url:
        with pytest.raises(InvalidParameter) as found:
            ServerClient(url)
        assert "secret" not in str(found.value)


def requests(count: int) -> Any:
    return iter([SampleRequest("m", (1,), "a", 1, seed, 1) for seed in range(count)])


def test_answers_come_in_the_order_of_requests_and_waits_are_as_told() -> None:
    seen: list[int] = []

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=MODELS)
        seed = json.loads(request.content)["seed"]
        seen.append(seed)
        if seen.count(seed) == 1 and seed % 3 == 0:
            return httpx.Response(429, headers={"retry-after": "7"})
        text = {"index": 0, "text": str(seed), "token_ids": [seed]}
        return httpx.Response(200, json={"choices": [text]})

    waits: list[float] = []
    found = ServerClient("http://s", transport=httpx.MockTransport(respond), sleep=waits.append)
    texts = [answer[0].tokens for answer in found.texts(requests(40)) if answer]
    assert texts == [(seed,) for seed in range(40)] and waits == [7.0] * 14
    assert found.asked == 40 and found.lost == 0
    found.close()


def test_lost_requests_are_counted_and_never_left_out_silently() -> None:
    found = client(httpx.ReadTimeout("late"))
    assert list(found.texts(requests(3))) == [None] * 3 and found.lost == found.asked == 3
    found.close()


def test_connections_that_break_are_tried_once_more_with_the_same_seed() -> None:
    """A server closes an idle connection just when it is used again; one that breaks off twice has lost a request."""
    found = client(httpx.RemoteProtocolError("closed"))
    assert list(found.texts(requests(2))) == [None] * 2 and found.lost == 2
    found.close()
    asked = list[int]()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=MODELS)
        asked.append(json.loads(request.content)["seed"])
        if asked.count(asked[-1]) == 1:
            raise httpx.ReadError("reset")
        return httpx.Response(200, json=VLLM)

    found = ServerClient("http://s", transport=httpx.MockTransport(answer))
    texts = [*found.texts(iter([ASKED, ASKED_LATER]))]
    assert all(texts) and found.lost == 0 and sorted(asked) == [7, 7, 8, 8]
    found.close()


class Slow(httpx.MockTransport):
    """A server that refuses the first text and holds back the others."""

    def __init__(self) -> None:
        super().__init__(self.answer)
        self.came, self.go, self.closed = Event(), Event(), Event()

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=MODELS)
        if json.loads(request.content)["seed"]:
            self.came.set()
            self.go.wait(10)
        else:
            self.came.wait(10)
        return httpx.Response(400, json={"error": "bad"})

    def close(self) -> None:
        self.closed.set()


def test_connections_are_closed_once_what_is_in_flight_has_ended() -> None:
    """A connection that a thread opens while the client is closed would never be closed."""
    server = Slow()
    found = ServerClient("http://s", transport=server)
    with pytest.raises(ServerError, match="400"):
        list(found.texts(requests(3)))
    found.close()
    assert not server.closed.wait(0.1), "a request is on its way"
    server.go.set()
    assert server.closed.wait(10)


def test_a_client_that_is_closed_asks_no_more() -> None:
    """A server that is busy is asked again and again: not for somebody who has left, and nobody waits for that."""
    asked, busy = list[int](), httpx.Response(503, headers={"retry-after": "60"})

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=MODELS)
        asked.append(json.loads(request.content)["seed"])
        return busy if asked[-1] else httpx.Response(400, json={"error": "bad"})

    found = ServerClient("http://s", transport=httpx.MockTransport(answer))
    with pytest.raises(ServerError, match="400"):
        list(found.texts(requests(3)))
    found.close()
    found._pool.shutdown(wait=True)  # ends at once: waits are over, and nothing is sent
    assert sorted(set(asked)) == [0, *range(1, len(set(asked)))] and len(asked) == len(set(asked))


def test_a_client_that_cannot_be_made_lets_go_of_its_connections() -> None:
    server = Slow()
    with pytest.raises(ServerError, match="has no model 'x'"):
        ServerClient("http://s", "x", transport=server)
    assert server.closed.wait(10)


def test_a_model_that_changes_is_noticed() -> None:
    found = client(httpx.Response(200, json=MODELS))
    found.check_same_models()
    found.cards = [{"id": "other"}]
    with pytest.raises(ServerError, match="changed its models"):
        found.check_same_models()
    found.close()


def test_the_key_is_sent_and_not_shown() -> None:
    keys: list[str] = []

    def respond(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers.get("authorization", ""))
        return httpx.Response(200, json=MODELS) if len(keys) < 2 else httpx.Response(400, json={"error": "bad"})

    found = ServerClient("http://s", key="top-secret", transport=httpx.MockTransport(respond))
    with pytest.raises(ServerError) as error:
        list(found.texts(requests(1)))
    assert keys[0] == "Bearer top-secret" and "top-secret" not in str(error.value)
    found.close()
