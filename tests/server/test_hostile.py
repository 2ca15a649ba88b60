"""Clients that mean no good, and operators who put the server elsewhere: what must not grow, leak or stand still."""

import asyncio
import gc
import itertools
import json
import logging
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from pydantic import BaseModel, ValidationError
from serving import PROMPT, ask, chunks, client, error, until
from serving import served as served_at

from polydraft.engine import Method, RunningBatch, as_drafter
from polydraft.engine.choices import Choices, chosen_method
from polydraft.engine.many.asked import PromptRequest, request_for
from polydraft.errors import ContextOverflow
from polydraft.models import HuggingFaceModel, Pair
from polydraft.probs import SamplingParams
from polydraft.server import Settings
from polydraft.server.front import answering, door
from polydraft.server.front.desk import Desk
from polydraft.server.front.metrics import Metrics
from polydraft.server.wire import answers
from polydraft.server.wire.error_answers import Refused
from polydraft.server.wire.requests import ChatBody, CompletionBody, DetokenizeBody
from polydraft.server.worker import Ask, Cancel, Event, Spell
from polydraft.server.worker.answer_text import AnswerText
from polydraft.server.worker.served import LoadedModels, load_served
from polydraft.server.worker.working import Preparing, _heard
from polydraft.server.worker.writing import Writing

ORIGIN = {"origin": "https://example.org"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[TestClient]:
    with client(keys=("k",), origins=(ORIGIN["origin"],), deadline=0.4) as found:
        yield found


@pytest.fixture(scope="module")
def served() -> LoadedModels:
    return load_served(Settings())


def test_a_key_is_asked_for_also_where_the_app_is_mounted(guarded: TestClient) -> None:
    mounted = TestClient(guarded.app, root_path="/llm")
    for path in ("/llm/v1/models", "/v1/models"):
        assert mounted.get(path).status_code == 401
        assert mounted.get(path, headers={"authorization": "Bearer k"}).status_code == 200
    assert mounted.post("/llm/tokenize", json={"prompt": "a"}).status_code == 401


def test_pages_from_elsewhere_may_ask_whether_they_may_send_a_key(guarded: TestClient) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = guarded.options("/v1/completions", headers={**ORIGIN, **asked})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ORIGIN["origin"]
    refused = guarded.get("/v1/models", headers=ORIGIN)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == ORIGIN["origin"]


def test_an_error_of_ours_is_logged_as_such_and_has_its_id(
    guarded: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bytes:
        raise KeyError("secret")

    monkeypatch.setattr(guarded.app.state.desk.metrics, "text", broken)  # pyright: ignore
    with caplog.at_level(logging.INFO, "polydraft.server"):
        answer = guarded.get("/metrics", headers={"x-request-id": "mine"})
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "mine"
    assert "secret" not in answer.text and "KeyError" not in answer.text and "mine" in answer.text
    failed = [one.told for one in caplog.records if one.getMessage() == "request failed"]  # pyright: ignore
    assert [one["id"] for one in failed] == ["mine"] and "KeyError: 'secret'" in failed[0]["error"]
    assert [one.told["status"] for one in caplog.records if one.getMessage() == "request"] == [500]  # pyright: ignore


@pytest.mark.long(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_large_answers_are_made_beside_the_event_loop(
    app: TestClient, monkeypatch: pytest.MonkeyPatch, large: bool, stream: bool
) -> None:
    threads, usual, fields = set[int](), answers.as_json, {"prompt": [5] * 40, "echo": True, "logprobs": 20, "seed": 1}
    fields |= {"n": 8 if large else 1, "max_tokens": 1}
    texts = [one["text"] for one in ask(app, **fields)["choices"]]
    monkeypatch.setattr(answers, "as_json", lambda told: (threads.add(threading.get_ident()), usual(told))[1])
    monkeypatch.setattr(answering, "as_json", answers.as_json)
    loop = app.portal.call(threading.get_ident)  # pyright: ignore
    if stream:
        found = [one for part in chunks(app, **fields) for one in part["choices"]]
        assert texts == ["".join(one["text"] for one in found if one["index"] == own) for own in range(fields["n"])]
    else:
        assert texts == [one["text"] for one in ask(app, **fields)["choices"]]
    assert (threads == {loop}) is not large and (stream or not large or loop not in threads)


@pytest.mark.parametrize("reads", [True, False], ids=["gone before the first event", "never reads"])
def test_a_stream_that_nobody_reads_is_let_go(
    guarded: TestClient, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(answering, "LATE", 0.1)
    desk: Desk = guarded.app.state.desk  # pyright: ignore
    body = json.dumps({"prompt": PROMPT, "max_tokens": 2, "stream": True}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"authorization", b"Bearer k")],
    }
    told = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if told:
            return told.pop()
        while not (reads and desk.tickets and next(iter(desk.tickets.values())).held):
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        await asyncio.sleep(100)

    async def served_to() -> None:
        await asyncio.wait_for(guarded.app(scope, receive, send), 5)  # pyright: ignore

    assert guarded.portal is not None
    guarded.portal.call(served_to)
    assert not desk.tickets


def test_a_body_that_comes_too_slowly_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "BODY_SECONDS", 1.0)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 2, "seed": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with served_at() as address, httpx.Client(base_url=address, timeout=30) as found:

        def answered(parts: list[bytes], pause: float) -> bytes:
            with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 20) as line:
                for part in (head, *parts):
                    line.sendall(part)
                    time.sleep(pause)
                return b"".join(iter(lambda: line.recv(4096), b""))

        begun = time.monotonic()
        late = answered([body[:9], body[9:20]], 0.1)  # the rest never comes
        assert late.startswith(b"HTTP/1.1 408 ") and 1 <= time.monotonic() - begun < 15
        told = json.loads(late.partition(b"\r\n\r\n")[2])["error"]
        assert told["message"] == "The body did not come within 1 seconds." and told["type"] == "invalid_request_error"
        assert answered([body[:9], body[9:20], body[20:]], 0.05).startswith(b"HTTP/1.1 200 ")
        assert 'request_refused_total{model_name="polydraft-embedded",status="408"} 1.0' in found.get("/metrics").text


FLOODS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionBody, {"prompt": ["a", 1] * 1000}),
    (CompletionBody, {"prompt": [["a"] * 10] * 1000}),
    (CompletionBody, {"prompt": "a"} | {f"f{number}": 1 for number in range(1000)}),
    (CompletionBody, {"prompt": "a", "prediction": {"type": "content", "content": [1] * 2000}}),
    (CompletionBody, {"prompt": "a", "stop_token_ids": ["a"] * 1000}),
    (ChatBody, {"messages": [{"role": "user", "content": "x", "tool_calls": [1] * 2000}]}),
    (DetokenizeBody, {"tokens": ["a"] * 2000}),
]


@pytest.mark.parametrize(("kind", "fields"), FLOODS, ids=lambda one: str(one)[:40])
def test_a_body_has_few_errors_however_much_is_wrong(kind: type[BaseModel], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as found:
        kind.model_validate(fields)
    assert found.value.error_count() < 10


def test_names_that_are_wrong_are_not_sent_back_whole(app: TestClient) -> None:
    status, told = error(app, "/v1/completions", **{"prompt": PROMPT, "user": "u", "x" * 5000: 1, "y": 1})
    assert status == 400 and told["code"] == "unknown_field" and len(json.dumps(told)) < 500


def test_fields_that_ask_for_something_are_not_dropped(app: TestClient) -> None:
    assert error(app, prompt=PROMPT, best_of=2)[1]["param"] == "best_of"
    assert len(ask(app, best_of=2, n=2)["choices"]) == 2
    status, told = error(app, prompt=PROMPT, speculative={"tree": "auto"})
    assert status == 400 and told["param"] == "speculative.tree"


def test_tokens_to_be_spelt_have_a_queue_too() -> None:
    async def flooded() -> None:
        desk = Desk(Settings(batch_size=1, max_queue=2), Metrics("m"))
        desk.told = {"context": 1}  # the model is loaded anew just now
        waiting = [asyncio.ensure_future(desk.submit(Spell(str(number), "a"))) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Refused) as found:
            await desk.submit(Spell("more", "a"))
        assert found.value.status == 429
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not desk.tickets

    asyncio.run(flooded())


def test_what_was_predicted_is_forgotten_with_its_text(served: LoadedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, made = Writing(served, lambda event: None), list[weakref.ref[Method]]()
    method_for, warned = writing.shelf.method_for, writing._observer._warned

    def noted(speculation: Any, params: SamplingParams, prediction: tuple[int, ...] = (), draft: Any = None) -> Method:
        method = method_for(speculation, params, prediction, draft)
        if prediction:
            made.append(weakref.ref(method))
            warned.add(id(method))  # as if its drafter had failed
        return method

    monkeypatch.setattr(writing.shelf, "method_for", noted)
    for number in range(3):
        writing.take(Ask(str(number), (PROMPT,), seed=1, max_tokens=4, prediction="def fib(n):\n    return"))
    writing.cancel("2")
    while not writing.idle:
        writing.step()
    writing.take(Ask("plain", (PROMPT,), seed=1, max_tokens=4))  # else the last step is still known
    while not writing.idle:
        writing.step()
    gc.collect()
    assert len(made) == 5 and not any(one() for one in made) and not warned


def test_who_sends_without_end_does_not_stop_the_texts(served: LoadedModels) -> None:
    said: list[Event] = []
    writing = Writing(served, said.append)
    writing.take(Ask("text", (PROMPT,), seed=1, max_tokens=4))
    begun, preparing, count = time.monotonic(), Preparing(served), itertools.count()
    assert _heard(writing, preparing, lambda _: Spell(str(next(count)), PROMPT, texts=True))
    assert time.monotonic() - begun < 5
    until(lambda: _heard(writing, preparing, lambda _: None) and any(one.kind == "spelt" for one in said))
    preparing.end()
    spelt = next(one.said for one in said if one.kind == "spelt")
    assert "".join(spelt["texts"]) == PROMPT


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_cannot_be_told_is_lost_alone(
    app: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    gained = AnswerText.gained

    def failing(self: AnswerText, *given: Any) -> dict[str, Any]:
        if self.ask.stop == ("never",):
            raise OverflowError("no such token")
        return gained(self, *given)

    monkeypatch.setattr(AnswerText, "gained", failing)
    body = {"prompt": PROMPT, "stop": "never", "n": 2, "stream": stream}
    with caplog.at_level(logging.INFO, "polydraft.server"):
        answer = app.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert answer.status_code == (200 if stream else 500)
    assert "under the id mine." in answer.text and "no such token" not in answer.text
    failed = [one.told for one in caplog.records if one.getMessage() == "request failed"]  # pyright: ignore
    assert failed == [{"id": "mine", "error": "OverflowError: no such token"}]
    assert ask(app, seed=1)["choices"][0]["finish_reason"] == "length"


def test_a_stream_tells_its_seeds_and_where_its_tokens_stand(app: TestClient) -> None:
    pieces = chunks(app, echo=True, logprobs=1, n=2, max_tokens=4)
    whole = ask(app, echo=True, logprobs=1, n=2, max_tokens=4, seed=pieces[-1]["polydraft"]["seeds"][0])
    assert whole["polydraft"] == pieces[-1]["polydraft"]
    for choice in whole["choices"]:
        own = [one for piece in pieces for one in piece["choices"] if one["index"] == choice["index"]]
        found = [place for one in own for place in one["logprobs"]["text_offset"]]
        assert found == choice["logprobs"]["text_offset"]


def test_prompts_that_are_told_are_scored_one_between_two_steps(served: LoadedModels) -> None:
    said: list[Event] = []
    writing = Writing(served, said.append)
    writing.take(Ask("text", (PROMPT,), seed=1, max_tokens=40, options={"temperature": 0.0}))
    writing.take(Ask("echo", ("a b", "c d", "e f"), seed=1, max_tokens=0, logprobs=2, echo=True))
    writing.take(Ask("gone", ("a b", "c d"), seed=1, max_tokens=0, echo=True))
    writing.cancel("gone")
    for _ in range(2):
        writing.step()
    assert not any(one.name == "echo" for one in said) and any(one.kind == "gained" for one in said)
    while not writing.idle:
        writing.step()
    begun = next(one.said for one in said if one.name == "echo")
    assert [one["text"] for one in begun["echo"]] == ["a b", "c d", "e f"]
    assert not any(one.name == "gone" for one in said)


@pytest.mark.long(1)
@pytest.mark.parametrize("goes_on", [True, False], ids=["in chunks", "a model that cannot go on"])
def test_a_long_prompt_that_is_told_is_read_in_chunks(goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    served, said, widths = load_served(Settings(chunk=32)), list[Event](), list[int]()
    model, prompt = served.target.model, tuple(served.ids("x = [1, 2, 3]\nfor y in x:\n    print(y)\n" * 20)[:300])
    with torch.inference_mode():
        rows = model(input_ids=torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    usual = model.forward

    def forward(*given: Any, input_ids: Any = None, **more: Any) -> Any:
        output = usual(*given, input_ids=input_ids, **more)
        widths.append(input_ids.shape[1])
        if not goes_on:
            return type(output)(logits=output.logits)
        return output

    writing = Writing(served, said.append)
    writing.take(Ask("text", (PROMPT,), seed=1, max_tokens=200, options={"temperature": 0.0}))
    writing.take(Ask("echo", (prompt, (1,)), seed=1, max_tokens=0, logprobs=1, echo=True))
    while not any(one.name == "echo" for one in said):
        with monkeypatch.context() as patched:
            patched.setattr(model, "forward", forward)
            writing._echo()
        writing.step()
    echo = next(one.said for one in said if one.name == "echo")["echo"]
    own = [one["logprob"] for one in echo[0]["logprobs"]]
    assert own[0] is None and own[1:] == pytest.approx(rows[range(299), prompt[1:]].tolist(), abs=1e-4)
    assert echo[0]["tokens"] == list(prompt) and [one["logprob"] for one in echo[1]["logprobs"]] == [None]
    assert max(widths) == (32 if goes_on else 299) and sum(one.kind == "gained" for one in said) >= (
        3 if goes_on else 1
    )


def test_what_cannot_fit_is_not_made_into_tokens(
    app: TestClient, served: LoadedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = time.monotonic()
    long = "word and " * 400_000
    for fields in ({"prompt": long}, {"prompt": [1] * 1_200_000}, {"prediction": {"type": "content", "content": long}}):
        status, told = error(app, "/v1/completions", **{"prompt": PROMPT, **fields})
        assert status == 400 and told["code"] == "context_length_exceeded"
        assert told["param"] == ("prediction" if "prediction" in fields else "prompt")
    assert time.monotonic() - begun < 10
    with pytest.raises(ContextOverflow):
        served.check_size(({"role": "user", "content": long},), "The prompt")
    with pytest.raises(ContextOverflow):
        served.check_size((({"role": "user", "tool_calls": [{"arguments": [long]}]},), None), "The prompt")
    served.check_size(PROMPT * 100, "The prompt")


@pytest.mark.long(2)
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/tokenize", {"prompt": "word and " * 440_000}, "prompt"),
        ("/detokenize", {"tokens": [1] * 1_900_000}, "tokens"),
        ("/v1/completions", {"prompt": [1] * 1_900_000}, "prompt"),
        ("/v1/completions", {"prompt": PROMPT, "metadata": [[]] * 1_000_000}, None),
        ("/v1/chat/completions", {"messages": [1], "metadata": ["a"] * 900_000}, "metadata"),
    ],
    ids=lambda one: str(one)[:30],
)
def test_large_bodies_are_refused_before_anybody_waits_for_them(
    path: str, body: dict[str, Any], name: str | None
) -> None:
    """A stream beside them goes on: neither the loop nor the steps wait, however large a body is."""
    raw, head = json.dumps(body, separators=(",", ":")).encode(), {"content-type": "application/json"}
    with served_at(batch_size=2) as address, httpx.Client(base_url=address, timeout=60) as found:
        long = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with found.stream("POST", "/v1/completions", json=long) as answer:
            lines, gaps = answer.iter_lines(), list[float]()
            next(lines)
            with ThreadPoolExecutor() as pool:
                refused = pool.submit(httpx.post, f"{address}{path}", content=raw, headers=head, timeout=60)
                last = time.monotonic()
                while not refused.done():
                    assert next(lines, None) is not None
                    gaps.append(time.monotonic() - last)
                    last += gaps[-1]
    told = refused.result().json()["error"]
    assert refused.result().status_code == 400 and told["param"] == name and told["message"].endswith("."), told
    assert max(gaps) < 0.6, gaps


def test_a_tokenizer_that_cannot_be_copied_is_asked_itself(
    served: LoadedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise TypeError("cannot pickle")

    with monkeypatch.context() as patched:
        patched.setattr(type(served.tokenizer), "__deepcopy__", refuse, raising=False)
        preparing = Preparing(served)
    preparing.take(Spell("spell", "a b"))
    preparing.wait(10)
    ((_, found),) = preparing.done()
    assert found.result()["tokens"] == served.ids("a b") and not preparing.busy
    preparing.end()


def test_texts_are_spelt_and_prepared_beside_the_steps(served: LoadedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    said, told = list[Event](), deque[Any]([Ask("text", (PROMPT,), seed=1, max_tokens=40), Spell("spell", "a b")])
    writing, preparing, go = Writing(served, said.append), Preparing(served), threading.Event()

    def heard() -> bool:
        return _heard(writing, preparing, lambda _: told.popleft() if told else None)

    until(lambda: heard() and preparing.busy is False)
    slow = preparing._served.tokenizer
    monkeypatch.setattr(type(slow), "__call__", lambda *_, **__: go.wait(20) and {"input_ids": [1]})
    told += [Spell("slow", "a b c"), Spell("left", "a"), Cancel("left")]
    for _ in range(3):
        assert heard() and preparing.busy
        writing.step()
    assert sum(one.kind == "gained" for one in said) >= 2 and not any(one.name == "slow" for one in said)
    go.set()
    until(lambda: heard() and any(one.name == "slow" for one in said))
    assert not any(one.name == "left" for one in said)
    preparing.end()


def test_a_prompt_with_a_salt_is_nobody_elses(app: TestClient) -> None:
    fields = {"prompt": "salt = {'a': 1, 'b': 2, 'c': 3, 'd': 4, 'e': 5}\n", "max_tokens": 1, "seed": 1}

    def cached(**more: Any) -> int:
        return ask(app, **fields, **more)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(cache_salt="s"), cached(), cached(cache_salt="s")] == [0, 0, 0] and cached() > 8


def test_a_kept_prompt_is_not_written_over_where_rows_stay(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with models that cannot branch; found by the text of a prompt that comes again."""
    told = HuggingFaceModel.facts.fget
    monkeypatch.setattr(HuggingFaceModel, "facts", property(lambda model: replace(told(model), branches=False)))
    target = HuggingFaceModel(deepcopy(pair.target).double())  # passes of other widths round otherwise
    ways = [Choices(as_drafter(pair.draft), policy="chain:3"), Choices("ngram", policy="chain:3")]
    drafted, other = (chosen_method(one, target, SamplingParams()) for one in ways)
    texts = dict[Any, list[int]]()

    def join(batch: RunningBatch, name: str, prompt: str, new: int, method: Method) -> int:
        ids = pair.tokenizer(prompt, return_tensors="pt").input_ids[0]
        options = {"temperature": 1.0, "top_k": 0, "max_new_tokens": new}
        request = request_for(target, PromptRequest(name, ids, 1, options), {})
        ending = replace(request.ending, eos=frozenset())
        return batch.join(replace(request, method=method, ending=ending))

    def written(batch: RunningBatch, until: str) -> list[int]:
        while until not in texts or any(one.name == until for one in batch.running):
            for name, gained in (found.gains() if (found := batch.step()) else {}).items():
                texts.setdefault(name, []).extend(gained.tokens)
            batch.sweep()
        return texts[until]

    prompt = "def merge(left, right, key, other):\n    return left\n"
    fresh, batch = (RunningBatch(target, drafted, 3, 300, keeps=keeps) for keeps in (0, 4))
    join(fresh, "alone", prompt, 40, drafted)
    join(batch, "long", "x = [1, 2, 3]\n", 200, other)
    join(batch, "first", prompt, 40, drafted)
    batch.step()
    batch.leave("first", keeps=False)  # else its whole text is kept, in memory of its own
    join(batch, "between", "class Zebra(object):\n    def stripes(self, many):\n        pass\n", 6, drafted)
    written(batch, "between")
    assert join(batch, "again", prompt, 40, drafted) > 8
    assert written(batch, "again") == written(fresh, "alone")
